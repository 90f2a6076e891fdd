"""The kinds of values that a field of a request can have."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a value must be.

    Args:
        words: for the error message, after "must be".
        fits: whether a value is of the kind.
    """

    words: str
    fits: Callable[[Any], bool]


def integer(least: int, most: int) -> Kind:
    words = f"an integer of at least {least:,} and at most {most:,}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def choice(names: Collection[str]) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def token_ids(most: int) -> Kind:
    """A list of ids; which ones there are is known to the vocabulary alone."""
    words = f"a list of at most {most:,} token ids"
    return Kind(words, lambda value: _is_ids(value) and len(value) <= most)


def texts(longest: int, most: int) -> Kind:
    """A text that is not empty, or a list of such texts."""

    def fits(value: Any) -> bool:
        listed = value if isinstance(value, list) else [value]
        return len(listed) <= most and all(isinstance(one, str) and 0 < len(one) <= longest for one in listed)

    return Kind(f"text of 1 to {longest:,} characters, or a list of at most {most} of these", fits)


def biases(most: int) -> Kind:
    """An object of numbers by token ids, which JSON writes as texts."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or len(value) > most:
            return False
        return all(name.isascii() and name.isdigit() and len(name) < 20 for name in value) and all(
            type(number) in (int, float) for number in value.values()
        )

    return Kind(f"an object of at most {most:,} numbers by token ids", fits)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or _is_ids(value)


def _is_prompts(value: Any) -> bool:
    return _is_prompt(value) or (isinstance(value, list) and all(map(_is_prompt, value)))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
# Its range is that of `SamplingParams`.
NUMBER = Kind("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
TOOLS = Kind("a list of at most 128 tools", lambda value: isinstance(value, list) and len(value) <= 128)
TOOL_CHOICE = Kind(
    "none, auto, required, or an object that names a function",
    lambda value: value in ("none", "auto", "required") or isinstance(value, dict),
)
SCHEMA = Kind("a JSON schema, as an object or its text", lambda value: isinstance(value, dict | str | bool))
MESSAGES = Kind("a list with at least one message", lambda value: isinstance(value, list) and len(value) > 0)
CONTENT = Kind("text, or a list of parts of type text", lambda value: isinstance(value, str | list))
PROMPTS = Kind("text, a list of token ids, or a list of one of these", lambda value: value != [] and _is_prompts(value))
