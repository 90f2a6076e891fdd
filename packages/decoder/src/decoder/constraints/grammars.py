"""Constraints by llguidance: JSON schemas, regular expressions, Lark grammars and choices."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from decoder.checks import fault, parse_json, shown
from decoder.constraints.base import ConstraintError, ConstraintState, Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

LONGEST = 2**17  # characters of a grammar; to compile as many takes about a second
_LARGEST = 100_000  # items of a pattern when its counted repetitions are written out; more take seconds
_COMPILED = 64  # grammars per tokenizer that stay compiled, those that were used last


@dataclass(frozen=True)
class Grammar:
    """A grammar in llguidance's own form, made by `json_schema`, `regex`, `grammar` or `choice`.

    Attributes:
        kind: which of these made it.
        source: what it was made of, as text.
        form: llguidance's form of it.
    """

    kind: str
    source: str
    form: str

    def start(self, vocabulary: Vocabulary) -> "GrammarState":
        """The state at the beginning of an output; the grammar is compiled once for each tokenizer.

        Raises:
            ValueError: there is no tokenizer, or it is not a fast one; or the grammar is too complex.
        """
        return GrammarState(_compiled(self, vocabulary), vocabulary)

    def __str__(self) -> str:
        return f"{self.kind} {shown(self.source)}"


def json_schema(schema: Mapping[str, Any] | str | bool, any_whitespace: bool = True) -> Grammar:
    """JSON that holds to a schema, given as an object or as its text; True is any JSON.

    Args:
        any_whitespace: whether the model may choose the whitespace between values. Otherwise it is that of
            `json.dumps`, a space behind each comma and colon, which leaves fewer tokens to choose.

    Raises:
        ValueError: the schema cannot be met, has keywords that llguidance does not know how to keep, or is too long.
    """
    if not isinstance(schema, Mapping | str | bool):
        raise ValueError(f"a JSON schema is an object or its text, not {shown(schema)}")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from None
    parsed = parse_json(_short(text, "JSON schema"), "the JSON schema")
    for pattern in _patterns(parsed):
        _not_exploding(pattern)
    fixed = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    form = _engine().LLMatcher.grammar_from_json_schema(text, overrides=None if any_whitespace else fixed)
    return _checked("JSON schema", text, form)


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches as a whole, in the syntax of Rust's regex crate.

    Raises:
        ValueError: the pattern is not one, or is too long.
    """
    pattern = _not_exploding(_short(pattern, "regular expression"))
    return _checked("regular expression", pattern, _engine().LLMatcher.grammar_from_regex(pattern))


def grammar(source: str, **parts: Grammar) -> Grammar:
    """Text of a context-free grammar.

    Args:
        source: in llguidance's variant of Lark's syntax, with the start rule ``start``; or, as ``::=`` in it tells, in
            llama.cpp's GBNF, with the start rule ``root``.
        parts: grammars, without parts of their own, to which it refers as ``@name``.

    Raises:
        ValueError: the grammar is not one, or is too long.
    """
    source = _short(source, "grammar")
    without_texts = re.sub(r'"(?:\\.|[^"\\])*"', "s", source)
    _not_exploding(without_texts)
    lark = _lark_of(source) if "::=" in without_texts else source
    form = _engine().LLMatcher.grammar_from_lark(lark)
    if parts:
        named = [{**_listed(part.form)[0], "name": name} for name, part in parts.items()]
        form = json.dumps({"grammars": [*_listed(form), *named]})
    return _checked("grammar", source, form)


def choice(choices: Sequence[str]) -> Grammar:
    """One of these strings.

    Raises:
        ValueError: there are none, one of them is empty or no string, or they are too long together.
    """
    if (
        isinstance(choices, str | bytes)
        or not isinstance(choices, Sequence)
        or not choices
        or not all(isinstance(one, str) and one for one in choices)
    ):
        raise ValueError(f"choices are a list of strings that are not empty, at least one, not {shown(choices)}")
    source = _short(json.dumps(list(choices), ensure_ascii=False), "list of choices")
    form = "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
    return _checked("choice", source, _engine().LLMatcher.grammar_from_lark(form))


def _listed(form: str) -> list[dict[str, Any]]:
    """The parts of a grammar in llguidance's form, the one with the start first."""
    return json.loads(form)["grammars"] if form.lstrip().startswith("{") else [{"lark_grammar": form}]


def _lark_of(gbnf: str) -> str:
    _engine()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(gbnf)
    except RecursionError:
        raise ValueError("the grammar cannot be kept: its brackets lie in others too deep") from None
    except Exception as error:
        # It raises errors of several types, down to the base of all.
        raise ValueError(f"the grammar cannot be kept: {_sentence(str(error))}") from None


def _short(text: str, what: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"a {what} is text, not {shown(text)}")
    if len(text) > LONGEST:
        raise ValueError(f"the {what} has {len(text):,} characters: give one of at most {LONGEST:,}")
    if words := fault(text):
        raise ValueError(f"the {what} {words}")
    return text


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions in a schema."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one.values()
            if isinstance(one.get("pattern"), str):
                yield one["pattern"]
            if isinstance(one.get("patternProperties"), dict):
                yield from one["patternProperties"]


