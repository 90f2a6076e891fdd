"""The kinds of values that a field of a request can have."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a value must be.

    Args:
        words: for the error message, after "must be".
        fits: whether a value is of the kind.
        schema: what JSON schema can say of it.
    """

    words: str
    fits: Callable[[Any], bool]
    schema: Mapping[str, Any]


_IDS = {"type": "array", "items": {"type": "integer"}}


def integer(least: int, most: int) -> Kind:
    words = f"an integer of at least {least:,} and at most {most:,}"
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Kind(words, lambda value: type(value) is int and least <= value <= most, schema)


def choice(names: Collection[str], why: str = "") -> Kind:
    """One of some names; ``why`` goes behind them in the error message."""
    fits = lambda value: isinstance(value, str) and value in names  # noqa: E731
    return Kind(f"one of {', '.join(names)}{why}", fits, {"enum": list(names)})


def choices(*names: str) -> Kind:
    """A list of some of these names."""
    one = choice(names)
    schema = {"type": "array", "items": one.schema}
    return Kind(
        f"a list of {', '.join(names)}", lambda value: isinstance(value, list) and all(map(one.fits, value)), schema
    )


def token_ids(most: int) -> Kind:
    """A list of ids; which ones there are is known to the vocabulary alone."""
    words = f"a list of at most {most:,} token ids"
    return Kind(words, lambda value: _is_ids(value) and len(value) <= most, {**_IDS, "maxItems": most})


def texts(longest: int, most: int) -> Kind:
    """A text that is not empty, or a list of such texts."""

    def fits(value: Any) -> bool:
        listed = value if isinstance(value, list) else [value]
        return len(listed) <= most and all(isinstance(one, str) and 0 < len(one) <= longest for one in listed)

    one = {"type": "string", "minLength": 1, "maxLength": longest}
    schema = {"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]}
    return Kind(f"text of 1 to {longest:,} characters, or a list of at most {most} of these", fits, schema)


def biases(most: int) -> Kind:
    """An object of numbers by token ids, which JSON writes as texts."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or len(value) > most:
            return False
        return all(name.isascii() and name.isdigit() and len(name) < 20 for name in value) and all(
            type(number) in (int, float) for number in value.values()
        )

    schema = {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": most}
    return Kind(f"an object of at most {most:,} numbers by token ids", fits, schema)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _is_ids(value)


def _is_prompts(value: Any) -> bool:
    return _is_prompt(value) or (isinstance(value, list) and all(map(_is_prompt, value)))


FLAG = Kind("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
# Its range is that of `SamplingParams`.
NUMBER = Kind(
    "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool), {"type": "number"}
)
TEXT = Kind("text", lambda value: isinstance(value, str), {"type": "string"})
OBJECT = Kind("an object", lambda value: isinstance(value, dict), {"type": "object"})
LIST = Kind("a list", lambda value: isinstance(value, list), {"type": "array"})
TOOLS = Kind(
    "a list of at most 128 tools",
    lambda value: isinstance(value, list) and len(value) <= 128,
    {"type": "array", "items": {"type": "object"}, "maxItems": 128},
)
FUNCTION_CALL = Kind(
    "none, auto, or an object with the name of a function",
    lambda value: value in ("none", "auto") or isinstance(value, dict),
    {"anyOf": [{"enum": ["none", "auto"]}, {"type": "object"}]},
)
TOOL_CHOICE = Kind(
    "none, auto, required, or an object that names a function",
    lambda value: value in ("none", "auto", "required") or isinstance(value, dict),
    {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
)
SCHEMA = Kind(
    "a JSON schema, as an object or its text",
    lambda value: isinstance(value, dict | str | bool),
    {"type": ["object", "string", "boolean"]},
)
MESSAGES = Kind(
    "a list with at least one message",
    lambda value: isinstance(value, list) and len(value) > 0,
    {"type": "array", "items": {"type": "object"}, "minItems": 1},
)
INPUT = Kind(
    "text, or a list of items",
    lambda value: isinstance(value, str) or (isinstance(value, list) and len(value) > 0),
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]},
)
CONTENT = Kind(
    "text, or a list of parts with text", lambda value: isinstance(value, str | list), {"type": ["string", "array"]}
)
PROMPTS = Kind(
    "text, a list of token ids, or a list of one of these",
    lambda value: value != [] and _is_prompts(value),
    {"anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}}]},
)
