"""Splits the text of an answer, as it comes, into reasoning, content and tool calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from decoder.serve.tool_forms import ToolForm

BEGIN, END = "<think>", "</think>"
Reasoning = Literal["begun", "open"]
"""Whether an answer begins in its reasoning, or the model decides whether to reason."""


@dataclass(frozen=True)
class Part:
    """What a piece of text adds to an answer.

    Attributes:
        kind: "call" is the beginning of a call, whose ``text`` is the function's name; "arguments" are of the last one.
        text: never empty, but for arguments.
        call: the index of the call.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = 0


class AnswerParts:
    """Takes the text of one answer piece by piece.

    Args:
        reasoning: None where there is none.
        form: of calls; None where none are looked for.
        only_calls: whether what begins as a call can be nothing else, and is left out where the text's end cuts it
            short; else it may be an answer in JSON.

    Attributes:
        calls: how many calls have begun.
    """

    def __init__(self, reasoning: Reasoning | None = None, form: ToolForm | None = None, only_calls: bool = True):
        self._form, self._only_calls, self.calls = form, only_calls, 0
        states = {None: self._in_content, "begun": self._in_reasoning, "open": self._open}
        self._state: Callable[[bool], bool] = states[reasoning]
        self._buffer, self._parts = "", list[Part]()
        self._spaces = ""  # whitespace that is left out if nothing of its kind follows
        self._at_start = reasoning is not None  # whether whitespace is left out that comes first
        self._value = JsonValue()

    @property
    def called(self) -> bool:
        """Whether there are calls, of which the last has all its arguments."""
        return self.calls > 0 and self._state != self._in_arguments

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """What a piece of the text adds; with ``final`` nothing is held back any more."""
        self._buffer += text
        # Each state tells whether it has come further, perhaps to another state.
        while self._state(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _open(self, final: bool) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith(BEGIN):
            self._buffer, self._state = begun[len(BEGIN) :], self._in_reasoning
            return True
        if BEGIN.startswith(begun) and not final:
            return False
        self._state, self._at_start = self._in_content, False
        return True

    def _in_reasoning(self, final: bool) -> bool:
        if not self._until(END, "reasoning", final):
            return False
        self._buffer = self._buffer.removeprefix(END)
        self._state, self._spaces, self._at_start = self._in_content, "", True
        return True

    def _in_content(self, final: bool) -> bool:
        form = self._form
        if form is None or not self._buffer:
            self._put("content", self._take(len(self._buffer)), final)
            return False
        if form.mark:
            if not self._until(form.mark, "content", final):
                return False
        elif self.calls or not form.first.match(self._buffer.lstrip(), partial=True):
            self._form = None
            return True
        return self._call(form.first, final)

    def _call(self, pattern, final: bool) -> bool:
        """A call begins here, if the pattern matches; what does not match is content."""
        start = len(self._buffer) - len(self._buffer.lstrip())
        found = pattern.match(self._buffer, start, partial=True)
        if found is not None and not found.partial:
            self._take(found.end())
            self._spaces = ""
            self._parts.append(Part("call", found[1], self.calls))
            self.calls, self._value, self._state = self.calls + 1, JsonValue(), self._in_arguments
            return True
        if found is not None and not final:
            return False
        if found is not None and self._buffer[start:] and self._only_calls:
            self._cut_off()
            return False
        self._form, self._state = None, self._in_content
        return True

    def _cut_off(self) -> None:
        """Leave out the markup of a call that the text's end cuts short before its arguments, or behind them."""
        self._buffer, self._spaces = "", ""

    def _in_arguments(self, final: bool) -> bool:
        end = self._value.end(self._buffer)
        if text := self._take(len(self._buffer) if end is None else end):
            self._parts.append(Part("arguments", text, self.calls - 1))
        if end is None:
            return False
        self._state = self._behind_call
        return True

    def _behind_call(self, final: bool) -> bool:
        assert self._form is not None
        following = self._form.next.match(self._buffer, partial=True)
        if following is not None and not following.partial:
            return self._call(self._form.next, final)
        end = self._form.end.match(self._buffer, partial=True)
        if following is not None or (end is not None and end.partial):
            if final:
                self._cut_off()
            return False
        self._take(end.end() if end else 0)
        self._form, self._state, self._at_start = None, self._in_content, True
        return True

    def _until(self, mark: str, kind: Literal["reasoning", "content"], final: bool) -> bool:
        """Put the text up to a mark; whether the mark is there. A beginning of the mark at the end is held back."""
        at = self._buffer.find(mark)
        if at >= 0:
            self._put(kind, self._take(at), final=False)
            return True
        held = 0 if final else next(n for n in range(len(mark) - 1, -1, -1) if self._buffer.endswith(mark[:n]))
        self._put(kind, self._take(len(self._buffer) - held), final)
        return False

    def _put(self, kind: Literal["reasoning", "content"], text: str, final: bool) -> None:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        # What stands in front of a mark is for the mark's sake.
        text = self._spaces + text
        kept = text if kind == "content" and (final or self._form is None) else text.rstrip()
        self._spaces = text[len(kept) :]
        if kept:
            self._parts.append(Part(kind, kept))

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


class JsonValue:
    """Finds the end of an object that comes in pieces."""

    def __init__(self):
        self._depth, self._in_text, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """The index behind the object's end in the next piece; None where it goes on."""
        for index, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped, self._in_text = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None