def _not_exploding(pattern: str) -> str:
    """The pattern, if its counted repetitions, which may be nested, do not multiply to too much."""
    sizes, last = [0], 0
    for item in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", pattern, re.DOTALL):
        if item[0] == "(":
            sizes.append(0)
        elif item[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif item[1]:
            times = int((item[2] or item[1])[:9])
            sizes[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            sizes[-1] += 1
    if sum(sizes) > _LARGEST:
        raise ValueError(f"the pattern {shown(pattern)} repeats more than {_LARGEST:,} items: give it smaller counts")
    return pattern


def _checked(kind: str, source: str, form: str) -> Grammar:
    engine = _engine()
    if error := engine.LLMatcher.validate_grammar(form, limits=_limits(engine)):
        raise ValueError(f"the {kind} cannot be kept: {_sentence(error)}")
    return Grammar(kind, source, form)


def _limits(engine: ModuleType) -> Any:
    """llguidance's own, but for messages that show all of a grammar."""
    return engine.LLParserLimits(verbose_errors=False)


def _sentence(error: str) -> str:
    """What llguidance says, in one line."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:500]


def _engine() -> ModuleType:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ValueError(
            "constraints by grammars need llguidance, which is not installed: "
            "pip install 'tokenswift-decoder[constraints]'"
        ) from None
    return llguidance


class _Compiled:
    """The grammars that were compiled for one vocabulary, each as a matcher that texts copy."""

    def __init__(self, vocabulary: Vocabulary):
        tokenizer = vocabulary.tokenizer
        if tokenizer is None:
            raise ValueError("constraints by grammars need a tokenizer: give the Decoder one")
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(
                f"constraints by grammars need one of transformers' fast tokenizers, not {type(tokenizer).__name__}"
            )
        from llguidance.hf import from_tokenizer

        # Where no end token ends the text, one is needed all the same; `GrammarState.mask` leaves it out.
        self.ends = sorted(vocabulary.end_ids) or [tokenizer.eos_token_id or 0]
        self._tokens = from_tokenizer(tokenizer, max(vocabulary.size, len(tokenizer)), self.ends)
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Any:
        """A matcher of the grammar that nothing has moved."""
        with self._lock:
            found = self._matchers.pop(grammar.form, None)
        # Not within the lock: to compile a large one takes a second, in which other texts are to begin.
        found = found or self._compile(grammar)
        with self._lock:
            self._matchers[grammar.form] = found
            while len(self._matchers) > _COMPILED:
                self._matchers.popitem(last=False)
            return found.deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        engine = _engine()
        made = engine.LLMatcher(self._tokens, grammar.form, log_level=0, limits=_limits(engine))
        if made.is_error():
            raise ValueError(f"the {grammar.kind} cannot be kept: {_sentence(made.get_error())}")
        return made


_all: "WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple, _Compiled]]" = WeakKeyDictionary()
_lock = threading.Lock()  # a server checks requests beside the thread that decodes


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> Any:
    tokenizer = vocabulary.tokenizer
    with _lock:
        own = {} if tokenizer is None else _all.setdefault(tokenizer, {})
        # A user may add tokens to a tokenizer.
        key = vocabulary.size, vocabulary.end_ids, 0 if tokenizer is None else len(tokenizer)
        if key not in own:
            own[key] = _Compiled(vocabulary)
    return own[key].matcher(grammar)


class GrammarState(ConstraintState):
    """Where a text stands in a `Grammar`.

    A matcher of llguidance 1.9 whose mask was computed before it is rolled back may give wrong masks from then on. So
    masks come from a matcher that goes with the text and never back, and elsewhere from copies of the one that does.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary):
        self._matcher, self._vocabulary = matcher, vocabulary
        self._settled, self._ahead = matcher.deep_copy(), list[int]()
        self._ends = sorted(vocabulary.end_ids)
        tokenizer = vocabulary.tokenizer
        self._stand_in = None if self._ends or tokenizer is None else tokenizer.eos_token_id or 0

    def mask(self) -> "torch.Tensor":
        import numpy as np
        import torch

        matcher = self._matcher.deep_copy() if self._ahead else self._settled
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        _check(matcher)
        mask = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)
        if self._stand_in is not None:
            mask[self._stand_in] = False
        return torch.from_numpy(mask)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        _check(self._matcher)
        self._ahead.append(token)

    def rewind(self, count: int) -> None:
        self._matcher.rollback(count)
        _check(self._matcher)
        del self._ahead[len(self._ahead) - count :]

    def settle(self) -> None:
        self._settled.consume_tokens(self._ahead)
        _check(self._settled)
        self._ahead.clear()

    def allows(self, token: int) -> bool:
        if token in self._vocabulary.end_ids:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 1 and token != self._stand_in

    def forced(self) -> Sequence[int]:
        tokens = self._matcher.compute_ff_tokens()
        if not tokens and self._matcher.is_stopped() and len(self._ends) == 1:
            return self._ends
        return tokens


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise ConstraintError(f"the text cannot go on in its grammar: {_sentence(matcher.get_error())}")
