"""Compiling the native library, for this machine or for another one.

    python -m decoder.backends.native.compiling library.so
    python -m decoder.backends.native.compiling --compiler aarch64-linux-gnu-gcc --sets i8mm,neon,generic library.so

The files of `csrc/` are compiled once for each instruction set that the library is to have, and it takes the fastest
one that the processor has. It needs threads of POSIX. This module imports nothing but Python's own, so
that it can run where a package is built.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-pthread", "-Wno-psabi")
COMPILERS = ("gcc", "cc")
_SECONDS = 600  # in which a file must be compiled; a busy machine may take long
_OF_LIBRARY = ("library.c", "pool.c", "formats/formats.c")
_OF_SET = (
    *("products.c", "attention.c", "mixers.c", "experts.c", "layers.c"),
    *("tokens.c", "levels.c", "quantised.c", "formats/unpack.c", "set.c"),
)


class InstructionSet(NamedTuple):
    """What a processor can do, for which the library is compiled.

    Attributes:
        folder: in `csrc/arch`.
        flags: by which compilers are told.
        features: of the processor, as Linux lists them.
    """

    folder: str
    flags: tuple[str, ...]
    features: frozenset[str]


_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


def _x86(folder: str, *features: str) -> InstructionSet:
    named = {"bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx_vnni": "avxvnni"}
    return InstructionSet(folder, tuple(f"-m{named.get(one, one)}" for one in features), frozenset(features))


INSTRUCTION_SETS = {
    "avx512bf16": _x86("avx512", *_AVX2, *_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512": _x86("avx512", *_AVX2, *_AVX512, "avx512_vnni"),
    "avxvnni": _x86("avxvnni", *_AVX2, "avx_vnni"),
    "avx2": _x86("avx2", *_AVX2),
    "i8mm": InstructionSet("i8mm", ("-march=armv8.2-a+dotprod+i8mm",), frozenset(("asimd", "asimddp", "i8mm"))),
    "neon": InstructionSet("neon", ("-march=armv8.2-a+dotprod",), frozenset(("asimd", "asimddp"))),
    "generic": InstructionSet("generic", (), frozenset()),
}
"""By name, the fastest first."""

OF_MACHINE = {"x86_64": ("avx512bf16", "avx512", "avxvnni", "avx2"), "aarch64": ("i8mm", "neon", "generic")}
"""The sets of a kind of machine, as `platform.machine` names it. The generic one is too slow where it must compute what
an instruction does elsewhere: a product and a sum that are rounded once."""


SYSTEMS = ("linux", "darwin")
"""Those that the library is compiled for, as `sys.platform` has them; packages bring it for Linux."""


def machine() -> str:
    """This machine's kind, as `OF_MACHINE` has it."""
    name = platform.machine()
    return "aarch64" if name == "arm64" else name


def files() -> list[Path]:
    """All files of which the library is made."""
    return sorted(file for file in FOLDER.rglob("*") if file.suffix in (".c", ".h"))


def fingerprint(*more: str) -> str:
    """What a library depends on, in 16 digits: its source, how it is compiled, and ``more``."""
    sources = (file.read_text() for file in files())
    return _digits("\0".join((*sources, *FLAGS, *more)).encode())


def commands(compiler: str, sets: Sequence[str], flags: Sequence[str], into: Path) -> list[list[str]]:
    """The commands that compile all files for these instruction sets to objects in the folder ``into``."""
    listed = " ".join(f"X({name})" for name in sets)
    plain = [compiler, *FLAGS, *flags, "-I", str(FOLDER), "-c"]
    made = [
        [*plain, f"-DSETS={listed}", "-o", str(into / f"{Path(name).stem}.o"), str(FOLDER / name)]
        for name in _OF_LIBRARY
    ]
    for name in sets:
        folder, own, _ = INSTRUCTION_SETS[name]
        for source in (*_OF_SET, f"arch/{folder}/tiles.c"):
            given = [*own, f"-DSET={name}", "-I", str(FOLDER / "arch" / folder)]
            made.append([*plain, *given, "-o", str(into / f"{name}-{Path(source).stem}.o"), str(FOLDER / source)])
    return made


