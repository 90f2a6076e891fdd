"""`ts-eval compare --tensor-parallel`: processes that share the model give the results of one, in one folder."""

import json

from click.testing import CliRunner
from tests.decoder.ranks import on_ranks

from ts_eval.cli import main

SHORT = [
    "--prompt-tokens",
    "40",
    "--max-new-tokens",
    "10",
    "--tree",
    "1,2",
    "--ngrams",
    "2",
    "--dtype",
    "float64",
    "--runs",
    "1",
]


def compare(data, output, *arguments):
    command = ["compare", "ar", "tokenswift", "hf", "--data-dir", str(data), *SHORT, "--output", str(output)]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, [*command, *arguments])
    return result.exit_code, result.stdout, result.stderr


def rank_compares(rank, data, output):
    return [
        compare(data, output, "--tensor-parallel", "--check-lossless"),
        compare(data, output, "--tensor-parallel", "--check-lossless"),
        compare(data, output, "--tensor-parallel", "--processes", "2"),
        compare(data, output, "--tensor-parallel", "--runs", "2"),
    ]


def tokens(output):
    results = json.loads((output / "results.json").read_text())
    runs = {name: [run["token_ids"] for run in row["runs"]] for name, row in results["methods"].items()}
    return runs, results["settings"].get("tensor_parallel_size")


def test_processes_that_share_the_model_write_the_results_of_one(data, tmp_path):
    assert compare(data, tmp_path / "one")[0] == 0
    first, other = on_ranks(2, rank_compares, data, tmp_path / "two")
    assert [status for status, *_ in first] == [0, 0, 2, 2] == [status for status, *_ in other], first
    assert tokens(tmp_path / "two") == (tokens(tmp_path / "one")[0], 2)
    assert "3 finished generations taken over" in first[1][2]
    assert [out for _, out, _ in other] == [""] * 4 and other[0][2] == other[1][2] == ""
    told = first[2][2] + other[2][2]
    assert "give one of them" in told and told.count("\n") == 1
    assert "holds generations of other settings (runs)" in first[3][2]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "generations.jsonl",
        "results.json",
        "run.yaml",
    ]
