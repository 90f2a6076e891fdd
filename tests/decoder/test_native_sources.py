"""The sources of the native library: two compilers find nothing to say about them, and they are formatted."""

import re
import shutil
import subprocess
from itertools import product

import pytest

from decoder.backends.native import compiling

from .conftest import some


@pytest.mark.parametrize(
    ("instructions", "compiler"),
    some(
        product(("avx512bf16", "avxvnni", "avx2"), ("gcc", "clang")),
        [("avx512bf16", "gcc"), ("avxvnni", "clang"), ("avx2", "gcc")],
    ),
)
def test_the_sources_have_no_warnings(instructions, compiler, tmp_path):
    """Without optimising, which takes a minute; `test_native_targets.py` does that."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    flags = ("-fsyntax-only", "-Wall", "-Wextra", "-Werror")
    for command in compiling.commands(compiler, [instructions], flags, tmp_path):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_sources_are_formatted():
    if shutil.which("clang-format") is None:
        pytest.skip("needs clang-format")
    program = next(parent for parent in compiling.FOLDER.parents if (parent / ".clang-format").exists())
    files = [*compiling.files(), *(program / "tests/native").glob("*.c")]
    done = subprocess.run(["clang-format", "--dry-run", "-Werror", *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compiler(folder, triple, refuses="nothing"):
    """A compiler that knows its machine, and writes what it was told into what it makes."""
    made = folder / "a-cc"
    made.write_text(
        f"""#!/bin/sh
[ "$1" = -dumpmachine ] && echo {triple} && exit
case "$*" in *{refuses}*) echo "error: {refuses}?" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo "$*" > "$2"
"""
    )
    made.chmod(0o755)
    return str(made)


@pytest.mark.parametrize(
    "triple, refuses, sets",
    [
        ("x86_64-linux-gnu", "nothing", ("avx512bf16", "avx512", "avxvnni", "avx2")),
        ("x86_64-pc-linux-gnu", "-mavx512bf16", ("avx512", "avxvnni", "avx2")),
        ("x86_64-linux-gnu", "-mavxvnni", ("avx512bf16", "avx512", "avx2")),
        ("aarch64-linux-gnu", "nothing", ("i8mm", "neon", "generic")),
        ("aarch64-unknown-linux-gnu", "+i8mm", ("neon", "generic")),
    ],
)
def test_a_package_has_the_instruction_sets_of_its_compilers_machine(triple, refuses, sets, tmp_path):
    library, machine = compiling.compiled_for_shipping(tmp_path, compiler(tmp_path, triple, refuses))
    assert machine == triple.partition("-")[0]
    data = library.read_bytes()
    assert library.name == compiling.shipped_name(data) != compiling.shipped_name(data + b"\n")
    assert {name for name in compiling.INSTRUCTION_SETS if f"/{name}-products.o".encode() in data} == set(sets)


@pytest.mark.parametrize(
    "triple, refuses, reason",
    [
        ("arm64-apple-darwin23", "nothing", "it is for Linux on x86_64 or aarch64, and .* compiles for arm64-apple"),
        ("riscv64-linux-gnu", "nothing", "compiles for riscv64-linux-gnu"),
        ("''", "nothing", "compiles for what it does not say"),
        ("x86_64-linux-gnu", "-shared", "failed: error: -shared"),
        (None, None, r"^no C compiler \(/no/cc\) is installed$"),
    ],
)
def test_why_a_package_has_no_library(triple, refuses, reason, tmp_path):
    found = compiler(tmp_path, triple, refuses) if triple else "/no/cc"
    assert re.search(reason, compiling.compiled_for_shipping(tmp_path, found))
