"""The native library: C files that are compiled where the package is built or installed, or else when first needed.

PyTorch's operators leave much of a processor's speed unused where a pass has few rows, and each call from Python takes
as long as a small one of them. The library runs all layers of a pass in one call (`layers.c`), reads weights once for
all rows of a step, and sums every row in an order of its own. It also draws tokens (`tokens.c`) and runs draft heads
(`levels.c`). Where a package came without it, the machine's own compiler makes it for its processor, in some ten
seconds, and it is kept in the user's cache folder. TOKENSWIFT_INSTRUCTIONS names an instruction set to use in place of
the fastest one.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_int, c_int64, c_void_p
from functools import cache
from itertools import product, takewhile
from pathlib import Path

import torch

from decoder.backends.faults import in_words
from decoder.backends.native import compiling
from decoder.backends.native.compiling import COMPILERS, INSTRUCTION_SETS, OF_MACHINE
from decoder.backends.native.structures import FUNCTIONS, STRUCTURES, Format

_PACKAGE = Path(__file__).parent  # where a package has the library that it brings
_FORCED = "TOKENSWIFT_INSTRUCTIONS"


class NativeUnavailable(Exception):
    """The library cannot be had here, with the reason in words."""


class Library(ctypes.CDLL):
    """The library's functions.

    Attributes:
        contents: a hash of the file they were read from, which may be gone since.
    """

    contents: str


class _Size(ctypes.Structure):
    """`Structure` of library.h: the size of one that is shared."""

    _fields_ = (("name", c_char_p), ("bytes", c_int64))


# Those that are the same for every instruction set; all others are `FUNCTIONS`.
_OF_LIBRARY: dict[str, tuple] = {
    "pack_weights": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_int),
    "pack_numbers": (c_void_p, c_int, c_int64, c_int64, c_void_p, c_int, c_int),
    "all_bf16": (c_void_p, c_int64, c_int),
    "weight_format": (c_int,),
    "use_instructions": (c_char_p,),
    **dict.fromkeys(("multiplies_bf16", "panel_width", "quantised_width", "rows_together"), ()),
}


def _loaded() -> Library | str:
    """The library, or why there is none."""
    return _loaded_for(os.environ.get(_FORCED))


@cache
def _loaded_for(forced: str | None) -> Library | str:
    """The library for the fastest instruction set, or for the one that the user asks for."""
    try:
        key = _key(forced)
        if (shipped := _shipped(forced)) is not None:
            return shipped
        folder = cache_folder()
        if folder is not None and trusted(folder) and (file := folder / f"native-{key}.so").exists():
            with suppress(OSError):  # cut short, say, when the machine went down
                return _opened(file)
        return _compiled(key, _instruction_sets(forced))
    except NativeUnavailable as error:
        return str(error)
    except Exception as error:
        # Compilers, loaders and file systems fail in many ways, and without the library all is right.
        return f"it could not be made: {in_words(error)}"


def _shipped(forced: str | None) -> Library | None:
    """The library that the package brings, if it does; where that one cannot be used, a warning says why."""
    for file in _PACKAGE.glob("native-*.so"):
        try:
            library = _checked(file, forced)
        except (NativeUnavailable, OSError) as error:
            reason = str(error) if isinstance(error, NativeUnavailable) else in_words(error)
            warnings.warn(
                f"the native library of the installed decoder cannot be used: {reason}. Install it again; until then "
                "it is compiled here, or decoding is slower",
                stacklevel=2,
            )
            continue
        if not library.use_instructions(forced.encode() if forced else None):
            return library
    return None


def _checked(file: Path, forced: str | None) -> Library:
    """A library that a package brings.

    Raises:
        NativeUnavailable: it is damaged, or made of other sources, or for another processor.
        OSError: it cannot be read or loaded.
    """
    data = file.read_bytes()
    expected, name = compiling.shipped_name(data), file.name
    if name != expected:
        # What is damaged is not opened: the system would end this process.
        same = name.rpartition("-")[2] == expected.rpartition("-")[2]
        raise NativeUnavailable(f"{name} {'was made of other source files' if same else 'is damaged'}")
    if not forced:
        return _opened(file)
    # A library of its own, which uses another instruction set. It stays in memory when the file is gone.
    with tempfile.TemporaryDirectory(prefix="tokenswift-decoder-") as temporary:
        return _opened(Path(shutil.copy(file, temporary)))


def library() -> Library:
    """The library, which is compiled if neither the package nor the user's cache folder has it.

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
    """How many threads a call takes at most: PyTorch's number."""
    return torch.get_num_threads()


