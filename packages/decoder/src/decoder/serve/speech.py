"""What a model's answer to a request consists of: reasoning, text, tool calls; and its constraint behind reasoning."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from decoder.constraints import Grammar
from decoder.constraints.base import Constraint
from decoder.constraints.behind import BehindReasoning
from decoder.serve.answer_parts import BEGIN, END, AnswerParts, Reasoning
from decoder.serve.body import field_of
from decoder.serve.errors import ApiError
from decoder.serve.harmony import END as HARMONY_END
from decoder.serve.harmony import MARKS, HarmonyParts, harmony_grammar, speaks_harmony
from decoder.serve.requests import Asked
from decoder.serve.tool_forms import ToolForm, form_of, token_of
from decoder.serve.tools import Tools
from decoder.text.stream import special_ids

_END_OF_PROMPT = 32  # tokens in which a template may begin or end the reasoning of the answer


@dataclass(frozen=True)
class Speech:
    """What the text of an answer consists of.

    Attributes:
        reasoning: whether it begins with reasoning; None for a model without.
        form: of tool calls; None where none are looked for.
        grammar: what the answer must be, behind its reasoning.
        constraint: that, with the reasoning.
        shown: special tokens that the text must show.
        harmony: whether it is of gpt-oss' form, which has reasoning and calls of its own.
        thought: the tokens that begin and end reasoning; None for those that there are not.
    """

    reasoning: Reasoning | None = None
    form: ToolForm | None = None
    grammar: Grammar | None = None
    constraint: Constraint | None = None
    shown: frozenset[int] = frozenset()
    harmony: bool = False
    thought: tuple[int | None, int | None] = None, None

    def parts(self, asked: Asked) -> AnswerParts | HarmonyParts:
        """A reader of one answer."""
        if self.harmony:
            return HarmonyParts(asked.separate_reasoning)
        reasoning = self.reasoning if asked.separate_reasoning else None
        # Where calls have no mark, an answer of a shape may begin as they do.
        marked, required = bool(self.form and self.form.mark), bool(asked.tools and asked.tools.required)
        only_calls = marked or required or asked.shaped_by is None
        return AnswerParts(reasoning, self.form, only_calls)


class Thought:
    """Counts the tokens of an answer's reasoning, with the marks around it.

    Attributes:
        tokens: how many there are.
    """

    def __init__(self, speech: Speech):
        self._begin, self._end = speech.thought
        self._open, self._all, self.tokens = speech.reasoning == "begun", 0, 0
        self._first = self._begin if speech.reasoning == "open" else None

    def count(self, ids: Sequence[int]) -> None:
        """Count the next tokens."""
        for token in ids:
            self._all += 1
            self._open |= self._all == 1 and token == self._first
            # Without a token that begins it, as in gpt-oss' form, all before an end is reasoning.
            if self._open or (self._begin is None and token == self._end):
                self.tokens = self._all
            self._open &= token != self._end


def speech_of(asked: Asked, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Speech:
    """How the answer to a request is made up whose prompt has these tokens.

    Raises:
        ApiError: 400: the model's chat template knows no tools, or their grammar cannot be kept.
    """
    constraint = asked.sampling.constraint
    grammar = constraint if isinstance(constraint, Grammar) else None
    shown = frozenset[int]() if asked.skip_special_tokens else frozenset(special_ids(tokenizer))
    if not asked.chat:
        return Speech(grammar=grammar, constraint=constraint, shown=shown)
    template = tokenizer.get_chat_template()
    if speaks_harmony(template):
        return _in_harmony(asked, tokenizer, grammar, shown)
    form = None
    if asked.tools is not None:
        form, grammar = _with_tools(asked, template, tokenizer, grammar)
    reasoning, begin, end = _reasoning(template, ids, tokenizer)
    constraint = grammar
    if grammar is not None and reasoning is not None and end is not None:
        constraint = BehindReasoning(grammar, end, begin if reasoning == "open" else None, _gaps(tokenizer))
    marks = [*(form.marks if form else ()), *((BEGIN, END) if reasoning else ())]
    tokens = [token_of(mark, tokenizer) for mark in marks]
    known = shown | {token for token in tokens if token is not None}
    return Speech(reasoning, form, grammar, constraint, known, thought=(begin, end))


def _in_harmony(
    asked: Asked, tokenizer: PreTrainedTokenizerBase, answer: Grammar | None, shown: frozenset[int]
) -> Speech:
    tools, grammar = asked.tools, None
    if tools is not None or answer is not None:
        try:
            grammar = harmony_grammar(tools.schemas if tools else {}, tokenizer, bool(tools and tools.required), answer)
        except ValueError as error:
            place = asked.shaped_by or (tools.field if tools else "tools")
            raise ApiError(400, f"{place}: {error}", field_of(place)) from None
    tokens = {token for mark in MARKS if (token := token_of(mark, tokenizer)) is not None}
    thought = None, token_of(HARMONY_END, tokenizer)
    return Speech(grammar=grammar, constraint=grammar, shown=shown | tokens, harmony=True, thought=thought)


def _with_tools(
    asked: Asked, template: str, tokenizer: PreTrainedTokenizerBase, answer: Grammar | None
) -> tuple[ToolForm, Grammar]:
    tools = asked.tools
    assert tools is not None
    form = form_of(template)
    if form is None:
        words = "the chat template of this model passes on none, or teaches calls in a form that is not known here"
        raise ApiError(400, f"{tools.field}: {words}: leave them out", tools.field, "tools_not_supported")
    try:
        return form, form.grammar(tools.schemas, tokenizer, tools.required, tools.parallel, answer)
    except ValueError as error:
        place = _place_of_fault(tools, form, tokenizer) or tools.field
        raise ApiError(400, f"{place}: {error}", place) from None


def _place_of_fault(tools: Tools, form: ToolForm, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Where the schema stands that cannot be kept by itself; None if it takes several, or the answer's."""
    for name, schema in tools.schemas.items():
        try:
            form.grammar({name: schema}, tokenizer, required=True, parallel=False)
        except ValueError:
            return tools.places[name]
    return None


def _reasoning(
    template: str, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[Reasoning | None, int | None, int | None]:
    """Whether an answer has reasoning, and the tokens around it; the prompt's end may begin it, or rule it out."""
    begin, end = token_of(BEGIN, tokenizer), token_of(END, tokenizer)
    if begin is None or end is None or END not in template:
        return None, begin, end
    last = next((token for token in reversed(ids[-_END_OF_PROMPT:]) if token in (begin, end)), None)
    # An earlier answer's, which a user's message follows, stands further in front or has been left out.
    return {begin: "begun", end: None, None: "open"}[last], begin, end


def _gaps(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that are line breaks and nothing else."""
    found = [tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")]
    return tuple(ids[0] for ids in found if len(ids) == 1)
