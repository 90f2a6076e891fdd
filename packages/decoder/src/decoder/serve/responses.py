"""The answers of OpenAI's protocol: completions and chats, whole and in pieces."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoder.serve.requests import Asked
from decoder.serve.worker import Piece
from decoder.text.stream import REPLACEMENT
from decoder.text.tokens import TextOffsets, TokenTexts


class Answer:
    """Gives the bodies of one request's answer.

    Args:
        asked: the request.
        model: the name of the model.
        tokenizer: for the texts of single tokens, next to log-probabilities.
        prompt_tokens: of all prompts together.
        contexts: the prompt's token ids of each choice, behind which its text begins; None where each shows some text.
    """

    def __init__(
        self,
        asked: Asked,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        prompt_tokens: int,
        contexts: Sequence[Sequence[int]] | None = None,
    ):
        self.asked, self.prompt_tokens = asked, prompt_tokens
        self._texts = TokenTexts(tokenizer)
        self._kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if asked.chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()
        before: Sequence[Sequence[int] | None] = contexts or [None] * asked.choices
        self._offsets = [TextOffsets(self._texts, ids) for ids in before]
        self._held: list[list[tuple[int, float, list[tuple[int, float]]]]] = [[] for _ in before]
        self._generated = 0

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from all pieces of each choice."""
        choices = []
        for index, of_choice in enumerate(pieces):
            self._generated += sum(len(piece.token_ids) for piece in of_choice)
            output = of_choice[-1].output
            assert output is not None, "the last piece has the whole text"
            text, logprobs = output.text, self._logprobs(index, of_choice)
            part: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
            )
            choices.append(self._choice(index, part, logprobs, output.finish_reason))
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.usage}

    def chunks(self, piece: Piece) -> list[bytes]:
        """The events of a stream that a piece of a choice gives; the first one of a chat tells the role."""
        events, index = [], piece.choice
        part: dict[str, Any]
        self._generated += len(piece.token_ids)
        if self.asked.chat and index not in self._begun:
            self._begun.add(index)
            events.append(self._event([self._choice(index, {"delta": {"role": "assistant", "content": ""}})]))
        logprobs = self._logprobs(index, [piece])
        if piece.text or (logprobs and any(logprobs.values())):
            part = {"delta": {"content": piece.text}} if self.asked.chat else {"text": piece.text}
            events.append(self._event([self._choice(index, part, logprobs)]))
        if piece.output is not None:
            part = {"delta": {}} if self.asked.chat else {"text": ""}
            events.append(self._event([self._choice(index, part, None, piece.output.finish_reason)]))
        return events

    def usage_chunk(self) -> bytes:
        """The event with the counts of tokens, which has no choices."""
        return self._event([], self.usage)

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self._generated
        return dict(prompt_tokens=self.prompt_tokens, completion_tokens=self._generated, total_tokens=total)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices}
        return event(body | ({"usage": usage} if self.asked.include_usage else {}))

    @staticmethod
    def _choice(
        index: int, part: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Tokens with their log-probabilities under the distribution that they were drawn from."""
        if not self.asked.logprobs:
            return None
        ids = [token for piece in pieces for token in piece.token_ids]
        values = [value for piece in pieces for value in piece.logprobs or ()]
        likely = [top for piece in pieces for top in piece.top_logprobs or [[]] * len(piece.token_ids)]
        entries = list(zip(ids, values, likely, strict=True))
        if self.asked.chat:
            content = [
                {**self._entry(token, value), "top_logprobs": [self._entry(*one) for one in top]}
                for token, value, top in entries
            ]
            return {"content": content, "refusal": None}
        # A token comes with its place in the text, which may depend on those behind it.
        places, held = self._offsets[index], self._held[index]
        offsets = [at for token in ids for at in places.next(token)]
        if pieces[-1].output is not None:
            offsets += places.rest()
        held += entries
        told, held[:] = held[: len(offsets)], held[len(offsets) :]
        return {
            "tokens": [self._key(token) for token, _, _ in told],
            "token_logprobs": [value for _, value, _ in told],
            "top_logprobs": [self._by_text(*entry) for entry in told] if self.asked.top_logprobs else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token of a chat with its log-probability."""
        # A token can be a part of a character, which has no text of its own.
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(self._texts.bytes_of(token))}

    def _key(self, token: int) -> str:
        """A token of a completion, whose bytes, as there is no field for them, stand for the text that it lacks."""
        text = self._texts.text(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._texts.bytes_of(token))

    def _by_text(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The log-probabilities of the most likely tokens of a completion, and of the one that was drawn, by text.

        Of several tokens with the same text the one that was drawn counts, or else the most likely one.
        """
        found: dict[str, float] = {}
        for other, value in top:
            found.setdefault(self._key(other), value)
        return {**found, self._key(token): logprob}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
