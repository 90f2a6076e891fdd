"""The forms in which chat templates teach models to write tool calls, each with its grammar and its beginning."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import regex
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decoder import constraints
from decoder.constraints import Grammar

NAME = r"[A-Za-z0-9_.-]{1,64}"
_SPACE = "\0"  # stands in a form for whitespace that may be there
_PROBE = "probe_of_tools"


@dataclass(frozen=True)
class ToolForm:
    """How calls are written: ``opening before NAME between ARGUMENTS after separator before ... after closing``.

    Attributes:
        marks: texts in it that are single tokens where the vocabulary has such.
        mark: what no text in front of calls may have in it; "" where a text may not begin as a call does.
        optional: a mark that may stand in front of all.
    """

    marks: tuple[str, ...]
    mark: str
    before: str
    between: str
    after: str
    separator: str = ""
    opening: str = ""
    closing: str = ""
    optional: str = ""

    @cached_property
    def first(self) -> regex.Pattern:
        """What stands in front of the first call's arguments; its group is the name."""
        return self._pattern(self.opening, f"(?:{_escaped(self.optional)})?")

    @cached_property
    def next(self) -> regex.Pattern:
        """What stands between the arguments of two calls; its group is the name of the second."""
        return self._pattern(self.after + self.separator)

    @cached_property
    def end(self) -> regex.Pattern:
        """What stands behind the arguments of the last call."""
        return regex.compile(_escaped(self.after + self.closing))

    def _pattern(self, in_front: str, optional: str = "") -> regex.Pattern:
        return regex.compile(optional + _escaped(in_front + self.before) + f"({NAME})" + _escaped(self.between))

    def grammar(
        self,
        tools: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        required: bool,
        parallel: bool,
        answer: Grammar | None = None,
    ) -> Grammar:
        """The grammar of an answer.

        Args:
            tools: the schema of the arguments, by the function's name.
            tokenizer: tells which marks are tokens.
            required: whether the answer is calls and no text.
            parallel: whether there may be several calls.
            answer: what the answer must be where it has no calls; None for any text.

        Raises:
            ValueError: as `constraints.grammar`.
        """
        calls = f"{self._lark(self.opening, tokenizer)} call"
        if parallel:
            calls += f" ({self._lark(self.separator, tokenizer)} call)*"
        rules = [f"calls: {calls} {self._lark(self.closing, tokenizer)}"]
        if self.optional:
            rules[0] = rules[0].replace("calls:", f"calls: ({self._lark(self.optional, tokenizer)})?", 1)
        for index, (name, schema) in enumerate(tools.items()):
            written = self._lark(self.before + name + self.between, tokenizer), self._lark(self.after, tokenizer)
            rules.append(f"call_{index}: {written[0]} arguments_{index} {written[1]}")
            rules.append(f"arguments_{index}: %json {json.dumps(on_one_line(schema))}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        if required:
            rules.append("start: calls")
        elif answer is not None:
            return constraints.grammar("\n".join([*rules, "start: calls | @answer"]), answer=answer)
        elif self.mark:
            rules += ["start: TEXT calls?", rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{_escaped(self.mark)}(.|\n)*/"]
        else:
            rules += ["start: TEXT | calls", r"TEXT: /(.|\n)*/ & ~/\s*\{(.|\n)*/"]
        return constraints.grammar("\n".join(rules))

    def _lark(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """A part of the form in Lark's syntax."""
        parts = []
        for piece in re.split(f"({'|'.join(map(re.escape, (*self.marks, _SPACE)))})", text):
            if piece == _SPACE:
                parts.append(r"/[ \n]{0,2}/")
            elif piece in self.marks and (token := token_of(piece, tokenizer)) is not None:
                parts.append(f"<[{token}]>")
            elif piece:
                parts.append(json.dumps(piece))
        return " ".join(parts)


def _escaped(text: str) -> str:
    return r"\s*".join(re.escape(piece).replace("/", r"\/") for piece in text.split(_SPACE))


def token_of(text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The one added token that a text is, if there is one."""
    added = tokenizer.get_added_vocab()
    return added.get(text)


def on_one_line(schema: Any) -> Any:
    """A schema whose JSON has the whitespace of templates' ``tojson``."""
    fixed = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": fixed}


_LISTED = dict(before='{"name": "', between='", "arguments": ', after="}", separator=", ")
HERMES = ToolForm(
    marks=("<tool_call>", "</tool_call>"),
    mark="<tool_call>",
    before='<tool_call>\n{"name": "',
    between='", "arguments": ',
    after="}\n</tool_call>",
    separator="\n",
)
LLAMA = ToolForm(
    marks=("<|python_tag|>",),
    mark="",
    before='{"name": "',
    between='", "parameters": ',
    after="}",
    separator="; ",
    optional="<|python_tag|>",
)
MISTRAL = ToolForm(
    marks=("[TOOL_CALLS]",), mark="[TOOL_CALLS]", opening=f"[TOOL_CALLS]{_SPACE}[", closing="]", **_LISTED
)
MISTRAL_ARGS = ToolForm(
    marks=("[TOOL_CALLS]", "[ARGS]"), mark="[TOOL_CALLS]", before="[TOOL_CALLS]", between="[ARGS]", after=""
)
GRANITE = ToolForm(
    marks=("<|tool_call|>",), mark="<|tool_call|>", opening=f"<|tool_call|>{_SPACE}[", closing="]", **_LISTED
)
_TAUGHT = (
    # What tells the form in a template's text; the first that is there counts.
    ("<|tool_call|>", GRANITE),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", LLAMA),
    ('"parameters": dictionary', LLAMA),
)
_OTHERS = ("<function=", "<arg_key>", "<invoke")  # XML in <tool_call> or beside it, for which there is no form here


@lru_cache
def form_of(template: str) -> ToolForm | None:
    """The form of calls that a chat template teaches; None where it passes on no tools, or the form is not known."""
    if not _passes_on_tools(template) or any(one in template for one in _OTHERS):
        return None
    return next((form for told, form in _TAUGHT if told in template), None)


def _passes_on_tools(template: str) -> bool:
    """Whether a template writes down the tools that it is given, which is tried."""
    function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools: Sequence[dict[str, Any]] = [{"type": "function", "function": function}]
    for chat in (
        [{"role": "user", "content": "0"}],
        [{"role": "system", "content": "0"}, {"role": "user", "content": "0"}],
    ):
        try:
            [text], _ = render_jinja_template([chat], tools=tools, chat_template=template, add_generation_prompt=True)
        except Exception:
            # Templates raise errors of any type where they do not take a chat.
            continue
        if _PROBE in text:
            return True
    return False
