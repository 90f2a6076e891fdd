"""Each check of `make` against a planted fault: a check that passes whatever it looks at is worse than none."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
GOOD = '"""A module."""\n'


def commands(target):
    """The commands of one of the Makefile's targets, as they stand there, with the programs of this environment."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)[1]
    return [line.strip().replace("$(BIN)", str(BIN)) for line in recipe.splitlines()]


def command(target, word):
    (found,) = [line for line in commands(target) if word in line]
    return found


def run(line, folder):
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def project(tmp_path):
    """A project without a fault, with this one's settings of the tools."""
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    for name in ("decoder", "heads-train", "eval"):
        source = tmp_path / "packages" / name / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__init__.py").write_text(GOOD)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_good.py").write_text("def test_good():\n    assert True\n")
    return tmp_path


def in_one_process(tool):
    return command("test", tool).replace(" -n 2 --dist worksteal", " -p no:cacheprovider")


@pytest.mark.parametrize("tool", ["ruff check", "ruff format", "mypy", "pytest"])
def test_a_project_without_a_fault_passes(tool, project):
    assert run(in_one_process(tool), project).returncode == 0


@pytest.mark.parametrize(
    ("tool", "place", "fault"),
    [
        ("ruff check", "packages/eval/src/eval/fault.py", "import os\n"),
        ("ruff check", "tests/test_fault.py", "def test_of_nothing():\n    undefined\n"),
        ("ruff check", "data/scripts/fault.py", "x = [i for i in range(3)] if True else None;\n"),
        ("ruff format", "packages/decoder/src/decoder/fault.py", "x = {'a':1}\n"),
        ("ruff format", "docs/examples/fault.py", "def f( ): return 1\n"),
        ("mypy", "packages/decoder/src/decoder/fault.py", 'x: int = "text"\n'),
        ("mypy", "packages/heads-train/src/heads_train/fault.py", "def f():\n    return len(3)\n"),
        ("mypy", "packages/eval/src/eval/fault.py", "def f(x: int | None) -> int:\n    return x + 1\n"),
        ("pytest", "tests/test_fault.py", "def test_of_one():\n    assert 1 == 2\n"),
        ("pytest", "tests/test_fault.py", "import no_such_module\n"),
        ("pytest", "tests/test_fault.py", "import pytest\n\n@pytest.mark.sloow\ndef test_of_one():\n    pass\n"),
    ],
)
def test_a_planted_fault_ends_make_test(tool, place, fault, project):
    line = in_one_process(tool)
    (project / place).parent.mkdir(parents=True, exist_ok=True)
    (project / place).write_text(fault)
    found = run(line, project)
    assert found.returncode, found.stdout + found.stderr
    assert "fault.py" in found.stdout + found.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A small site of two pages and one module, built as the documentation is."""
    folder = tmp_path_factory.mktemp("site")
    settings, _ = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    (folder / "mkdocs.yml").write_text(settings)
    docs = folder / "docs"
    (docs / "stylesheets").mkdir(parents=True)
    (docs / "stylesheets" / "extra.css").touch()
    (docs / "hooks.py").write_bytes((ROOT / "docs" / "hooks.py").read_bytes())
    (docs / "other.md").write_text("# Other\n")
    source = folder / "packages" / "decoder" / "src"
    source.mkdir(parents=True)
    (source / "sample.py").write_text('def f(a: int) -> int:\n    """Add.\n\n    Args:\n        a: what.\n    """\n')
    (source / "wrong.py").write_text('def f(a: int) -> int:\n    """Add.\n\n    Args:\n        b: what.\n    """\n')
    return folder


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {
            "[link](nowhere.md)": "0.md' contains a link 'nowhere.md'",
            "[link](other.md#nowhere)": "1.md' contains a link 'other.md#nowhere'",
            "[link](/other.md)": "2.md' contains an absolute link",
            "[link](../README.md)": "3.md' contains a link '../README.md'",
            "![picture](nowhere.png)": "4.md' contains a link 'nowhere.png'",
            "[f][sample.nowhere]": "5.md: Could not find cross-reference target 'sample.nowhere'",
            "::: wrong.f": "wrong.py:5: Parameter 'b' does not appear",
        },
        {"::: sample.nowhere": "sample.nowhere could not be found"},
        {'--8<-- "nowhere.md"': "nowhere.md"},
    ],
    ids=["none", "each is told", "no such module", "no such file"],
)
def test_planted_faults_end_make_docs(faults, site):
    (site / "docs" / "index.md").write_text("# Start\n[other](other.md#other), [f][sample.f]\n\n::: sample.f\n")
    for number in range(7):
        (site / "docs" / f"{number}.md").write_text(f"# A page\n\n{''.join(list(faults)[number : number + 1])}\n")
    found = run(command("docs", "mkdocs build"), site)
    told = [line for line in found.stderr.splitlines() if line.startswith(("WARNING", "ERROR", "Aborted"))]
    assert bool(found.returncode) == bool(faults), found.stderr
    assert all(any(words in line for line in told) for words in faults.values()), found.stderr


def test_what_one_command_of_a_target_finds_is_not_passed_over():
    """Only what `make demo` may do without is: the real model, where the package index cannot be reached."""
    for line in MAKEFILE.splitlines():
        if line.startswith("\t") and ("|| true" in line or line.startswith("\t-")):
            assert "fetch_smollm2.py" in line
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script and script.rstrip().endswith("make test")


def links_of(page):
    """Where the links of a page lead that is on this disk; blocks of code hold none."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors_of(page):
    """The anchors that a site makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if included := re.fullmatch(r'--8<-- "(.+)"\s*', text):
        return anchors_of(ROOT / included[1])
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading)).strip("-") for heading in plain}


def broken_links(pages):
    broken = []
    for page in pages:
        for target in links_of(page):
            path, _, anchor = unquote(target).partition("#")
            there = (page.parent / path).resolve() if path else page
            fits = there.exists() and (not anchor or there.suffix != ".md" or anchor in anchors_of(there))
            broken += [] if fits else [f"{page.name}: {target}"]
    return broken


def test_links_between_the_files_of_the_repository_lead_somewhere():
    """Also in those that are no page of the documentation."""
    folders = [ROOT / "docs", ROOT / "packages"]
    pages = [*ROOT.glob("*.md"), ROOT / "data" / "README.md", *(page for one in folders for page in one.rglob("*.md"))]
    assert len(pages) > 10 and sum(1 for page in pages for _ in links_of(page)) > 50
    assert broken_links(pages) == []


def test_a_planted_broken_link_is_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One `two` thing\n")
    page.write_text(
        "[a](other.md#one-two-thing) [b](https://example.org) [c](nowhere.md) [d](other.md#else) `[e](f)`\n"
    )
    assert broken_links([page]) == ["page.md: nowhere.md", "page.md: other.md#else"]
