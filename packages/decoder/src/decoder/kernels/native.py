"""The library of `native.c`: compiled by the machine's C compiler for its own processor, when it is first needed.

PyTorch's operators leave much of a processor's speed unused where a pass has few rows, and each call from Python takes
as long as a small one of them. The library makes three calls of a layer, reads weights once for all rows of a step, and
sums every row in an order of its own. It is kept in the user's cache folder, so it is compiled once, in some two
seconds.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

_FLAGS = ("-std=gnu11", "-O2", "-march=native", "-fPIC", "-fopenmp", "-shared")
_COMPILERS = ("cc", "gcc")
_SOURCE = Path(__file__).with_name("native.c")
_SECONDS = 120  # in which it must be compiled


class NativeUnavailable(Exception):
    """The library cannot be had here, with the reason in words."""


class Product(ctypes.Structure):
    """`Product` of native.c."""

    _fields_ = (
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("weight_is_bf16", c_int32),
    )


class Layer(ctypes.Structure):
    """`Layer` of native.c."""

    _fields_ = (
        ("qkv", Product),
        ("o", Product),
        ("gate_up", Product),
        ("down", Product),
        ("norm_in", c_void_p),
        ("norm_between", c_void_p),
        ("head_norm", c_void_p),
        ("size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("eps", c_float),
        ("head_eps", c_float),
    )


class Text(ctypes.Structure):
    """`Text` of native.c."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_head", c_int64),
        ("key_slot", c_int64),
        ("value_head", c_int64),
        ("value_slot", c_int64),
        ("length", c_int64),
        ("count", c_int64),
        ("mask", c_void_p),
    )


class Attention(ctypes.Structure):
    """`Attention` of native.c."""

    _fields_ = (
        ("texts", POINTER(Text)),
        ("queries", c_void_p),
        ("out", c_void_p),
        ("query_token", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("scaling", c_float),
        ("is_bf16", c_int32),
    )


_ARGUMENTS = {
    "linear": (POINTER(Product), c_void_p, c_int64, c_int, c_void_p, c_int),
    "before_attention": (POINTER(Layer), c_void_p, c_int64, *4 * (c_void_p,), c_int, c_int),
    "behind_attention": (POINTER(Layer), c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int),
    "attend": (POINTER(Attention), c_int64, c_int),
    **dict.fromkeys(("multiplies_bf16", "panel_width", "rows_together", "rows_held", "keys_together", "most_dim"), ()),
}


@cache
def _loaded() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
    except NativeUnavailable as error:
        return str(error)
    except (OSError, AttributeError) as error:
        return f"what the compiler made cannot be loaded: {error}"
    return library


def library() -> ctypes.CDLL:
    """The library, which is compiled if it is not in the user's cache folder yet.

    Raises:
        NativeUnavailable: there is no compiler, or the machine is of another kind.
    """
    loaded = _loaded()
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded


def available() -> bool:
    """Whether there is a library here."""
    return not isinstance(_loaded(), str)


def threads() -> int:
    """How many threads a call takes: PyTorch's number, but one in a process that was forked from one that had called.

    OpenMP's threads do not come along, and a call for several would wait for them for ever.
    """
    return 1 if _forked else torch.get_num_threads()


def _after_fork() -> None:
    global _forked
    _forked = _loaded.cache_info().currsize > 0


_forked = False
os.register_at_fork(after_in_child=_after_fork)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products and layers of this dtype can be had here."""
    return available() and (dtype == torch.float32 or (dtype == torch.bfloat16 and bool(library().multiplies_bf16())))


def _compiled() -> Path:
    """The file of the library."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise NativeUnavailable(f"for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    processor = _processor()
    if not {"avx2", "fma"} <= set(processor.split()):
        raise NativeUnavailable("the processor has no AVX2")
    compilers = [found for name in _COMPILERS if (found := shutil.which(name))]
    if not compilers:
        raise NativeUnavailable(f"no C compiler ({' or '.join(_COMPILERS)}) is installed")
    for compiler in compilers[:-1]:
        # The first may be another one under the usual name.
        with suppress(NativeUnavailable):
            return _made_by(compiler, processor)
    return _made_by(compilers[-1], processor)


def _made_by(compiler: str, processor: str) -> Path:
    version = _run(compiler, "--version")
    key = hashlib.sha256("\0".join((_SOURCE.read_text(), version, processor, *_FLAGS)).encode()).hexdigest()[:16]
    file = _folder() / f"native-{key}.so"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
            # Put in place whole, since several processes may make it at once.
            made = Path(temporary) / file.name
            _run(compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm")
            made.replace(file)
    return file


def _processor() -> str:
    """What the processor can do, as Linux lists it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")


def _folder() -> Path:
    """Where compiled libraries are kept: in the user's cache folder, or else in a new one that goes with the machine's
    temporary files."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenswift-decoder"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # a user without a home folder is the latter
        pass
    return Path(tempfile.mkdtemp(prefix="tokenswift-decoder-"))


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} failed: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise NativeUnavailable(f"{command[0]} failed: {said}")
    return done.stdout
