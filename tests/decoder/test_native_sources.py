"""The sources of the native library: two compilers find nothing to say about them, and they are formatted."""

import shutil
import subprocess

import pytest

from decoder.backends.native import compiling


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("instructions", ["avx512bf16", "avx2"])
def test_the_sources_have_no_warnings(compiler, instructions, tmp_path):
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
    files = [*compiling.files(), program / "tests/native/hashes.c"]
    done = subprocess.run(["clang-format", "--dry-run", "-Werror", *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
