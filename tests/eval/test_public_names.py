"""ts-eval and heads-train use public names of the decoder alone, so that files inside it can move."""

import ast
from pathlib import Path

import pytest

import decoder
import heads_train
import ts_eval
from decoder import parts

OPEN = ("auditing", "collecting", "drafters", "heads", "options", "parts", "timings")
PUBLIC = {"decoder"} | {f"decoder.{name}" for name in OPEN}
PARTS = {name for name in vars(parts) if not name.startswith("_")}


def imports(file):
    """The names of modules and what is imported from them, in a file's top or below."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def private(folder):
    found = []
    for file in sorted(folder.rglob("*.py")):
        for module, name in imports(file):
            ours = module.partition(".")[0] == "decoder"
            listed = {"decoder": decoder.__all__, "decoder.parts": PARTS}.get(module)
            unlisted = name is not None and (name.startswith("_") or (listed is not None and name not in listed))
            if ours and (module not in PUBLIC or unlisted):
                found.append(f"{file.name}: {module} {name}")
    return found


FOLDERS = [Path(package.__file__).parent for package in (ts_eval, heads_train)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_only_public_names_are_imported(folder):
    assert private(folder) == []


def test_private_names_are_found(tmp_path):
    (tmp_path / "a.py").write_text("import decoder\nfrom decoder import load\nfrom decoder.options import parse_tree\n")
    assert private(tmp_path) == []
    (tmp_path / "b.py").write_text(
        "from decoder.engine import Engine\nimport decoder.engine\nfrom decoder import engine\n"
        "from decoder.parts import nothing\ndef f():\n    from decoder.heads import _read\n"
    )
    assert len(private(tmp_path)) == 5


def test_what_is_public_is_used():
    """A part that nobody outside needs is the decoder's own."""
    used = {name for folder in FOLDERS for file in folder.rglob("*.py") for _, name in imports(file)}
    assert used >= PARTS
