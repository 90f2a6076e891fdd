"""Runs a program as if this processor had AVX-512: AVX2 computes its instructions, some three times slower.

    python -m tests.emulated avx512 packages/decoder/benchmarks/bitwise.py same --model data/reference-model
    python -m tests.emulated avx512bf16 -m pytest -p no:xdist tests/decoder/test_native_layer.py

The library's files for AVX-512 are compiled as they are, with `tests/native/avx512` in place of the compiler's header, so
tiles, orders of sums and roundings are those of such a processor, and only what the compiler makes of instructions is not.
It needs a compiler and the top of the repository as the working folder.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from decoder.backends.native import compiling
from decoder.backends.native import library as native

HEADERS = Path(__file__).parent / "native" / "avx512"
SETS = ("avx512bf16", "avx512")


def commands(compiler: str, name: str, flags: tuple[str, ...], into: Path) -> list[list[str]]:
    """What compiles the library for an instruction set of `SETS` to objects in a folder, for a processor with AVX2."""
    own = ["-I", str(HEADERS), "-D__builtin_cpu_supports(name)=1", *["-DEMULATED_BF16"] * (name == "avx512bf16")]
    return [
        [compiler, *own, *(one for one in command[1:] if not one.startswith("-mavx512"))]
        for command in compiling.commands(compiler, [name], flags, into)
    ]


def library(name: str, made: Path) -> None:
    """Compile the library for an instruction set of `SETS` to the file ``made``."""
    compiler = next(filter(shutil.which, ("clang", "gcc")))  # clang's code is faster here
    with tempfile.TemporaryDirectory() as objects:
        running = [subprocess.Popen(command) for command in commands(compiler, name, (), Path(objects))]
        if any([one.wait() for one in running]):
            sys.exit(f"{compiler} failed")
        each = map(str, Path(objects).glob("*.o"))
        subprocess.run([compiler, "-shared", "-pthread", "-o", str(made), *each, "-lm"], check=True)


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
