"""The tutorial's notebook, run from its first cell to its last on the reference model."""

import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_notebook_runs_and_finds_the_same_text(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    data.mkdir()
    # SmolLM2 is not among them, wherever it has been fetched.
    for name in ("pg19", "prompts", "reference-model", "heads-gated"):
        (data / name).symlink_to(REPOSITORY / "data" / name)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((REPOSITORY / "docs/examples/tutorial.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "notebook"}
    for number, source in enumerate(cells):
        exec(compile(source, f"cell {number}", "exec"), names)
        if not number:
            assert names["MODEL"] == "data/reference-model"
            names |= {"NEW_TOKENS": 16, "STEPS": 2, "CHUNKS": 1}
    printed = capsys.readouterr().out
    assert "identical: yes" in printed and "identical: True" in printed and "identical: False" not in printed
    results = json.loads((tmp_path / "runs/notebook/comparison/results.json").read_text())
    assert len(results["methods"]) == 3
    assert all(cell["cell_type"] == "markdown" or not cell["outputs"] for cell in notebook["cells"])
