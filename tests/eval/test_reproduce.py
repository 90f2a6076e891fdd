"""`ts-eval reproduce`: experiments are well formed, share their texts, resume, and stand beside the paper's figures."""

import json
import math
import re
import shutil
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner
from transformers import GPT2Config

import decoder
from ts_eval.cli import main
from ts_eval.commands.terminal import show
from ts_eval.compare import compare
from ts_eval.comparing.method_spec import MethodSpec
from ts_eval.comparing.progress import Progress
from ts_eval.comparing.results import OtherSettingsError
from ts_eval.paper import configured, reproduced_page
from ts_eval.paper import experiments as paper
from ts_eval.paper import reproduce as reproduction
from ts_eval.paper.reproduce import cell_of, method_of, reproduce
from ts_eval.paper.reproduced_page import Found, coinciding, verdict
from ts_eval.planning.model_shape import read_shape
from ts_eval.report import read_results

TARGETS = paper.targets()


def run(data, output, *arguments: str):
    command = ["reproduce", *arguments, "--data-dir", str(data), "--output", str(output)]
    return CliRunner(env={"COLUMNS": "150"}).invoke(main, command)


def generated(folder) -> list[tuple]:
    """(row, prompt, run) of all texts below a folder, as often as they were generated."""
    logs = sorted(folder.glob("texts/*/generations.jsonl"))
    records = [(log.parent.name, json.loads(line)) for log in logs for line in log.read_text().splitlines()]
    return [(name, r["method"], r["prompt_index"], r["run"]) for name, r in records if "method" in r]


@pytest.mark.parametrize("name", TARGETS)
def test_every_experiment_is_well_formed(name):
    target = TARGETS[name]
    lengths = len(target.places)
    for row in target.rows.values():
        decoder.SamplingParams(**row.sampling)
        for told in (row.paper, row.std):
            assert set(told) <= set(target.figures)
            assert {len(values) for values in told.values()} <= {lengths}
            assert all(math.isfinite(value) for values in told.values() for value in values if value is not None)
        assert set(row.std) <= set(row.paper)
        if target.computed is None and row.method is not None:
            assert isinstance(decoder.TokenSwiftOptions(**MethodSpec.parse(method_of(row, 0.01)).options).depth, int)
    assert target.computed is None or callable(getattr(configured, target.computed))
    for trend in target.trends:
        assert {trend.above, trend.below} <= set(target.rows) and trend.figure in target.figures


def test_the_papers_own_figures_show_the_trends_it_tells():
    untold = []
    for name, target in TARGETS.items():
        for trend in target.trends:
            # A text of its own would show the same.
            above, below = (
                2 * target.rows[row].paper.get(trend.figure, [None])[-1:] for row in (trend.above, trend.below)
            )
            found = verdict(above, below)
            if found == "not measured":
                untold.append(name)
            else:
                assert found.startswith("agrees ("), (name, trend.says, found)
    # Of these the paper shows a plot or pages and tells no numbers.
    assert untold == ["figure-4"] * 4 + ["figure-5", "figure-6"]


def test_the_papers_figures_are_all_there():
    assert list(TARGETS) == [
        *(f"table-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16)),
        *(f"figure-{n}" for n in (1, 3, 4, 5, 6)),
    ]
    for name in ("table-3", "table-4", "table-5", "table-7", "table-12", "table-13", "table-14", "table-15"):
        for row in TARGETS[name].rows.values():
            assert len(row.paper["alpha"]) == len(row.paper["x"]) == 5
    assert TARGETS["table-3"].rows["Llama-2 8K TokenSwift"].paper["x"] == [1.91, 2.5, 2.84, 3.05, 3.2]
    assert TARGETS["table-3"].rows["Llama-3.1 8K TokenSwift"].std["x"] == [0.2, 0.22, 0.17, 0.13, 0.1]
    assert TARGETS["table-4"].rows["Qwen2.5-14B"].paper["ar_minutes"] == [29.4, 89.4, 184.2, 312.6, 474.6]
    assert TARGETS["table-13"].rows["temperature 0.8"].paper["alpha"] == [0.56, 0.73, 0.8, 0.83, 0.85]
    assert TARGETS["table-16"].rows["window 2048"].paper["distinct3"] == [0.86]
    assert TARGETS["figure-1"].rows["AR"].paper["minutes"] == [None, None, None, None, 294]


def test_a_trend_agrees_only_beyond_the_interval_of_students_t():
    assert verdict([0.4, 0.42, 0.41], [0.2, 0.21, 0.22]).startswith("agrees (0.410 and 0.210; difference +0.200")
    assert verdict([0.2, 0.21, 0.22], [0.4, 0.42, 0.41]).startswith("does not agree (0.210 and 0.410")
    # Differences .1, -.1 and .09: mean .03, standard error .065.
    assert verdict([0.5, 0.3, 0.49], [0.4, 0.4, 0.4]) == (
        "no difference (0.430 and 0.400; difference +0.030, standard error 0.065)"
    )
    # The texts of one seed are compared with each other, however far seeds lie apart: differences .02, .03 and .02.
    assert verdict([0.2, 0.6, 0.9], [0.18, 0.57, 0.88]).startswith("agrees")
    assert verdict([0.4, 0.4], [0.4, 0.4]).startswith("no difference")
    # The mean over its standard error is 3, 4.5 and 2.1; so few texts may lie like that by chance, more may not.
    zero = [0.0] * 3
    assert verdict([0.1, 0.2], zero[:2]).startswith(
        "no difference (0.150 and 0.000; difference +0.150, standard error 0.05"
    )
    assert verdict([0.7, 1.0, 1.6], zero).startswith(
        "no difference (1.100 and 0.000; difference +1.100, standard error 0.2"
    )
    assert verdict([0.8, 1.0, 1.6], zero).startswith("agrees")
    assert verdict([0.3, 1.7] * 2, [0.0] * 4).startswith("no difference")
    assert verdict([0.0, 1.0] * 20, [0.0] * 40).startswith("agrees")
    assert verdict([0.4], [0.2]) == "one text does not tell (0.400 and 0.200)"
    assert verdict([None, None], [0.2, 0.2]) == "not measured"


def test_rows_of_the_same_texts_and_steps_are_told_apart_from_others():
    first, second = Found({}, "work", "a"), Found({}, "other work", "a")
    rows = {"1": first, "2": second, "3": replace(first), "4": replace(first, folder="b"), "5": None, "6": None}
    assert coinciding(rows) == (["1", "2", "4", "5", "6"], {"3": "1"})


def test_a_verdict_is_that_of_the_rows_shown_and_cut_texts_are_named():
    target = TARGETS["figure-4"]
    figures = {name: [[0.5, 0.6]] * 5 for name in target.figures}
    slower = {**figures, "x": [[0.1, 0.2]] * 5}
    rows = {label: Found(figures, label, "a", resumed=2 * (label == "k = 5")) for label in target.rows}
    rows |= {"k = 20": Found(figures, "work", "a"), "k = 100": Found(slower, "work", "a")}
    page = reproduced_page.page("figure-4", target, 1.0, rows, {}, [])
    assert "k = 100 costs more to verify than k = 20: the same texts and steps here" in page
    assert "may differ: k = 5 (2 texts).\n" in page
    rows["k = 5"] = Found(slower, "work", "a")
    page = reproduced_page.page("figure-4", target, 1.0, rows, {}, [])
    assert page.count("the same texts and steps here") == 3 and "Cut and resumed" not in page
    # A hidden row's own clock does not count.
    rows = {**rows, "k = 5": Found(figures, "first", "a"), "k = 10": Found(figures, "first", "a")}
    rows["k = 20"], rows["k = 100"] = Found(slower, "first", "a"), Found(slower, "other", "a")
    page = reproduced_page.page("figure-4", target, 1.0, rows, {}, [])
    assert "k = 100 costs more to verify than k = 20: agrees (0.550 and 0.150" in page


def test_experiments_share_their_texts_and_take_them_over(data, tmp_path):
    first = run(data, tmp_path, "table-5", "--scale", "0.0008", "--runs", "1")
    assert first.exit_code == 0, first.output
    for expected in ("(0.42)", "(1.47)", "full cache", "chosen once", "alpha at", "a dynamic cache accepts more"):
        assert expected in first.stdout
    assert "## table-5" in (tmp_path / "table-5-scale-0.0008.md").read_text()
    assert len(generated(tmp_path)) == 4

    # ar and k = 0 are there, k = 20 is not; table 12 shares both, and has two further samplers.
    second = run(data, tmp_path, "figure-3", "--scale", "0.0008", "--runs", "1")
    assert "2 finished generations taken over" in second.stderr
    texts = generated(tmp_path)
    assert len(texts) == len(set(texts)) == 5
    third = run(data, tmp_path, "figure-3", "table-5", "--scale", "0.0008", "--runs", "1")
    assert "5 finished generations taken over" in third.stderr and "left to run" in third.stderr
    assert third.stdout == second.stdout + first.stdout and generated(tmp_path) == texts

    # More seeds are added to those that are there.
    more = run(data, tmp_path, "figure-3", "--scale", "0.0008", "--runs", "2")
    assert "3 finished generations taken over" in more.stderr and "±" in more.stdout
    assert sorted(set(generated(tmp_path)) - set(texts)) == sorted(
        (*text[:3], 1) for text in texts if "cache" not in text[1]
    )
    other = run(data, tmp_path, "figure-3", "--scale", "0.0008", "--seed", "3")
    assert other.exit_code == 2 and "other settings (seed)" in other.stderr


def test_scales_share_neither_pages_nor_texts(data, tmp_path):
    """Scales of prompts and texts of the same lengths, too."""
    for scale in ("0.0008", "0.00080000001"):
        result = run(data, tmp_path, "figure-3", "table-2", "--scale", scale, "--runs", "1")
        assert result.exit_code == 0, result.output
    pages = ["figure-3-scale-0.0008.md", "figure-3-scale-0.00080000001.md", "table-2.md"]
    assert sorted(path.name for path in tmp_path.glob("*.md")) == pages
    texts = generated(tmp_path)
    assert len(texts) == len(set(texts)) == 6
    assert all("/" not in name and name.startswith("scale-0.0008") for name, *_ in texts)
    assert reproduction.page_name("figure-3", 1) == reproduction.page_name("figure-3", 1.0) == "figure-3-scale-1.md"


def test_all_may_stand_with_others(data, tmp_path, monkeypatch):
    asked = []

    def take(names, *rest, **settings):
        asked.append(list(dict.fromkeys(names)))
        return iter(())

    monkeypatch.setattr(reproduction, "reproduce", take)
    for targets in (["all"], ["all", "table-5"], ["table-5", "all"]):
        assert run(data, tmp_path, *targets).exit_code == 0
    assert asked[0] == asked[1] == list(TARGETS) and sorted(asked[2]) == sorted(TARGETS)
    monkeypatch.undo()
    refused = run(data, tmp_path, "all", "table-99")
    assert refused.exit_code == 2 and "unknown target 'table-99'" in refused.stderr


def test_a_row_whose_heads_have_changed_is_generated_again(data, tmp_path):
    heads = tmp_path / "heads"
    shutil.copytree(data / "heads-chained", heads)
    brief = {"prompt_tokens": 20, "max_new_tokens": 4, "runs": 1, "data_dir": data, "heads": [str(heads)]}
    compare(["tokenswift"], output=tmp_path / "out", extend=True, **brief)
    decoder.DraftHeads(32).save_pretrained(heads)
    said: list[str] = []
    results = compare(["tokenswift"], output=tmp_path / "out", extend=True, say=said.append, **brief)
    assert said == [f"1 finished generations taken over from {tmp_path / 'out/generations.jsonl'}; 1 left to run."]
    assert [len(results["methods"][name]["runs"]) for name in ("ar", "tokenswift")] == [1, 1]
    # What decides every row is refused, as it is without extend.
    with pytest.raises(OtherSettingsError, match="max_new_tokens"):
        compare(["tokenswift"], output=tmp_path / "out", extend=True, **{**brief, "max_new_tokens": 5})


def test_a_cut_text_waits_while_other_rows_run(data, tmp_path, monkeypatch):
    brief = {"prompt_tokens": 20, "max_new_tokens": 24, "runs": 1, "data_dir": data, "extend": True, "output": tmp_path}
    options = {"tree": (1, 2), "ngrams": 0}
    add = Progress.add

    def cut(progress, *step):
        add(progress, *step)
        if progress._header["method"] == "tokenswift" and len(progress.token_ids) > 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", cut)
        with pytest.raises(KeyboardInterrupt):
            compare(["tokenswift"], options=options, **brief)
    compare(["prompt-lookup"], options=options, **brief)
    said: list[str] = []
    results = compare(["tokenswift"], options=options, say=said.append, **brief)
    assert "1 cut generation will be continued." in said
    assert results["methods"]["tokenswift"]["resumed"] == 1 and results["methods"]["tokenswift"]["identical_to_ar"]


def test_rows_that_coincide_at_a_small_scale_are_generated_and_shown_once(data, tmp_path):
    # Prompts of 2 and 3 K and windows of 256 and more are as long as the shortest prompt and the text.
    result = run(data, tmp_path, "table-14", "--scale", "0.001", "--runs", "1")
    assert result.exit_code == 0, result.output
    assert "shown once: prompt 3072 is prompt 2048; " in " ".join(result.stdout.split())
    shown = re.findall(r"^prompt \d+ +\d", result.stdout, re.MULTILINE)
    assert len(generated(tmp_path)) == 2 and len(shown) == 2, result.stdout
    windows = [cell_of(row, TARGETS["table-15"], 0.001) for row in TARGETS["table-15"].rows.values()]
    assert [dict(cell.sampling)["penalty_window"] for cell in windows] == [20, 50, 118, 118, 118, 118, 118]
    assert len(set(windows)) == 3


def test_a_pages_figures_are_those_of_the_results(data, tmp_path, monkeypatch):
    target = TARGETS["table-8"]
    rows = {label: target.rows[label] for label in ("theta 1.0", "theta 1.2")}
    monkeypatch.setitem(TARGETS, "table-8", replace(target, rows=rows))
    [page] = reproduce(["table-8"], 0.0004, tmp_path, data_dir=data, runs=2)
    for label, row in rows.items():
        results = read_results(tmp_path / cell_of(row, target, 0.0004).folder)
        assert results["settings"]["sampling"]["repetition_penalty"] == float(label[-3:])
        assert results["settings"]["max_new_tokens"] == round(102400 * 0.0004)
        texts = [text["distinct"] for text in results["methods"]["tokenswift"]["runs"]]
        cells = []
        for n in ("1", "2", "3", "4", "mean"):
            one, other = (text[n] for text in texts)
            published = row.paper[f"distinct{n}" if n != "mean" else "distinct"][0]
            cells.append(f"{(one + other) / 2:.2f}±{abs(one - other) / math.sqrt(2):.2f} ({published:.2f})")
        assert f"| {label} | {' | '.join(cells)} |" in page


def test_figure_5_marks_the_repeated_spans(data, tmp_path):
    result = run(data, tmp_path, "figure-5", "--scale", "0.002", "--runs", "1")
    assert result.exit_code == 0, result.output
    for row in TARGETS["figure-5"].rows.values():
        folder = tmp_path / cell_of(row, TARGETS["figure-5"], 0.002).folder
        assert f"{folder.relative_to(tmp_path)}/report.html" in result.stdout
        repeated = read_results(folder)["methods"]["tokenswift"]["repeated_share"]
        marked = re.findall(r'<span class="(?:a )?r">[^<]', (folder / "report.html").read_text())
        # The legend holds one.
        assert (len(marked) > 1) == (repeated > 0)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["table-99"], "table-99"),
        (["table-5", "--scale", "0.0001"], "--scale must"),
        (["table-1", "--scale", "-1"], "--scale must"),
        (["table-5", "--scale", "inf"], "--scale must"),
        (["table-2", "--scale", "nan"], "--scale must"),
        (["table-5", "--runs", "0"], "--runs must"),
        (["table-5", "--model", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(data, tmp_path, arguments, culprit):
    result = run(data, tmp_path / "out", *arguments)
    assert result.exit_code == 2 and culprit in result.stderr.splitlines()[-1]
    assert len([line for line in result.stderr.splitlines() if line.startswith("ts-eval: ")]) == 1
    assert not (tmp_path / "out").exists()


def test_options_of_a_target_reach_the_decoder(data, tmp_path):
    list(reproduce(["figure-3"], 0.0008, tmp_path, data_dir=data, runs=1))
    [folder] = (tmp_path / "texts").iterdir()
    options = read_results(folder)["settings"]["options"]
    assert options["tokenswift:ngrams=0"] == {**asdict(decoder.TokenSwiftOptions(ngrams=0)), "tree": [1, 3, 3, 3]}


def test_rows_without_their_heads_are_left_out(data, tmp_path, monkeypatch):
    target = TARGETS["table-3"]
    rows = {label: row for label, row in target.rows.items() if label.startswith("Llama-3.1 4K")}
    kept = tuple(trend for trend in target.trends if trend.above in rows)
    monkeypatch.setitem(TARGETS, "table-3", replace(target, rows=rows, trends=kept))
    brief = ("table-3", "--scale", "0.0008", "--runs", "1", "--model", str(data / "reference-model"))
    result = run(data, tmp_path / "out", *brief, "--heads", f"tokenswift={data / 'heads-chained'}")
    assert result.exit_code == 0, result.output
    assert "Not run: Llama-3.1 4K Medusa*, since medusa needs draft heads" in result.stdout
    assert "Not run: Llama-3.1 4K TriForce*, since triforce needs a small model" in result.stdout
    assert "TokenSwift is faster than TriForce* (Llama-3.1 4K): not measured" in result.stdout
    assert {method for _, method, *_ in generated(tmp_path / "out")} == {"ar", "tokenswift"}
    refused = run(data, tmp_path / "none", *brief)
    assert refused.exit_code == 2 and "medusa needs draft heads" in refused.stderr
    assert not (tmp_path / "none").exists()


def test_table_2_is_computed_from_the_configuration():
    found = configured.passes("llama-3.1-8b", {})
    row = next(iter(TARGETS["table-2"].rows.values()))
    assert {name: round(value, 1) for name, value in found.items() if name != "gigaflop"} == {
        name: values[0] for name, values in row.paper.items() if name != "gigaflop"
    }
    # The paper counts a few operations more.
    assert found["gigaflop"] == pytest.approx(row.paper["gigaflop"][0], rel=0.005)


def test_table_11_is_the_configuration_of_the_draft_model(data, tmp_path):
    row = TARGETS["table-11"].rows["the paper's"]
    found = configured.draft_models("triforce-draft", {})
    for name, values in row.paper.items():
        assert round(found[name]) == pytest.approx(values[0], rel=0.005)
    assert read_shape("triforce-draft").parameters == 215_879_424
    result = run(data, tmp_path, "table-2", "table-11")
    assert result.exit_code == 0 and "15.01 (15.00)" in result.stdout and "205.88 (205.00)" in result.stdout
    # There is no draft model beside the small model of these tests.
    assert re.search(r"^here( +-)+$", result.stdout, re.MULTILINE)
    GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=64).save_pretrained(tmp_path / "gpt2")
    result = run(data, tmp_path / "out", "table-11", "--draft-model", str(tmp_path / "gpt2"))
    assert result.exit_code == 0 and re.search(r"^here +8 +- +1 +2 +- +64 +- +32", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("model", "sampler"),
    [
        ("meta-llama/Llama-3.1-8B", {"min_p": 0.1, "top_p": 1.0, "repetition_penalty": 1.2}),
        ("NousResearch/Yarn-Llama-2-7b-128k", {"min_p": 0.0, "top_p": 0.9, "repetition_penalty": 1.15}),
        ("Qwen/Qwen2.5-1.5B", {"min_p": 0.0, "top_p": 0.9, "repetition_penalty": 1.15}),
        ("Qwen/Qwen2.5-7B-Instruct", {"min_p": 0.05, "top_p": 1.0, "repetition_penalty": 1.15}),
        ("/models/qwen2.5-14b", {"min_p": 0.05, "top_p": 1.0, "repetition_penalty": 1.13}),
        ("mistral", {"min_p": 0.1, "top_p": 1.0, "repetition_penalty": 1.2}),
        (None, {"min_p": 0.1, "top_p": 1.0, "repetition_penalty": 1.2}),
        # Folders around a model have no say.
        ("/models/qwen2.5-7b/mistral", {"min_p": 0.1, "top_p": 1.0, "repetition_penalty": 1.2}),
        ("qwen2.5-14b/Mistral-7B", {"min_p": 0.1, "top_p": 1.0, "repetition_penalty": 1.2}),
        ("/qwen2.5-1.5b/Qwen2.5-14B/", {"min_p": 0.05, "top_p": 1.0, "repetition_penalty": 1.13}),
        ("/models/qwen2.5-14b/config.json", {"min_p": 0.05, "top_p": 1.0, "repetition_penalty": 1.13}),
    ],
)
def test_samplers_are_those_of_table_10(model, sampler):
    others = {"temperature": 1.0, "top_k": 0, "eta_cutoff": 0.0, "penalty_window": 1024}
    assert paper.sampler_for(model) == sampler | others


def test_a_terminals_page_has_all_of_the_markdown(capsys):
    page = "## t: x\n\nwords\n\n| row | alpha |\n| --- | ---: |\n| a | 0.10 |\n\n- says: agrees\n"
    show(*reproduced_page.on_terminal(page))
    title, words, header, line, row, verdict = filter(None, capsys.readouterr().out.splitlines())
    assert (title, words, verdict) == ("## t: x", "words", "- says: agrees")
    assert header.split() == ["row", "alpha"] and not line.strip("─") and row.split() == ["a", "0.10"]
