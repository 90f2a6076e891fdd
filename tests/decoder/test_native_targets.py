"""The native library for several targets: the same bits where they are promised, and no fault that sanitizers find.

`tests/native/hashes.c` prints a hash of what each function makes of fixed inputs, on some threads; `callers.c` calls
the library from several at once. Programs for aarch64 run in qemu.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.backends.native import compiling
from decoder.backends.native import library as native

from .. import emulated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with what this machine computes"),
]
PROGRAMS = Path(__file__).parents[1] / "native"
PROGRAM = PROGRAMS / "hashes.c"
SANITIZERS = {
    "memory": ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "threads": ("-g", "-O1", "-fsanitize=thread"),
}
WARNINGS = ("-Wall", "-Wextra", "-Werror")
QUANTISED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "unpacked"}


def built(folder, compiler, sets, flags=(), commands=compiling.commands):
    """The program with the library's files for these instruction sets."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for command in commands(compiler, sets, (*flags, *WARNINGS), folder):
        subprocess.run(command, check=True)
    made, objects = folder / "hashes", map(str, folder.glob("*.o"))
    given = [*compiling.FLAGS, *flags, *WARNINGS, "-I", str(compiling.FOLDER)]
    subprocess.run([compiler, *given, "-o", str(made), str(PROGRAM), *objects, "-lm"], check=True)
    return made


def printed(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def sets_here():
    """Those of this processor."""
    return native._instruction_sets(None)


REFERENCES = {"lanes8": (), "lanes16": ("-DREFERENCE_LANES=16",), "bf16": ("-DREFERENCE_LANES=16", "-DREFERENCE_BF16")}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """What the generic set prints here with 8 lanes, with 16, and with products of bfloat16 numbers."""
    programs = {
        name: built(tmp_path_factory.mktemp(name), "gcc", ["generic"], flags) for name, flags in REFERENCES.items()
    }
    return {name: printed(program, "generic", 1) for name, program in programs.items()}


@pytest.fixture(scope="module")
def expected(references):
    return references["lanes8"]


def check_bits(name, lines, references):
    """Those of the reference with as many lanes, and of all where products of whole numbers are exact."""
    assert lines == references[{"avx512": "lanes16", "avx512bf16": "bf16"}.get(name, "lanes8")]
    same = {line for line in lines if line.split()[0] in QUANTISED}
    assert len(same) >= 80 and same <= set(references["lanes8"])


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_instruction_sets_have_the_bits_that_they_promise(compiler, references, tmp_path):
    program = built(tmp_path, compiler, sets_here())
    for name in sets_here():
        check_bits(name, printed(program, name, 3), references)


def test_instructions_computed_by_avx2_have_the_bits_of_such_processors(references, tmp_path):
    compiler = emulated.compiler()
    program = built(tmp_path, compiler, emulated.SETS, commands=emulated.commands)
    for name in emulated.SETS:
        check_bits(name, lines := printed(program, name, 3), references)
        if name in sets_here():
            (own := tmp_path / name).mkdir()
            assert lines == printed(built(own, compiler, [name]), name, 3)


def test_a_packages_library_for_aarch64_has_the_bits_of_this_machine(expected, tmp_path):
    compiler = "aarch64-linux-gnu-gcc"
    if shutil.which("qemu-aarch64") is None or shutil.which(compiler) is None:
        pytest.skip(f"needs qemu-aarch64 (qemu-user) and {compiler}")
    library, machine = compiling.compiled_for_shipping(tmp_path, compiler)
    assert machine == "aarch64"
    program = tmp_path / "hashes"
    given = [*compiling.FLAGS, *WARNINGS, "-I", str(compiling.FOLDER), "-o", str(program), str(PROGRAM), str(library)]
    subprocess.run([compiler, *given, "-Wl,-rpath,$ORIGIN", "-lm"], check=True)
    for instructions in compiling.OF_MACHINE[machine]:
        assert printed("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program, instructions, 3) == expected


@pytest.mark.parametrize(
    "target, processors",
    [
        ("aarch64-macos", {"neon": "apple_m1", "i8mm": "apple_m2", "generic": "baseline"}),
        ("x86_64-macos", {"avx2": "haswell"}),
    ],
)
def test_all_compiles_and_is_linked_for_macos(target, processors, tmp_path):
    """By Zig's copy of clang, which has what macOS declares and names processors in its own way. Nothing is run."""
    pytest.importorskip("ziglang")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
    commands = compiling.commands("cc", [*processors], WARNINGS, tmp_path)
    for command in commands:
        name = Path(command[command.index("-o") + 1]).name.partition("-")[0]
        given = [one for one in command[1:] if not one.startswith("-march")]
        own = [f"-mcpu={processors[name]}"] if name in processors else []
        subprocess.run([*zig, *own, *given], check=True)
    assert len(commands) > 10
    made, objects = tmp_path / "native.so", map(str, tmp_path.glob("*.o"))
    subprocess.run([*zig, "-shared", "-o", str(made), *objects], check=True)
    assert made.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # 64 bits, as Macs have them


@pytest.mark.parametrize("kind", SANITIZERS)
@pytest.mark.parametrize("instructions", sets_here())
def test_sanitizers_find_nothing(instructions, kind, references, tmp_path):
    program = built(tmp_path, "gcc", [instructions], SANITIZERS[kind])
    check_bits(instructions, printed(program, instructions, 3), references)


def test_sanitizers_find_nothing_where_avx2_computes_avx512(references, tmp_path):
    name = emulated.SETS[0]
    program = built(tmp_path, "gcc", [name], SANITIZERS["memory"], emulated.commands)
    check_bits(name, printed(program, name, 3), references)


@pytest.mark.parametrize("kind", [None, "threads"])
def test_several_threads_and_forked_processes_call_at_once_and_the_library_is_let_go(kind, tmp_path):
    """The sanitizer has its own opinion of processes that are forked from one of several threads."""
    flags, library, program = SANITIZERS.get(kind, ()), tmp_path / "native.so", tmp_path / "callers"
    assert compiling.fault_of_compiling("gcc", library, ["avx2"], flags) is None
    given = [*compiling.FLAGS, *flags, *WARNINGS, "-I", str(compiling.FOLDER), "-o", str(program)]
    subprocess.run(["gcc", *given, str(PROGRAMS / "callers.c"), "-ldl"], check=True)
    printed(program, library, *["nofork"] * (kind is not None))
