"""A request's body as JSON: what no float, no UTF-8 and no reader of deep values holds is refused, with its place."""

import json
import math
from typing import Any, NoReturn

from decoder.checks import TWICE, Repeated, fault, json_object
from decoder.serve.errors import ApiError

MOST_LEVELS = 64  # of lists and objects within each other
_MOST_DIGITS = 400  # of an integer that is read as one; a float's end at 309
_LONGEST_PLACE = 80  # characters of a place in a message


def parse_body(data: bytes) -> Any:
    """The value of a body, which may begin with a byte order mark.

    Raises:
        ApiError: 400: it is not JSON in UTF-8; or a number is none that a float holds, a text has a lone surrogate, a
            name is twice in one object, or there are more than `MOST_LEVELS` levels, which the message says with the
            place, as in ``messages[0].role``.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_int=_integer, object_pairs_hook=json_object)
    except UnicodeDecodeError as error:
        words = f"JSON in UTF-8, from byte {error.start + 1} on"
    except json.JSONDecodeError as error:
        words = f"JSON ({error.msg} at line {error.lineno}, column {error.colno})"
    except RecursionError:
        words = f"JSON of at most {MOST_LEVELS} levels"
    else:
        _check(value, "", MOST_LEVELS)
        return value
    raise ApiError(400, f"the body is not {words}: send an object as application/json")


def inside(place: str, name: str) -> str:
    """The place of what an object has under a name."""
    # Fields have identifiers for names; what is none may hold anything, line breaks too.
    if not (name.isascii() and name.isidentifier()):
        return f"{place}[{json.dumps(name)}]"
    return f"{place}.{name}" if place else name


def shortened(place: str) -> str:
    """A place as a message shows it."""
    return place if len(place) <= _LONGEST_PLACE else place[:_LONGEST_PLACE] + "..."


def _check(value: Any, place: str, levels: int) -> None:
    if words := fault(value):
        _refuse(place, words)
    elif isinstance(value, float) and not math.isfinite(value):
        _refuse(place, "must be a finite number that a float holds")
    elif isinstance(value, Repeated):
        _refuse(inside(place, value.name), TWICE)
    elif isinstance(value, list | dict):
        if not levels:
            _refuse(place, f"is nested deeper than {MOST_LEVELS} levels")
        _check_parts(value, place, levels - 1)


def _check_parts(value: list | dict, place: str, levels: int) -> None:
    if isinstance(value, dict):
        for name, part in value.items():
            if words := fault(name):
                _refuse(place, f"has a name that {words}")
            _check(part, inside(place, name), levels)
        return
    for index, part in enumerate(value):
        # A prompt can be a million token ids, for which a place each would take a second.
        if type(part) is not int or not -(2**63) <= part < 2**63:
            _check(part, f"{place}[{index}]", levels)


def _refuse(place: str, words: str) -> NoReturn:
    raise ApiError(400, f"{shortened(place) or 'the body'} {words}", field_of(place))


def field_of(place: str) -> str | None:
    """The body's field that a place lies in."""
    return place.partition("[")[0].partition(".")[0] or None


def _integer(digits: str) -> int:
    # Python refuses to read 4,301 digits, and needs long for as many as it reads. No float holds this one either.
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS
