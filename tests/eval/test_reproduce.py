"""`ts-eval reproduce`: the paper's grids are well formed, run, resume, and stand beside the paper's figures."""

import math
import re
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

import decoder
from ts_eval import defaults, reproduce
from ts_eval.cli import main
from ts_eval.method_spec import MethodSpec
from ts_eval.paper import TARGETS
from ts_eval.report import read_results


def run(data, output, *arguments: str):
    command = ["reproduce", *arguments, "--data-dir", str(data), "--output", str(output)]
    return CliRunner(env={"COLUMNS": "150"}).invoke(main, command)


@pytest.mark.parametrize("name", TARGETS)
def test_every_grid_is_well_formed(name):
    target = TARGETS[name]
    rows = {}
    for cell in target.cells:
        rows |= cell.rows
        decoder.SamplingParams(**{**defaults.SAMPLING, **cell.sampling})
        for method in cell.rows.values():
            decoder.TokenSwiftOptions(**MethodSpec.parse(method).options)
    assert len({cell.name for cell in target.cells}) == len(target.cells)
    assert len(rows) == sum(len(cell.rows) for cell in target.cells)
    assert set(target.paper) <= set(rows)
    for figures in target.paper.values():
        assert set(figures) <= set(target.figures)
        assert {len(values) for values in figures.values()} == {max(len(target.at), 1)}
        assert all(math.isfinite(value) for values in figures.values() for value in values)
    if target.grid is not None:
        assert TARGETS[target.grid].cells == target.cells
    for trend in target.trends:
        assert {trend.above, trend.below} <= set(rows) and trend.figure in target.figures


def test_the_papers_own_figures_show_the_trends_it_tells():
    untold = []
    for name, target in TARGETS.items():
        told = {
            row: {figure: list(found.get(figure, [None])) for figure in target.figures}
            for row, found in ((row, target.paper.get(row, {})) for cell in target.cells for row in cell.rows)
        }
        for says, verdict in reproduce.trends(target, told):
            if verdict == "not measured":
                untold.append(name)
            else:
                assert verdict.startswith("agrees ("), (name, says, verdict)
    # Of these the paper shows a plot or pages and tells no numbers.
    assert untold == ["figure-4", "figure-4", "figure-5"]


def test_a_trend_agrees_only_where_the_figures_differ():
    target = TARGETS["table-5"]

    def verdict(dynamic: float, static: float) -> str:
        rows = {"dynamic": dynamic, "chosen once": static, "full cache": 0.4}
        told = reproduce.trends(target, {row: {"alpha": [alpha], "x": [None]} for row, alpha in rows.items()})
        assert told[1][1] == "not measured"
        return told[0][1]

    assert verdict(0.4, 0.2) == "agrees (0.40 and 0.20)"
    assert verdict(0.2, 0.4) == "does not agree (0.20 and 0.40)"
    assert verdict(0.342, 0.338) == "no difference (0.34 and 0.34)"


def test_a_table_is_run_beside_the_papers_and_taken_over(data, tmp_path):
    result = run(data, tmp_path, "table-5", "--scale", "0.001")
    assert result.exit_code == 0, result.output
    for expected in ("(0.42)", "(1.96)", "dynamic", "chosen once", "alpha at 102", "a dynamic cache accepts more"):
        assert expected in result.stdout
    page = (tmp_path / "table-5.md").read_text()
    assert "## table-5" in page and page.count("| dynamic |") == 1
    assert (tmp_path / "table-5/caches/results.json").is_file()

    again = run(data, tmp_path, "table-5", "--scale", "0.001")
    assert "4 finished generations taken over" in again.stderr
    assert again.stdout == result.stdout


def test_a_pages_figures_are_those_of_the_results(data, tmp_path, monkeypatch):
    # Two of the six cells are told apart as well.
    target = replace(TARGETS["table-8"], cells=TARGETS["table-8"].cells[0:3:2])
    monkeypatch.setitem(TARGETS, "table-8", target)
    page = reproduce.reproduce("table-8", 0.0004, tmp_path, data_dir=data)
    for cell in target.cells:
        results = read_results(tmp_path / "table-8" / cell.name)
        assert results["settings"]["sampling"]["repetition_penalty"] == cell.sampling["repetition_penalty"]
        assert results["settings"]["max_new_tokens"] == round(102400 * 0.0004)
        mean = results["methods"]["tokenswift"]["distinct"]["mean"]
        label = next(iter(cell.rows))
        assert f"| {label} | {mean:.2f} ({target.paper[label]['distinct'][0]:.2f}) |" in page


def test_figure_5_marks_the_repeated_spans(data, tmp_path):
    result = run(data, tmp_path, "figure-5", "--scale", "0.002")
    assert result.exit_code == 0, result.output
    for cell, row in (("theta-1.0", "no penalty"), ("theta-1.2", "penalty 1.2")):
        assert row in result.stdout
        repeated = read_results(tmp_path / "figure-5" / cell)["methods"]["tokenswift"]["repeated_share"]
        marked = re.findall(r'<span class="(?:a )?r">[^<]', (tmp_path / "figure-5" / cell / "report.html").read_text())
        # The legend holds one.
        assert (len(marked) > 1) == (repeated > 0)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["table-99"], "table-99"),
        (["table-5", "--scale", "0.0001"], "--scale must"),
        (["table-1", "--scale", "-1"], "--scale must"),
    ],
)
def test_wrong_input_is_one_sentence(data, tmp_path, arguments, culprit):
    result = run(data, tmp_path / "out", *arguments)
    assert result.exit_code == 2 and culprit in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_of_a_target_reach_the_decoder(data, tmp_path):
    reproduce.reproduce("figure-3", 0.0008, tmp_path, data_dir=data)
    options = read_results(tmp_path / "figure-3/ngrams")["settings"]["options"]
    assert options["tokenswift:ngrams=0"] == {**asdict(decoder.TokenSwiftOptions(ngrams=0)), "tree": [1, 3, 3, 3]}
