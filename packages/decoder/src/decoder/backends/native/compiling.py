"""Compiling the native library, for this machine or for another one.

    python -m decoder.backends.native.compiling library.so
    python -m decoder.backends.native.compiling --compiler aarch64-linux-gnu-gcc --sets neon,generic library.so

The files of `csrc/` are compiled once for each instruction set that the library is to have, and it takes the fastest
one that the processor has. This module imports nothing but Python's own, so that it can run where a package is built.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-fopenmp", "-Wno-psabi")
_SECONDS = 600  # in which a file must be compiled; a busy machine may take long
_OF_LIBRARY = ("library.c", "formats/formats.c")
_OF_SET = ("products.c", "attention.c", "layers.c", "tokens.c", "levels.c", "quantised.c", "set.c")


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
    named = {"bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}
    return InstructionSet(folder, tuple(f"-m{named.get(one, one)}" for one in features), frozenset(features))


INSTRUCTION_SETS = {
    "avx512bf16": _x86("avx512", *_AVX2, *_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512": _x86("avx512", *_AVX2, *_AVX512, "avx512_vnni"),
    "avx2": _x86("avx2", *_AVX2),
    "neon": InstructionSet("neon", ("-march=armv8.2-a+dotprod",), frozenset(("asimd", "asimddp"))),
    "generic": InstructionSet("generic", (), frozenset()),
}
"""By name, the fastest first."""

OF_MACHINE = {"x86_64": ("avx512bf16", "avx512", "avx2"), "aarch64": ("neon", "generic")}
"""The sets of a kind of machine, as `platform.machine` names it. The generic one is too slow where it must compute what
an instruction does elsewhere: a product and a sum that are rounded once."""


def files() -> list[Path]:
    """All files of which the library is made."""
    return sorted(file for file in FOLDER.rglob("*") if file.suffix in (".c", ".h"))


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
        return fault or _fault([compiler, *FLAGS, *flags, "-shared", "-o", str(made), *given, "-lm"])


def _first(faults: Iterable[str | None]) -> str | None:
    return next((fault for fault in faults if fault), None)


def _fault(command: list[str]) -> str | None:
    """What a compiler says where it fails."""
    plain = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=plain)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return None
    return next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]) or "failed"


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
