"""Every command in the documents is one that its program takes.

A block of commands is read by bash itself, with functions in place of the programs, which tell how they were called.
"""

import argparse
import re
import statistics
import subprocess
import tomllib
from pathlib import Path

import pytest

import decoder.__main__
import ts_eval.cli
from heads_train import cli as heads_cli

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "docs", ROOT / "packages"]
PAGES = [*ROOT.glob("*.md"), ROOT / "data/README.md", *sorted(page for one in FOLDERS for page in one.rglob("*.md"))]
PROGRAMS = ["python", "python3", "decoder", "heads-train", "ts-eval", "torchrun", "make", "pip", "pytest"]
PROGRAMS += ["ruff", "mypy", "coverage", "source", "mkdir", "cp"]  # whose arguments are not looked at
EXTRAS = {"torchao", "bitsandbytes", "accelerate", "coverage", "openai"}  # packages that pages tell people to install


def blocks_of(page):
    """The blocks of commands: indented by four spaces behind an empty line, or fenced as bash."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.findall(r"(?:^    .*\n)+", rest, re.MULTILINE):
        before = rest[: rest.index(paragraph)].splitlines()[-1:]
        if not re.match(r"\s*[-*:!]|    ", before[0] if before and before[0].strip() else "") and ":::" not in before:
            yield paragraph


def calls_of(block):
    """The calls that bash makes of the block, each a list of words."""
    stand_in = "\n".join(f"{name}() {{ printf '%s\\x1f' {name} \"$@\"; printf '\\x1e'; }}" for name in PROGRAMS)
    result = subprocess.run(
        ["/bin/bash", "-c", f"{stand_in}\n{block}"],
        capture_output=True,
        text=True,
        env={"PATH": "", "LC_ALL": "C"},
        timeout=20,
    )
    assert not result.stderr, f"{result.stderr}\nin the block\n{block}"
    return [call.split("\x1f")[:-1] for call in result.stdout.split("\x1e")[:-1]]


def is_of_commands(block):
    first = block.strip().split(maxsplit=1)[0]
    return first in PROGRAMS or re.match(r"\w+=", first) or first in ("for", "#")


CALLS = [
    (str(page.relative_to(ROOT)), call)
    for page in PAGES
    for block in blocks_of(page)
    if is_of_commands(block)
    for call in calls_of(block)
]


def test_commands_are_found_in_each_place_that_has_some():
    pages = {page for page, _ in CALLS}
    assert {"README.md", "docs/tutorial.md", "docs/guides/heads.md", "packages/eval/README.md"} <= pages
    assert len(CALLS) > 100


class Taken(BaseException):
    """Raised where a command's arguments have been read, in place of what it would do."""


def check_decoder(words, monkeypatch):
    read = argparse.ArgumentParser.parse_args

    def then_stop(self, *arguments, **more):
        read(self, *arguments, **more)
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", then_stop)
    with pytest.raises(Taken):
        decoder.__main__.main(words)


def check_heads_train(words, monkeypatch):
    if words[0] in heads_cli.COMMANDS:
        for word in words:
            if word.startswith("runs/"):
                Path(word).mkdir(parents=True)  # heads that an earlier command has left
        heads_cli.COMMANDS[words[0]].make_context(words[0], list(words[1:]))
        return
    # To make the parser of a subcommand takes as long as a little training.
    subcommand = {words[0]: heads_cli.HeadsCLI.subcommands()[words[0]]}
    monkeypatch.setattr(heads_cli.HeadsCLI, "subcommands", staticmethod(lambda: subcommand))

    def stop(self):
        raise Taken

    monkeypatch.setattr(heads_cli.HeadsCLI, "before_instantiate_classes", stop)
    with pytest.raises(Taken):
        heads_cli.run([word for word in words if word != "--print_config"])


def check_script(words):
    """The script is there, and has each of the flags."""
    script = ROOT / words[0]
    assert script.is_file(), words[0]
    text = script.read_text(encoding="utf-8")
    missing = [flag for flag in re.findall(r"--[\w-]+", " ".join(words[1:])) if f'"{flag}"' not in text]
    assert not missing or "from_flags" in text or "add_flags" in text, f"{words[0]} has no {missing}"


def check_pip(words):
    assert words[0] == "install"
    for word in words[1:]:
        name, _, extras = word.rstrip("]").partition("[")
        if name.startswith("./packages/") or name == "tokenswift-decoder":
            folder = "packages/decoder" if name == "tokenswift-decoder" else name
            project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set(filter(None, extras.split(","))) <= set(project.get("optional-dependencies", {})), word
        else:
            assert word in {"-c", "constraints.txt", *EXTRAS}, word


@pytest.mark.parametrize(("page", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else None)
def test_a_command_of_the_documents_is_one_that_the_program_takes(page, call, monkeypatch, tmp_path):
    program, *words = call
    if program in ("python", "torchrun") and "-m" in words:
        module, words = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        program = {"ts_eval": "ts-eval", "heads_train": "heads-train"}.get(module, module)
    monkeypatch.chdir(tmp_path)
    if program == "decoder":
        check_decoder(words, monkeypatch)
    elif program == "ts-eval":
        ts_eval.cli.main.commands[words[0]].make_context(words[0], words[1:])
    elif program == "heads-train":
        check_heads_train(words, monkeypatch)
    elif program == "python":
        check_script(words)
    elif program == "pip":
        check_pip(words)
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_a_planted_fault_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "Text:\n\n    python -m decoder --model M --temprature 1 \\\n        --chat Hello\n\n"
        "and\n\n    nonsense --now\n"
    )
    wrong, unknown = blocks_of(page)
    (call,) = calls_of(wrong)
    with pytest.raises(SystemExit):
        check_decoder(call[3:], monkeypatch)
    with pytest.raises(AssertionError, match="nonsense"):
        calls_of(unknown)


def sentences_of(page):
    """The numbers of words of the page's sentences; code, tables, headings and addresses of links are left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    .*| *\|.*|#.*|<.*|!!!.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts = [part for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n\d+\. ", text) for part in PERIOD.split(paragraph)]
    return [len(part.split()) for part in parts if len(part.split()) > 1]


PERIOD = re.compile(r"(?<=[.?!])\s+")
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
OF_USERS = [*READMES, ROOT / "packages/decoder/PERFORMANCE.md", *sorted(ROOT.glob("docs/guides/*.md"))]


@pytest.mark.parametrize("page", OF_USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_half_of_a_pages_sentences_have_fewer_than_20_words(page):
    assert statistics.median(sentences_of(page)) < 20


def test_the_readmes_are_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700
    assert len((ROOT / "packages/decoder/README.md").read_text(encoding="utf-8").split()) <= 1500


def test_a_long_sentence_is_counted(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nTwo words. And [these four](of/a/link.md) are.\n\n    code that is none\n\n| a | table |\n"
    )
    assert sentences_of(page) == [2, 4]