def address(array: ctypes.Array) -> int:
    """Where the numbers of an array stand."""
    return ctypes.addressof(array)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products and layers of this dtype can be had here."""
    return available() and (dtype == torch.float32 or (dtype == torch.bfloat16 and bool(library().multiplies_bf16())))


def library_name() -> str | None:
    """Tells two libraries with other bits apart; None where there is none."""
    return _key(os.environ.get(_FORCED)) if available() else None


def instruction_set() -> str:
    """The instruction set that the library uses, as `TOKENSWIFT_INSTRUCTIONS` spells it.

    Raises:
        NativeUnavailable: there is no library.
    """
    return library().instructions().decode()


@cache
def _key(forced: str | None) -> str:
    """What the library depends on: its source, how it is compiled, and the instruction set.

    Raises:
        NativeUnavailable: it is not for this machine.
    """
    return compiling.fingerprint(*_instruction_sets(forced))


def _instruction_sets(forced: str | None) -> list[str]:
    """The instruction sets of this processor, the fastest first, or the one that is asked for.

    Raises:
        NativeUnavailable: there is none.
    """
    machine = compiling.machine()
    if sys.platform not in compiling.SYSTEMS or machine not in OF_MACHINE:
        raise NativeUnavailable(f"for Linux and macOS on {' or '.join(OF_MACHINE)}, not {sys.platform} on {machine}")
    features = _processor()
    here = [name for name in (*OF_MACHINE[machine], "generic") if INSTRUCTION_SETS[name].features <= features]
    if forced:
        if forced not in here:
            raise NativeUnavailable(f"{_FORCED} is {forced}, and this processor has {', '.join(here)}")
        return [forced]
    found = [name for name in OF_MACHINE[machine] if name in here]
    if not found:
        raise NativeUnavailable("the processor has no AVX2")
    return found


def _processor() -> set[str]:
    """What the processor can do, as Linux lists it."""
    if sys.platform == "darwin":
        return _processor_of_mac()
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    found = {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}
    return set(found.get("flags", found.get("Features", "")).split())


def _processor_of_mac() -> set[str]:
    if compiling.machine() == "aarch64":
        # All of Apple's have the first two.
        return {"asimd", "asimddp"} | ({"i8mm"} if _told_by_mac("hw.optional.arm.FEAT_I8MM") == "1" else set())
    return set(_told_by_mac("machdep.cpu.features", "machdep.cpu.leaf7_features").lower().split())


def _told_by_mac(*names: str) -> str:
    """What macOS tells of itself, "" where it does not know a name."""
    return subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, timeout=60).stdout.strip()


def cache_folder() -> Path | None:
    """Where compiled libraries are kept: in the user's cache folder, if there is one."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenswift-decoder"
    except RuntimeError:  # a user without a home
        return None


def trusted(path: Path) -> bool:
    """Whether nobody but this user can have put anything there."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiled(key: str, sets: list[str]) -> Library:
    """The library, newly made, and kept for the next process where there is a place for it.

    Raises:
        NativeUnavailable: no compiler is installed, or none can compile it.
    """
    compilers = dict.fromkeys(os.path.realpath(found) for name in COMPILERS if (found := shutil.which(name)))
    if not compilers:
        raise NativeUnavailable(f"no C compiler ({' or '.join(COMPILERS)}) is installed")
    with tempfile.TemporaryDirectory(prefix="tokenswift-decoder-") as temporary:
        made = Path(temporary) / "native.so"
        faults = []
        # An old compiler may not know the fastest set.
        for name, compiler in product(sets, compilers):
            fault = compiling.fault_of_compiling(compiler, made, [name])
            if fault is None:
                break
            faults.append(f"{Path(compiler).name} failed: {fault}")
        else:
            raise NativeUnavailable("; ".join(dict.fromkeys(faults)))
        with suppress(OSError):
            _keep(made, key)
        # It stays in memory when the file is gone.
        return _opened(made)


def _keep(made: Path, key: str) -> None:
    """Put a copy of the library where the next process finds it, whole: several may do so at once."""
    folder = cache_folder()
    if folder is None:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if trusted(folder):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            copy = Path(shutil.copy(made, temporary))
            copy.replace(folder / f"native-{key}.so")


def _opened(file: Path) -> Library:
    """The library in a file, with the types of its functions.

    Raises:
        NativeUnavailable: it was made for other structures, or for another processor.
        OSError: it cannot be read or loaded.
    """
    library = Library(str(file))
    library.contents = hashlib.sha256(file.read_bytes()).hexdigest()
    library.structures.restype, library.instructions.restype = POINTER(_Size), c_char_p
    theirs, own = library.structures(), {one.__name__: ctypes.sizeof(one) for one in STRUCTURES}
    sizes = {entry.name.decode(): entry.bytes for entry in takewhile(lambda entry: entry.name, theirs)}
    if sizes != own:
        wrong = ", ".join(sorted({name for name, _ in own.items() ^ sizes.items()}))
        raise NativeUnavailable(f"the library has other structures than this program: {wrong}")
    if library.instructions() is None:
        raise NativeUnavailable("the library was made for another processor")
    for name, arguments in _OF_LIBRARY.items():
        getattr(library, name).argtypes = arguments
    for name, (result, types) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, types
    library.weight_format.restype = POINTER(Format)
    return library
