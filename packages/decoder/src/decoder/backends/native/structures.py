"""What Python and the native library share: the structures, constants and functions of library.h, read from that file.

What is declared there is declared once. The sizes of structures are compared with the library's when it is loaded.
"""

import re
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from decoder.backends.native.compiling import FOLDER

_HEADER = re.sub(r"//[^\n]*|\\\n", "", (FOLDER / "library.h").read_text())
_KINDS: dict[str, Any] = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "uint64_t": c_uint64}
_KINDS |= {"float": c_float, "double": c_double}


class Shared(Structure):
    """A structure of library.h by the same name."""


class PackedWeight(Shared): ...


class QuantisedPart(Shared): ...


class Quantised(Shared): ...


class Format(Shared): ...


class Expert(Shared): ...


class Experts(Shared): ...


class Mixer(Shared): ...


class RecurrentState(Shared): ...


class Layer(Shared): ...


class SequenceKV(Shared): ...


class Attention(Shared): ...


class Pass(Shared): ...


class Sampling(Shared): ...


class Head(Shared): ...


class Drafter(Shared): ...


class Drafts(Shared): ...


def _constants() -> dict[str, int]:
    """Those of all enumerations."""
    found: dict[str, int] = {}
    for listed in re.findall(r"enum \{([^{}]*)\}", _HEADER):
        for number, one in enumerate(listed.split(",")):
            name, _, value = one.partition("=")
            found[name.strip()] = int(value or number)
    return found


_CONSTANTS = _constants()


def _numbers(names: str) -> list[int]:
    return [_CONSTANTS[name] for name in names.split()]


FP32, BF16, QUANTISED = _numbers("FP32 BF16 QUANTISED")  # kinds of weights
SILU, GELU, CLAMPED, SQUARED = _numbers("SILU GELU CLAMPED SQUARED")  # how experts are gated
SOFTMAX, SIGMOID = _numbers("SOFTMAX SIGMOID")  # how their weights are made
MOST_EXPERTS, MOST_GROUPS = _numbers("MOST_EXPERTS MOST_GROUPS")
MOST_PARTS, MOST_WIDTH, MOST_LEVELS = _numbers("MOST_PARTS MOST_WIDTH MOST_LEVELS")
MOST_DIM, MOST_CODED_DIM, QUERY_HEADS_HELD = _numbers("MOST_DIM MOST_CODED_DIM QUERY_HEADS_HELD")


def _kind(declared: str) -> Any:
    """A type of C, with its stars: pointers to structures are such, all others are addresses."""
    name, stars = declared.replace("const", "").replace("*", "").strip(), declared.count("*")
    if name == "char" and stars:
        return c_char_p
    known = _KINDS.get(name)
    whole = isinstance(known, type) and issubclass(known, Shared)
    kind, left = (known, stars) if whole or not stars else (c_void_p, stars - 1)
    for _ in range(left):
        kind = POINTER(kind)
    return kind


def _members(body: str) -> list[tuple[str, Any]]:
    """The members that are declared in the ``body`` of a structure."""
    found = []
    for declared in filter(None, map(str.strip, body.split(";"))):
        # A type, and names with stars in front and a length behind of their own.
        of_all, listed = re.findall(r"^((?:const )?\w+)(.*)$", declared, re.DOTALL)[0]
        for stars, name, length in re.findall(r"([^\w,]*(?:const[^\w,]*)?)(\w+)(?:\[(\w+)\])?", listed):
            kind = _kind(of_all + stars)
            found.append((name, kind * _CONSTANTS[length] if length else kind))
    return found


STRUCTURES = tuple(Shared.__subclasses__())
_BODIES = {name: body for body, name in re.findall(r"typedef struct \{([^{}]*)\} (\w+);", _HEADER)}
for _one in STRUCTURES:
    _one._fields_ = _members(_BODIES[_one.__name__])
    _KINDS[_one.__name__] = _one

FUNCTIONS = {
    name: (_KINDS.get(result), [_kind(re.sub(r"\w+$", "", one)) for one in arguments.split(",")])
    for result, name, arguments in re.findall(r"X\((\w+), (\w+),\s*\(([^()]*)\),\s*\(", _HEADER)
}
"""By name, what each function returns, None for nothing, and the types of its arguments."""
