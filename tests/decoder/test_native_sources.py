"""The sources of the native library: compilers of two families find nothing to say about them, for any processor."""

import shutil
import subprocess

import pytest

from decoder.backends.native import compiling

X86 = ("avx512bf16", "avx512", "avx2", "generic")


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("instructions", X86)
def test_the_sources_compile_without_warnings(compiler, instructions, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for command in compiling.commands(compiler, [instructions], ("-O1", "-Wall", "-Wextra", "-Werror"), tmp_path):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_sources_are_formatted():
    if shutil.which("clang-format") is None:
        pytest.skip("needs clang-format")
    done = subprocess.run(
        ["clang-format", "--dry-run", "-Werror", *map(str, compiling.files())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