def fault_of_compiling(compiler: str, made: Path, sets: Sequence[str], flags: Sequence[str] = ()) -> str | None:
    """Compile the library for instruction sets to the file ``made``; what the compiler says where it cannot."""
    with tempfile.TemporaryDirectory(prefix="tokenswift-decoder-") as temporary:
        objects = Path(temporary)
        each = commands(compiler, sets, flags, objects)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            fault = _first(pool.map(_fault, each))
        given = [str(file) for file in sorted(objects.glob("*.o"))]
        return fault or _fault([compiler, *flags, "-shared", "-pthread", "-o", str(made), *given, "-lm"])


def compiled_for_shipping(folder: Path, compiler: str | None = None) -> tuple[Path, str] | str:
    """Compile the library that a package brings, to a file in ``folder``.

    Args:
        compiler: of this machine or for another one; None for the first of `COMPILERS` that there is.

    Returns:
        The file, which `shipped_name` has named, and the machine that it is for; or why there is none.
    """
    found = next(filter(None, map(shutil.which, [compiler] if compiler else COMPILERS)), None)
    if found is None:
        return f"no C compiler ({compiler or ' or '.join(COMPILERS)}) is installed"
    triple = _said(found, "-dumpmachine").strip()
    machine = triple.partition("-")[0]
    if "linux" not in triple or machine not in OF_MACHINE:
        return (
            f"it is for Linux on {' or '.join(OF_MACHINE)}, and {found} compiles for {triple or 'what it does not say'}"
        )
    made, sets = folder / "native.so", OF_MACHINE[machine]
    fault = fault_of_compiling(found, made, sets)
    if fault is not None:  # an old compiler may not know all of them
        faults = {name: fault_of_compiling(found, made, [name]) for name in sets}
        known = [name for name in sets if faults[name] is None]
        fault = fault_of_compiling(found, made, known) if known else "; ".join(dict.fromkeys(map(str, faults.values())))
    if fault is not None:
        return f"{found} failed: {fault}"
    return made.rename(folder / shipped_name(made.read_bytes())), machine


def shipped_name(library: bytes) -> str:
    """The name of a library's file in a package: it tells of which source it was made, and whether it is whole."""
    return f"native-{fingerprint()}-{_digits(library)}.so"


def _digits(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _first(faults: Iterable[str | None]) -> str | None:
    return next((fault for fault in faults if fault), None)


def _said(compiler: str, option: str) -> str:
    """What a compiler answers, "" where it fails."""
    try:
        return _run([compiler, option]).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _fault(command: list[str]) -> str | None:
    """What a compiler says where it fails."""
    try:
        done = _run(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return None
    return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]) or "failed"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    plain = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=plain)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the library from a command line."""
    parser = argparse.ArgumentParser(description="Compile the native library.")
    parser.add_argument("made", type=Path, help="the library's file")
    parser.add_argument("--compiler", default="cc", help="as it is called (default: cc)")
    parser.add_argument(
        "--sets",
        default=",".join(OF_MACHINE["x86_64"]),
        help="instruction sets, the fastest first (default: %(default)s)",
    )
    parser.add_argument("flags", nargs="*", help="further flags for the compiler, behind --")
    args = parser.parse_args(arguments)
    sets = args.sets.split(",")
    if unknown := [name for name in sets if name not in INSTRUCTION_SETS]:
        sys.exit(f"there is no instruction set {unknown[0]}; there are {', '.join(INSTRUCTION_SETS)}")
    if fault := fault_of_compiling(args.compiler, args.made, sets, args.flags):
        sys.exit(f"{args.compiler} failed: {fault}")


if __name__ == "__main__":
    main()
