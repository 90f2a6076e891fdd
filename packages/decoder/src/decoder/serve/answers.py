"""The answers of OpenAI's protocol: completions and chats, whole and in pieces."""

import json
import secrets
import string
import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoder.serve.answer_parts import Part
from decoder.serve.errors import ApiError
from decoder.serve.prompt_logprobs import Scores, of_completion, of_vllm
from decoder.serve.requests import Asked
from decoder.serve.service import Prepared, Service
from decoder.serve.speech import Thought
from decoder.serve.worker import Piece
from decoder.text.tokens import TextOffsets, TokenTexts


class Answer:
    """Gives the bodies of one request's answer.

    Args:
        asked: the request.
        service: what has taken it.
        prepared: the request as it was read.
    """

    def __init__(self, asked: Asked, service: Service, prepared: Prepared):
        self.asked, self.prompt_tokens = asked, prepared.prompt_tokens
        contexts = self._contexts = [one.context for one in prepared.arguments]
        self._texts = TokenTexts(service.tokenizer, prepared.speech.shown)
        self._kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if asked.chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": service.settings.model,
            "system_fingerprint": service.fingerprint,
        }
        self._echoed = [self._echo(service.tokenizer, index, ids) for index, ids in enumerate(contexts)]
        self._before = list(map(len, self._echoed))  # characters in front of what is generated
        self._begun: set[int] = set()
        self._offsets = [TextOffsets(self._texts, ids) for ids in contexts]
        self._held: list[list[tuple[int, float, list[tuple[int, float]]]]] = [[] for _ in contexts]
        self._parts = [prepared.speech.parts(asked) for _ in contexts]
        self._generated, self._cached, self._drafted, self._accepted = 0, 0, 0, 0
        self._thoughts = [Thought(prepared.speech) for _ in contexts]

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from all pieces of each choice."""
        choices = []
        for index, of_choice in enumerate(pieces):
            for piece in of_choice:
                self._count(piece)
            output = of_choice[-1].output
            assert output is not None, "the last piece has the whole text"
            prompt, logprobs = of_choice[-1].prompt_logprobs, self._logprobs(index, of_choice)
            reason = output.finish_reason
            part: dict[str, Any]
            if self.asked.chat:
                part = {"message": self._message(index, output.text)}
                reason = self._reason(index, reason)
            else:
                part = {"text": self._echoed[index] + output.text}
                if self.asked.prompt_logprobs is not None:
                    part["prompt_logprobs"] = self._of_prompt(index, prompt)
                if logprobs is not None and (echoed := self._logprobs_of_echo(index, prompt)) is not None:
                    logprobs = {name: echoed[name] and echoed[name] + logprobs[name] for name in echoed}
            choices.append(self._choice(index, part, logprobs, reason))
        if self.asked.candidates > self.asked.n:
            choices = [choices[index] | {"index": place} for place, index in enumerate(self._best(pieces))]
        body = {**self._head, "object": self._kind, "choices": choices, "usage": self.usage}
        if self.asked.chat and self.asked.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._of_prompt(0, pieces[0][-1].prompt_logprobs)
        return body

    def _of_prompt(self, index: int, scores: Scores | None) -> list[dict[str, Any] | None]:
        assert scores is not None, "they were asked for"
        return of_vllm(self._texts, self._contexts[index], scores)

    def _logprobs_of_echo(self, index: int, scores: Scores | None) -> dict[str, Any] | None:
        """The log-probabilities of a prompt that is echoed, if they are asked for."""
        if not (self.asked.echo and self.asked.logprobs):
            return None
        assert scores is not None, "they were asked for"
        return of_completion(self._texts, self._contexts[index], scores, bool(self.asked.top_logprobs))

    def _best(self, pieces: Sequence[Sequence[Piece]]) -> list[int]:
        """Of each prompt's candidates those with the highest log-probability per token, the best one first."""
        values = [[value for piece in of_choice for value in piece.logprobs or ()] for of_choice in pieces]
        means = [sum(one) / max(1, len(one)) for one in values]
        count, best = self.asked.candidates, list[int]()
        for first in range(0, len(means), count):
            ranked = sorted(range(first, first + count), key=lambda index: -means[index])
            best += ranked[: self.asked.n]
        return best

    def _echo(self, tokenizer: PreTrainedTokenizerBase, index: int, ids: Sequence[int]) -> str:
        """The text of a choice's prompt, if the answer is to begin with it."""
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompts[index // self.asked.candidates]
        return prompt if isinstance(prompt, str) else tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _message(self, index: int, text: str) -> dict[str, Any]:
        """The message of a choice with this text."""
        texts, calls = {"reasoning": "", "content": ""}, list[dict[str, Any]]()
        for part in self._parts[index].feed(text, final=True):
            if part.kind == "call":
                calls.append(new_call(part.text))
            elif part.kind == "arguments":
                calls[-1]["function"]["arguments"] += part.text
            else:
                texts[part.kind] += part.text
        # A call that is cut short before its arguments leaves nothing.
        content = texts["content"] or (None if self.asked.tools is not None else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"function_call": calls[0]["function"]} if self._old else {"tool_calls": calls}
        if texts["reasoning"] and self.asked.include_reasoning:
            message["reasoning_content"] = texts["reasoning"]
        return message

    def _reason(self, index: int, reason: str) -> str:
        """Why a chat's answer has ended; a call that a stop cuts short is none to be made."""
        called = "function_call" if self._old else "tool_calls"
        return called if reason == "stop" and self._parts[index].called else reason

    @property
    def _old(self) -> bool:
        """Whether calls go back in OpenAI's old form."""
        return self.asked.tools is not None and self.asked.tools.old

    def ending(self) -> list[bytes]:
        """The events at the end of a stream that has not failed."""
        return [*([self._event([], self.usage)] if self.asked.include_usage else []), b"data: [DONE]\n\n"]

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that has failed; its status has been sent."""
        return event(error.body)

    def chunks(self, piece: Piece) -> list[bytes]:
        """The events of a stream that a piece of a choice gives; the first one of a chat tells the role."""
        self._count(piece)
        logprobs = self._logprobs(piece.choice, [piece])
        if self.asked.chat:
            return self._chunks_of_chat(piece, logprobs)
        events = []
        if self._echoed[piece.choice]:
            text, self._echoed[piece.choice] = self._echoed[piece.choice], ""
            of_echo = self._logprobs_of_echo(piece.choice, piece.prompt_logprobs)
            events.append(self._event([self._choice(piece.choice, {"text": text}, of_echo)]))
        if piece.text or (logprobs and any(logprobs.values())):
            events.append(self._event([self._choice(piece.choice, {"text": piece.text}, logprobs)]))
        if piece.output is not None:
            events.append(self._event([self._choice(piece.choice, {"text": ""}, None, piece.output.finish_reason)]))
        return events

    def _chunks_of_chat(self, piece: Piece, logprobs: dict[str, Any] | None) -> list[bytes]:
        index, deltas = piece.choice, list[dict[str, Any]]()
        if index not in self._begun:
            self._begun.add(index)
            deltas.append({"role": "assistant", "content": ""})
        begins = len(deltas)
        deltas += filter(None, map(self._delta, self._parts[index].feed(piece.text, piece.output is not None)))
        told = logprobs is not None and any(logprobs.values())
        if told and len(deltas) == begins:
            # Tokens that show no text, or that are a mark around a call.
            deltas.append({"content": ""})
        # All log-probabilities of the piece go with the first text that it gives.
        by_delta = [logprobs if told and place == begins else None for place in range(len(deltas))]
        choices = [self._choice(index, {"delta": one}, its) for one, its in zip(deltas, by_delta, strict=True)]
        if piece.output is not None:
            reason = self._reason(index, piece.output.finish_reason)
            choices.append(self._choice(index, {"delta": {}}, None, reason))
        return [self._event([choice]) for choice in choices]

    def _delta(self, part: Part) -> dict[str, Any] | None:
        """What a chunk says of a part of an answer, if anything."""
        if part.kind == "reasoning":
            return {"reasoning_content": part.text} if self.asked.include_reasoning else None
        if part.kind == "content":
            return {"content": part.text}
        call = new_call(part.text) if part.kind == "call" else {"function": {"arguments": part.text}}
        return {"function_call": call["function"]} if self._old else {"tool_calls": [{"index": part.call, **call}]}

    def _count(self, piece: Piece) -> None:
        self._generated += len(piece.token_ids)
        self._thoughts[piece.choice].count(piece.token_ids)
        if piece.output is not None:
            stats = piece.output.stats
            self._cached += stats.reused_tokens
            self._drafted += stats.drafted
            self._accepted += stats.accepted

    @property
    def usage(self) -> dict[str, Any]:
        """The counts of tokens; drafts are what OpenAI's protocol calls predictions."""
        drafts = {
            "accepted_prediction_tokens": self._accepted,
            "rejected_prediction_tokens": self._drafted - self._accepted,
            "reasoning_tokens": sum(one.tokens for one in self._thoughts),
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self.prompt_tokens + self._generated,
            # Of several choices for one prompt all but the first may find the prompt in a cache.
            "prompt_tokens_details": {"cached_tokens": min(self._cached, self.prompt_tokens)},
            "completion_tokens_details": drafts,
        }

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
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
        offsets = [at + self._before[index] for at in offsets]
        held += entries
        told, held[:] = held[: len(offsets)], held[len(offsets) :]
        return {
            "tokens": [self._texts.name(token) for token, _, _ in told],
            "token_logprobs": [value for _, value, _ in told],
            "top_logprobs": [self._texts.by_name(*entry) for entry in told] if self.asked.top_logprobs else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token of a chat with its log-probability."""
        # A token can be a part of a character, which has no text of its own.
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(self._texts.bytes_of(token))}


def new_call(name: str) -> dict[str, Any]:
    """A call of this function that begins."""
    # Templates of Mistral's models take ids of nine letters and digits alone.
    identity = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": ""}}


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    return (b"" if name is None else b"event: %s\n" % name.encode()) + b"data: " + json.dumps(body).encode() + b"\n\n"
