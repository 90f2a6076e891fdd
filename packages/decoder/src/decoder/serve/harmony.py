"""gpt-oss' answers: messages in channels, of which one is the reasoning, one the answer, and others are tool calls."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from decoder import constraints
from decoder.constraints import Grammar
from decoder.serve.answer_parts import JsonValue, Part
from decoder.serve.tool_forms import NAME, on_one_line, token_of

CHANNEL, MESSAGE, START, END, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"
MARKS = (CHANNEL, MESSAGE, START, END, CONSTRAIN)


def speaks_harmony(template: str) -> bool:
    """Whether a chat template is of this form."""
    return all(mark in template for mark in (CHANNEL, MESSAGE, "to=functions"))


def harmony_grammar(
    tools: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, required: bool, answer: Grammar | None
) -> Grammar:
    """The grammar of an answer: reasoning, and then a call or a text, which ``answer`` may shape.

    Raises:
        ValueError: as `constraints.grammar`; or the vocabulary has no tokens for the marks.
    """
    tokens = {mark: token_of(mark, tokenizer) for mark in MARKS}
    if None in tokens.values():
        raise ValueError("the vocabulary has no tokens for the marks of gpt-oss' channels")
    channel, message, start, end, constrain = (f"<[{tokens[mark]}]>" for mark in MARKS)
    behind = f'{end} {start} "assistant"'
    rules = [
        f'thought: {channel} ("analysis" | "commentary") {message} TEXT {behind}',
        r"TEXT: /(.|\n)*/",
        f'final: {channel} "final" {message} {"TEXT" if answer is None else "@answer"}',
    ]
    for index, (name, schema) in enumerate(tools.items()):
        to = json.dumps(f"commentary to=functions.{name} ")
        rules.append(f'call_{index}: {channel} {to} {constrain} "json" {message} arguments_{index}')
        rules.append(f"arguments_{index}: %json {json.dumps(on_one_line(schema))}")
    last = [f"call_{index}" for index in range(len(tools))] + ([] if required else ["final"])
    rules.append(f"start: thought* ({' | '.join(last)})")
    return constraints.grammar("\n".join(rules), **({} if answer is None else {"answer": answer}))


class HarmonyParts:
    """As `AnswerParts`, for answers of this form, whose marks the text shows.

    Args:
        separate_reasoning: whether reasoning is apart from the content.
    """

    def __init__(self, separate_reasoning: bool = True):
        self._reasoning: Literal["reasoning", "content"] = "reasoning" if separate_reasoning else "content"
        self.calls, self._buffer = 0, ""
        self._value, self.called = JsonValue(), False
        self._kind: Literal["reasoning", "content", "arguments"] | None = None  # of the open message, if one is

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """What a piece of the text adds; with ``final`` nothing is held back any more."""
        self._buffer += text
        parts: list[Part] = []
        while self._body(parts, final) if self._kind else self._header(parts):
            pass
        return parts

    def _header(self, parts: list[Part]) -> bool:
        header, mark, rest = self._buffer.partition(MESSAGE)
        if not mark:
            return False
        self._buffer = rest
        if called := re.search(rf"to=functions\.({NAME})", header):
            parts.append(Part("call", called[1], self.calls))
            self._kind, self.calls = "arguments", self.calls + 1
            self._value, self.called = JsonValue(), False
        else:
            self._kind = self._reasoning if "analysis" in header else "content"
        return True

    def _body(self, parts: list[Part], final: bool) -> bool:
        ends = [at for mark in (END, START) if (at := self._buffer.find(mark)) >= 0]
        held = [n for n in range(1, len(START)) for mark in (END, START) if self._buffer.endswith(mark[:n])]
        stop = min(ends) if ends else len(self._buffer) - (0 if final else max(held, default=0))
        text, self._buffer = self._buffer[:stop], self._buffer[stop:]
        assert self._kind is not None
        if text:
            parts.append(Part(self._kind, text, max(0, self.calls - 1)))
            self.called |= self._kind == "arguments" and self._value.end(text) is not None
        if ends:
            self._buffer = self._buffer.removeprefix(END)
            self._kind = None
        return bool(ends)
