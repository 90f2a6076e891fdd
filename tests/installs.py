"""Each package by itself, and each extra by itself, in an environment of its own, with the tests of what it promises.

    python tests/installs.py DIST [INSTALL ...]

DIST is a folder with the wheels of the three packages, INSTALL one of `INSTALLS`, all of them if there is none. The
environment of `make test` has every extra, so nothing that is missing from a plain install shows there. Takes one to
five minutes for each, and 20 for llama-cpp, which is compiled.
"""

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


@dataclass(frozen=True)
class Install:
    """What is installed, and what is promised of it.

    Args:
        packages: wheels, the last one with its extra.
        tests: files below `tests`; none of their tests may be skipped.
        absent: modules of other extras, without which all of this works.
        tools: what else these tests need.
        chosen: arguments of pytest that choose among their tests.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    absent: tuple[str, ...]
    tools: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()


OF_EXTRAS = ("accelerate", "gguf", "starlette", "uvicorn", "mauve", "llama_cpp", "triton", "peft", "llguidance")
OF_SERVED_TESTS = ("starlette", "uvicorn", "prometheus_client", "openai")
INSTALLS = {
    "decoder": Install(
        ("decoder",),
        ("decoder/test_plain_install.py", "decoder/test_using_it.py", "decoder/test_command.py"),
        ("lightning", "datasets", *OF_EXTRAS),
        chosen=("-k", "not shape_that"),  # which needs constraints
    ),
    "decoder[gguf]": Install(
        ("decoder[gguf]",), ("decoder/test_gguf*.py",), ("accelerate", "starlette", "uvicorn", "mauve", "triton")
    ),
    "decoder[constraints]": Install(
        ("decoder[constraints]",),
        ("decoder/test_grammars.py", "decoder/test_command.py"),
        ("accelerate", "gguf", "starlette", "uvicorn", "mauve", "triton"),
        ("jsonschema",),
    ),
    "decoder[parquet]": Install(
        ("decoder[parquet]",),
        ("decoder/test_jobs.py",),
        ("lightning", "accelerate", "gguf", "mauve", "llama_cpp", "triton", "peft", "llguidance"),
        OF_SERVED_TESTS,
        ("-k", "parquet"),
    ),
    "decoder[ray]": Install(
        ("decoder[ray]",),
        ("decoder/test_jobs.py",),
        ("lightning", "accelerate", "gguf", "mauve", "llama_cpp", "triton", "peft", "llguidance"),
        OF_SERVED_TESTS,
        ("-m", "slow", "-k", "ray"),
    ),
    "decoder[serve]": Install(
        ("decoder[serve]",),
        ("decoder/test_serve.py", "decoder/test_serve_command.py", "decoder/test_serve_logprobs.py"),
        ("accelerate", "gguf", "mauve", "triton"),
        ("openai",),
    ),
    "decoder[tensor-parallel]": Install(
        ("decoder[tensor-parallel]",),
        ("decoder/test_plain_install.py", "decoder/test_tensor_parallel.py"),
        ("gguf", "starlette", "uvicorn", "mauve", "triton"),
    ),
    "heads-train": Install(
        ("decoder", "heads-train"),
        ("heads_train/test_heads_cli.py", "heads_train/test_heads_training.py", "heads_train/test_heads_data.py"),
        ("accelerate", "gguf", "starlette", "uvicorn", "mauve", "triton"),
    ),
    "eval": Install(
        ("decoder", "eval"),
        ("eval/test_eval_cli.py", "eval/test_compare.py", "eval/test_plan.py", "eval/test_report.py"),
        ("lightning", "accelerate", "gguf", "starlette", "uvicorn", "mauve", "triton"),
    ),
    "eval[llama-cpp]": Install(
        ("decoder", "eval[llama-cpp]"),
        ("eval/test_llama_cpp.py",),
        ("lightning", "accelerate", "starlette", "uvicorn", "mauve", "triton"),
        ("gguf",),  # which writes the model
    ),
    "eval[mauve]": Install(
        ("decoder", "eval[mauve]"),
        ("eval/test_human_likeness.py",),
        ("lightning", "accelerate", "gguf", "starlette", "uvicorn", "triton"),
    ),
}


NATIVE = """
from transformers import LlamaConfig, LlamaForCausalLM
from decoder import Decoder, SamplingParams
sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2)
dec = Decoder(LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)))
texts = [dec.generate([1, 2, 3] * 9, 20, method, SamplingParams(seed=1)).token_ids for method in ("ar", "suffix")]
assert texts[0] == texts[1], texts
[line] = [line for line in dec.report().splitlines() if line.split()[:2] == ["native", "library"]]
assert " on " in line, line
"""


def wheel(dist: Path, package: str) -> str:
    """The path of a package's wheel for this machine, with the extra that is asked for."""
    name, bracket, extra = package.partition("[")
    wheels = dist.glob(f"tokenswift_{name.replace('-', '_')}-*.whl")
    (found,) = (file for file in wheels if file.stem.endswith(("-any", f"_{platform.machine()}")))
    return f"{found.resolve()}{bracket}{extra}"


def fault(install: Install, dist: Path, folder: Path) -> str | None:
    """Install it into ``folder`` and try what it promises; what is wrong, in words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess:
        line = [str(folder / "bin" / "python"), *arguments]
        return subprocess.run(line, cwd=ROOT, env={**environment, **more}, capture_output=True, text=True)

    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wheels = [wheel(dist, package) for package in install.packages]
    quiet = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS))
    for wanted in (wheels, ["pytest", "hypothesis", *install.tools]):
        if (made := run(*quiet, *wanted)).returncode:
            return f"it cannot be installed: {made.stderr}"
    there = run("-c", f"from importlib.util import find_spec; print([m for m in {install.absent} if find_spec(m)])")
    if there.stdout.strip() != "[]":
        return f"the environment is not plain, it has {there.stdout or there.stderr}"
    if not run("-c", "import decoder; print(decoder.__file__)").stdout.startswith(str(folder)):
        return "the package is imported from elsewhere"
    if not wheels[0].endswith("-any.whl"):
        # Where no compiler is found, nor a library that was compiled before.
        library = run("-W", "error", "-c", NATIVE, PATH=str(folder / "bin"), XDG_CACHE_HOME=str(folder / "cache"))
        if library.returncode:
            return f"it does not decode by the native library that it brings: {library.stdout}{library.stderr}"
    files = [str(file) for pattern in install.tests for file in sorted((ROOT / "tests").glob(pattern))]
    if len(files) < len(install.tests):
        return f"of {', '.join(install.tests)} there is not every file"
    tests = run("-m", "pytest", "-rs", "-p", "no:cacheprovider", *install.chosen, *files)
    return tests.stdout + tests.stderr if tests.returncode or "SKIPPED" in tests.stdout else None


def main() -> int:
    dist, names = Path(sys.argv[1]), sys.argv[2:] or list(INSTALLS)
    faults = {}
    for name in names:
        print(f"{name}: ", end="", flush=True)
        with tempfile.TemporaryDirectory(dir=dist) as folder:
            faults[name] = fault(INSTALLS[name], dist, Path(folder).resolve())
        print(faults[name] or "as promised", flush=True)
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
