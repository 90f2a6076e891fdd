"""The commands of the pages for users, run page by page on the reference model with a few tokens.

`test_documents.py` has all commands read by their programs. Here those are run that need no network, no GPU and no
second process. What is left out has tests of its own: see LEFT_OUT.
"""

import os
from pathlib import Path

import pytest

import decoder.__main__
import ts_eval.cli
from heads_train import cli as heads_cli

from .test_documents import CALLS, PROGRAMS

ROOT = Path(__file__).parents[1]
LEFT_OUT = {
    "make": "installs and fetches",
    "pip": "installs",
    "python3": "makes an environment",
    "torchrun": "tests/decoder/test_torchrun.py",
    "serve": "tests/decoder/test_serve_command.py",
    "decoder chat": "tests/decoder/test_commands.py",
    "requests.jsonl": "tests/decoder/test_jobs.py",
    "docs/examples": "tests/test_examples.py",
    "benchmarks": "tests/decoder/test_benchmarks.py",
    "llama.cpp": "tests/eval/test_llama_cpp.py",
    "reproduce": "tests/eval/test_reproduce.py",
    "--reference": "tests/eval/test_human_likeness.py",
    "llama31.yaml": "tests/heads_train/test_heads_cli.py, as all shipped configurations",
    "qwen25": "as llama31.yaml",
    "reference.yaml": "tests/heads_train/test_heads_cli.py",
    "--ray": "tests/decoder/test_jobs.py, tests/eval/test_compare.py",
    "generated.ray": "tests/heads_train/test_heads_generated.py",
    "heads-train export": "tests/heads_train/test_heads_export.py, test_heads_eagle3.py",
    "cuda": "needs a GPU",
    "meta-llama": "needs a network",
    ".gguf": "tests/decoder/test_gguf.py",
    "source": "of the shell",
    "pytest": "itself",
}
HERE = {"M": "data/reference-model", "data/smollm2": "data/reference-model", "H": "data/heads-gated", "F": "prompt.txt"}
HERE |= {"data/heads-smollm2": "data/heads-gated", "chats.jsonl": "data/prompts/books.jsonl", "--chat": "--prompt"}
HERE |= {"data/prompts/demo.jsonl": "data/prompts/books.jsonl"}
SHORT = {
    "compare": "--max-new-tokens 8 --prompt-tokens 32 --num-prompts 1 --runs 1",
    "exactness": "--max-new-tokens 8 --num-prompts 1",
    "bench": "--lengths 32 --widths 1,2 --repeats 1 --prompt-tokens 32 --new-tokens 8",
    "needle": "--lengths 200 --depths 0.5",
    "decoder": "--max-new-tokens 8",
    "heads-train": "--model.model_name_or_path data/reference-model --model.draft_vocab_size 512 --data.chunk_tokens 64"
    " --trainer.max_steps 2 --trainer.val_check_interval 2 --trainer.limit_val_batches 1",
}
PAGES = [f"docs/guides/{path.name}" for path in sorted((ROOT / "docs/guides").glob("*.md"))]
PAGES += ["README.md", "docs/tutorial.md", "docs/reference/command.md", "packages/decoder/README.md"]


def left_out(call):
    return call[0] in LEFT_OUT or any(part in " ".join(call) for part in LEFT_OUT if part not in PROGRAMS)


def words_of(call):
    """The module and the words of a call, with what is here in place of what is not."""
    program, *words = call
    if program == "python":
        program, words = words[1], words[2:]
    words = [HERE.get(word, word) for word in words]
    kind = words[0] if program == "ts-eval" else program
    short = SHORT.get(kind, "").split() if words[0] != "doctor" else []
    return program, words + short


def run(program, words):
    if program == "decoder":
        assert decoder.__main__.main(words) == 0
    elif program == "ts-eval":
        ts_eval.cli.main(words, standalone_mode=False)
    elif "--print_config" in words:
        with pytest.raises(SystemExit):
            heads_cli.main(words)
    else:
        assert heads_cli.main(words) == 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout with the reference model alone."""
    data = tmp_path / "data"
    (data / "prompts").mkdir(parents=True)
    for name in ("pg19", "reference-model", "heads-gated", "draft-model"):
        (data / name).symlink_to(ROOT / "data" / name)
    (data / "prompts/books.jsonl").write_text('{"text": "It was a dark night, and"}\n{"text": "Call me"}\n')
    (tmp_path / "prompt.txt").write_text("It was a dark night, and")
    (tmp_path / "pilot.json").write_text('{"type": "object", "properties": {"age": {"type": "integer"}}}')
    (tmp_path / "my-texts").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, folder):
    for call in [call for place, call in CALLS if place == page and not left_out(call)]:
        run(*words_of(call))


def test_most_commands_of_these_pages_are_run():
    calls = [call for page, call in CALLS if page in PAGES]
    assert sum(1 for call in calls if not left_out(call)) > 20
