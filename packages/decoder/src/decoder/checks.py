"""What comes from outside: numbers that no float holds, text that no UTF-8 holds and names that are twice in an object
are refused, with their place."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MARK = "\ufeff"
"""The byte order mark, which some editors write in front of a text and which is no part of it."""
TWICE = "is there twice: leave one out"
_MOST_SHOWN = 80  # characters of a value in an error message
_HUGE = "an integer of more than 308 digits"


class Repeated:
    """Stands for an object of JSON in which a name is twice."""

    def __init__(self, name: str):
        self.name = name


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
    """An object of JSON from its names and values, as `json.loads` calls it: Python's own takes the last of a name."""
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    seen = set[str]()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    return Repeated(name)


def shown(value: object) -> str:
    """A value as an error message shows it: short, and free of errors of its own.

    Python refuses to write integers of more than 4,300 digits, and no message need repeat 401 of them.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_MOST_SHOWN:
        return _HUGE if _too_large(value) else f"{float(value):.3g}"
    try:
        text = repr(value)
    except ValueError:  # such an integer within a list
        return f"this {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def meant(value: object, known: Iterable[str]) -> str:
    """Which of the known names an unknown one may be, in words that follow it in a message; "" where none is near."""
    near = difflib.get_close_matches(str(value)[:_MOST_SHOWN], known, 1) if isinstance(value, str) else []
    return f" (is {near[0]} meant?)" if near else ""


def meant_beside(path: str | os.PathLike) -> str:
    """`meant` of a path that is not there, among what lies where it should."""
    folder = Path(path).parent
    return meant(Path(path).name, [one.name for one in folder.iterdir()]) if folder.is_dir() else ""


def fault(value: object) -> str | None:
    """What is wrong with a number or a text in itself, in words that follow its name; None for any other value.

    Infinity and what is not a number are values of a float: who has no use for them refuses them by a range.
    """
    if isinstance(value, int) and _too_large(value):
        return f"must be a number that a float holds, not {_HUGE}"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start + 1} is the lone surrogate {value[error.start]!a}"
            return f"is not valid Unicode: {where}"
    return None


def faults(value: object) -> Iterator[tuple[str, str]]:
    """(place, words of `fault`) of each faulty number or text in a value, as in ``("messages[0].role", ...)``.

    Lists and mappings are searched, keys included; the place of the value itself is "". One that holds itself, as YAML
    can write it down, is faulty, too, and so is one with a name that is `Repeated`.
    """
    # No recursion: lists within lists may go deeper than Python's calls.
    left: list[tuple[str, object]] = [("", value)]
    # What is being searched, and what has been: a YAML file can name a list in many places.
    within, seen = set[int](), set[int]()
    while left:
        place, one = left.pop()
        if isinstance(one, _End):
            within.discard(one.of)
            continue
        if isinstance(one, Mapping | list | tuple):
            if id(one) in within:
                yield place, "holds itself"
            if id(one) in seen:
                continue
            seen.add(id(one))
            within.add(id(one))
            left.append((place, _End(id(one))))
        if words := fault(one):
            yield place, words
        elif isinstance(one, Repeated):
            words = fault(one.name)
            yield (place, f"has a key that {words}") if words else (_inside(place, one.name), TWICE)
        elif isinstance(one, Mapping):
            for key, each in reversed(list(one.items())):
                if words := fault(key):
                    yield place, f"has a key that {words}"
                else:
                    left.append((_inside(place, key), each))
        elif isinstance(one, list | tuple):
            left.extend((f"{place}[{index}]", one[index]) for index in reversed(range(len(one))))


def _inside(place: str, key: object) -> str:
    name = str(key)[:_MOST_SHOWN]
    return f"{place}.{name}" if place else name


class _End(NamedTuple):
    """Behind all that a value holds: the value's identity."""

    of: int


def check(value: object, name: str = "") -> None:
    """Refuse a value that is, or has in it, one of the `faults`: a number that no float holds, say.

    Args:
        value: as JSON, YAML or a command line gives it.
        name: how the message calls it, for instance "the prompt"; "" where the place within it says enough.

    Raises:
        ValueError: the first of its `faults`, with its place.
    """
    for place, words in faults(value):
        raise ValueError(f"{' in '.join(filter(None, (place, name)))} {words}")


def decoded(data: bytes, name: str) -> str:
    """The text of what a file holds; a byte order mark in front of it is skipped.

    Args:
        data: UTF-8.
        name: how an error's message calls it, for instance "line 3 of prompts.jsonl".

    Raises:
        ValueError: it is none, or seems to be UTF-16 or UTF-32.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        words = f"byte {error.start + 1:,} is 0x{data[error.start]:02x}"
        raise ValueError(f"{name} is not UTF-8 text ({words}): save it as UTF-8") from error
    # In UTF-16 every other byte of most alphabets' letters is zero.
    if text.count("\0") > len(text) / 4:
        raise ValueError(f"{name} is not UTF-8 text (much of it is null bytes, as in UTF-16): save it as UTF-8")
    return text


def parse_json(text: str | bytes, name: str) -> Any:
    """The value of a JSON text, whose numbers and texts are still to be checked where they are used.

    Args:
        text: the JSON; a byte order mark in front of it is skipped.
        name: how an error's message calls it, for instance "line 3 of prompts.jsonl".

    Raises:
        ValueError: it is no JSON, or none that Python reads; or a name is twice in an object.
    """
    repeated = False

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
        nonlocal repeated
        one = json_object(pairs)
        repeated |= isinstance(one, Repeated)
        return one

    try:
        value = json.loads(text.removeprefix(MARK) if isinstance(text, str) else text, object_pairs_hook=made)
    except RecursionError as error:
        raise ValueError(f"{name} is not JSON that can be read: lists or objects lie in others too deep") from error
    except ValueError as error:
        known = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        reason = str(error) if known else "an integer has too many digits"
        raise ValueError(f"{name} is not JSON: {reason}") from error
    if repeated:
        check(value, name)
    return value


def _too_large(value: int) -> bool:
    try:
        float(value)
    except OverflowError:
        return True
    return False
