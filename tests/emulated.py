"""Runs a program as if this processor had AVX-512 or AVX-VNNI: AVX2 computes their instructions.

    python -m tests.emulated avx512 packages/decoder/benchmarks/bitwise.py same --model data/reference-model
    python -m tests.emulated avxvnni -m pytest -p no:xdist tests/decoder/test_native_tokens.py

The library's files for such sets are compiled as they are, with `tests/native/emulated` in place of the compiler's
header: tiles, orders of sums and roundings are those of such a processor, and only the compiler's own instructions are
not. Programs take two to four times as long. What they start or compile themselves has no such library: tests of how
it is made fail. It needs a compiler, and the top of the repository as the working folder.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from decoder.backends.native import compiling
from decoder.backends.native import library as native

HEADERS = Path(__file__).parent / "native" / "emulated"
SETS = ("avx512bf16", "avx512", "avxvnni")


def commands(called: str, sets: Sequence[str], flags: Sequence[str], into: Path) -> list[list[str]]:
    """What compiles the library for instruction sets of `SETS` to objects in a folder, for a processor with AVX2."""
    made = []
    for command in compiling.commands(called, sets, flags, into):
        plain = [one for one in command if not one.startswith(("-mavx512", "-mavxvnni"))]
        name = next((one.removeprefix("-DSET=") for one in command if one.startswith("-DSET=")), None)
        made.append([*plain, "-I", str(HEADERS), *([f"-DEMULATED_{name}"] if name else ())])
    return made


def compiler() -> str:
    """The one of this machine whose code for these vectors is the fastest."""
    found = next(filter(shutil.which, ("clang", "gcc")), None)
    return found or sys.exit("no C compiler (clang or gcc) is installed")


def library(name: str, made: Path) -> None:
    """Compile the library for an instruction set of `SETS` to the file ``made``."""
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        each = commands(compiler(), [name], (), Path(objects))
        for done in pool.map(subprocess.run, each):
            done.check_returncode()
        given = map(str, Path(objects).glob("*.o"))
        subprocess.run([compiler(), "-shared", "-pthread", "-o", str(made), *given, "-lm"], check=True)


def main() -> None:
    """Compile the library, put it where the decoder finds it, and run the program in this process."""
    if len(sys.argv) < 3 or sys.argv[1] not in SETS:
        sys.exit(__doc__)
    name, *program = sys.argv[1:]
    features = native._processor() | compiling.INSTRUCTION_SETS[name].features
    native._processor = lambda: features
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"], os.environ["TOKENSWIFT_INSTRUCTIONS"] = cache, name
        folder = native.cache_folder()
        folder.mkdir(mode=0o700)
        library(name, folder / f"native-{native._key(name)}.so")
        if native.instruction_set() != name:
            sys.exit(f"the library uses {native.instruction_set()}")
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
