"""The answers of `/v1/responses`: items, whole and as events with names and numbers."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from decoder.serve.answer_parts import Part
from decoder.serve.answers import Answer, event, new_call
from decoder.serve.errors import ApiError
from decoder.serve.kept import Item, Kept
from decoder.serve.requests import Asked
from decoder.serve.service import Prepared, Service
from decoder.serve.worker import Piece

_TEXTS = {"reasoning": "reasoning_text", "content": "output_text"}
"""The type of the one part of an item with text, by the kind of the answer's part."""


class ResponseAnswer(Answer):
    """As `Answer`, for `/v1/responses`. A whole answer is the one that the last event of a stream has.

    Args:
        kept: takes the answer, if the request asks for that.
    """

    def __init__(self, asked: Asked, service: Service, prepared: Prepared, kept: Kept):
        super().__init__(asked, service, prepared)
        assert asked.response is not None
        self._request, self._kept = asked.response, kept
        self._id, self._number = _new("resp"), 0
        self._status, self._items = "in_progress", list[Item]()
        self._error: dict[str, str] | None = None
        self._open: str | None = None  # of the item that is open
        self._entries: list[dict[str, Any]] = []  # of tokens whose text has not come yet

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        for piece in pieces[0]:
            self.chunks(piece)
        return self._body()

    def ending(self) -> list[bytes]:
        """A stream's last event has been its answer."""
        return []

    def failed(self, error: ApiError) -> bytes:
        """The event of a stream that has failed."""
        self._status = "failed"
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        self._error = {"code": code, "message": error.message}
        return self._say("response.failed", response=self._body())

    def chunks(self, piece: Piece) -> list[bytes]:
        """The events of a piece."""
        self._count(piece)
        events: list[bytes] = []
        if not self._number:
            events += [self._say(f"response.{one}", response=self._body()) for one in ("created", "in_progress")]
        if self.asked.logprobs:
            self._entries += (self._logprobs(0, [piece]) or {})["content"]
        for part in self._parts[0].feed(piece.text, piece.output is not None):
            if part.kind != "reasoning" or self.asked.include_reasoning:
                events += self._add(part)
        if self._open not in (None, "content"):
            self._entries = []  # tokens of reasoning and calls have no place
        return events + (self._end(piece.output.finish_reason) if piece.output is not None else [])

    def _end(self, reason: str) -> list[bytes]:
        events = []
        if not self._items:
            events += self._begin("content", "")
        self._status = "incomplete" if reason == "length" else "completed"
        self._ended = int(time.time())
        events += self._close(self._status)
        response = self._body()
        if self._request.store:
            self._kept.add(response, self._request.items)
        return [*events, self._say(f"response.{self._status}", response=response)]

    def _add(self, part: Part) -> list[bytes]:
        """Add a part of the answer to the item that is open, or to a new one."""
        events: list[bytes] = []
        if part.kind == "call" or (part.kind != "arguments" and part.kind != self._open):
            events += self._close("completed") + self._begin(part.kind, part.text)
        if part.kind == "call":
            return events
        item = self._items[-1]
        if part.kind == "arguments":
            item["arguments"] += part.text
            return [*events, self._say("response.function_call_arguments.delta", **self._place(), delta=part.text)]
        item["content"][0]["text"] += part.text
        more = {}
        if part.kind == "content":
            more, self._entries = {"logprobs": self._entries}, []
            item["content"][0]["logprobs"] += more["logprobs"]
        name = f"response.{_TEXTS[part.kind]}.delta"
        return [*events, self._say(name, **self._place(content_index=0), delta=part.text, **more)]

    def _begin(self, kind: str, text: str) -> list[bytes]:
        """Begin an item; ``text`` is the name of a function that is called."""
        self._open = kind
        if kind == "call":
            identity = new_call(text)["id"]
            item = {"id": _new("fc"), "type": "function_call", "call_id": identity, "name": text, "arguments": ""}
        elif kind == "reasoning":
            item = {"id": _new("rs"), "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": _new("msg"), "type": "message", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._items.append(item)
        index = len(self._items) - 1
        events = [self._say("response.output_item.added", output_index=index, item=item)]
        if kind in _TEXTS:
            part: dict[str, Any] = {"type": _TEXTS[kind], "text": ""} | (
                {"annotations": [], "logprobs": []} if kind == "content" else {}
            )
            events.append(self._say("response.content_part.added", **self._place(content_index=0), part=part))
            item["content"] = [part]
        return events

    def _close(self, status: str) -> list[bytes]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        item, kind, self._open = self._items[-1], self._open, None
        item["status"] = status
        if kind == "call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._say("response.function_call_arguments.done", **self._place(), **told)]
        else:
            part, place = item["content"][0], self._place(content_index=0)
            if kind == "content":
                part["logprobs"] += self._entries  # of tokens that show no text, such as the last one
            told = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if kind == "content" else {})
            events = [
                self._say(f"response.{_TEXTS[kind]}.done", **place, **told),
                self._say("response.content_part.done", **place, part=part),
            ]
        return [*events, self._say("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _place(self, **more: int) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}

    def _say(self, type_: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": type_, "sequence_number": self._number - 1, **fields}, type_)

    def _body(self) -> dict[str, Any]:
        """The response as it is now."""
        sampling, done = self.asked.sampling, self._status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": self._ended if self._status == "completed" else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": cut,
            "model": self._head["model"],
            "system_fingerprint": self._head["system_fingerprint"],
            "output": self._items,
            "usage": self._usage() if done else None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "background": False,
            "service_tier": "default",
            **self._request.told,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
