"""`ts-eval compare` on a tiny random model: the experiment, what it writes, what it refuses, and how it resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_reference import BOOKS, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import decoder
from decoder.sampler import NoiseRows
from ts_eval import compare as experiment
from ts_eval import defaults, metrics, summary
from ts_eval.cli import main

SHORT = ["--prompt-tokens", "40", "--max-new-tokens", "12", "--runs", "1", "--tree", "1,2", "--ngrams", "2"]
PAPER = "tokenswift:tree=1,3,3,3:ngrams=20"


def compare(data: Path, output: Path, *arguments: str, methods: tuple[str, ...] = ("ar", "tokenswift"), width="120"):
    command = ["compare", *methods, "--data-dir", str(data), *SHORT, "--output", str(output), *arguments]
    return CliRunner(env={"COLUMNS": width}).invoke(main, command)


def load(output: Path) -> dict:
    return json.loads((output / "results.json").read_text())


def log_lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "generations.jsonl").read_text().splitlines()]


def tokens(results: dict) -> dict:
    return {name: [run["token_ids"] for run in row["runs"]] for name, row in results["methods"].items()}


@pytest.fixture
def lie(monkeypatch):
    """Have methods give a wrong sixth token."""
    honest = decoder.Decoder.stream

    def lying(*methods: str):
        def stream(self, *arguments, **named):
            place = 0
            for chunk in honest(self, *arguments, **named):
                if named["method"] in methods:
                    for index in range(len(chunk.token_ids)):
                        if place + index == 5:
                            chunk.token_ids[index] = (chunk.token_ids[index] + 1) % 256
                place += len(chunk.token_ids)
                yield chunk

        monkeypatch.setattr(decoder.Decoder, "stream", stream)

    return lying


def test_the_report_has_every_key_and_adds_up(data, tmp_path):
    result = compare(data, tmp_path / "out", "--runs", "2", "--num-prompts", "2", "--check-lossless",
                     methods=("tokenswift", PAPER))  # fmt: skip
    assert result.exit_code == 0, result.output
    results = load(tmp_path / "out")
    assert results["schema_version"] == 1
    assert list(results["methods"]) == ["ar", "tokenswift", PAPER]
    assert results["settings"]["options"]["tokenswift"]["tree"] == [1, 2]
    assert results["settings"]["options"][PAPER]["tree"] == [1, 3, 3, 3]
    assert results["settings"]["options"][PAPER]["ngrams"] == 20
    assert results["settings"]["sampling"] == defaults.SAMPLING
    assert results["environment"]["versions"]["torch"] == torch.__version__
    assert results["environment"]["threads"] == torch.get_num_threads()

    keys = {"tokens_per_second", "ms_per_token", "speedup", "acceptance_rate", "ngram_acceptance_rate",
            "tokens_per_step", "distinct", "self_bleu", "identical_to_ar", "first_divergence", "divergence_margin",
            "runs"}  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(data / "reference-model")
    for name, row in results["methods"].items():
        assert keys <= row.keys()
        assert row["identical_to_ar"] and row["first_divergence"] is None and row["divergence_margin"] is None
        # Runs come run by run, prompt by prompt; the seed is the run's.
        assert [(run["prompt"], run["seed"]) for run in row["runs"]] == [(b, r) for r in (0, 1) for b in BOOKS]
        for run, reference in zip(row["runs"], results["methods"]["ar"]["runs"], strict=True):
            assert run["token_ids"] == reference["token_ids"]
            assert run["new_tokens"] == len(run["token_ids"]) == 12
            assert run["prompt_tokens"] == 40
            assert run["text"] == tokenizer.decode(run["token_ids"])
            assert run["distinct"] == metrics.distinct(run["token_ids"])
            assert run["tokens_per_second"] == pytest.approx(12 / run["decode_seconds"])
            assert run["ms_per_token"] == pytest.approx(1000 * run["decode_seconds"] / 12)
            assert run["speedup"] == pytest.approx(reference["ms_per_token"] / run["ms_per_token"])
        low, high = row["speedup_range"]
        assert low <= row["speedup"] <= high
        assert row["tokens_per_step"] == 48 / sum(run["steps"] for run in row["runs"])
        if name != "ar":
            drafted = sum(run["drafted"] for run in row["runs"])
            assert row["acceptance_rate"] == sum(run["accepted"] for run in row["runs"]) / drafted
            assert row["ngram_acceptance_rate"] == sum(run["ngram_accepted"] for run in row["runs"]) / drafted
    ar = results["methods"]["ar"]
    assert ar["speedup"] == 1.0 and ar["tokens_per_step"] == 1.0
    assert ar["acceptance_rate"] is None and ar["ngram_acceptance_rate"] is None


def test_methods_take_turns_and_the_order_rotates(data, tmp_path):
    compare(data, tmp_path, "--runs", "2", "--num-prompts", "2")
    turns = [(record["method"], record["prompt_index"], record["run"]) for record in log_lines(tmp_path)[1:]]
    assert turns == [
        ("ar", 0, 0), ("tokenswift", 0, 0), ("ar", 1, 0), ("tokenswift", 1, 0),
        ("tokenswift", 0, 1), ("ar", 0, 1), ("tokenswift", 1, 1), ("ar", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("width", ["60", "80", "120", "200"])
def test_the_table_fits_the_terminal(data, tmp_path_factory, width):
    output = tmp_path_factory.getbasetemp() / "table"
    result = compare(data, output, methods=("ar", "tokenswift", PAPER), width=width)
    assert result.exit_code == 0, result.output
    table = result.stdout.rpartition("All of it:")[0]
    assert max(map(len, table.splitlines())) <= int(width)
    for word in (
        "tokens/s",
        "speed-up",
        "alpha",
        "beta",
        "tok/step",
        "Dist-4",
        "identical",
        "temperature 1, min-p 0.1",
    ):
        assert word in " ".join(table.split())
    assert "The Lighthouse, continued by" in table


def test_greedy_is_transformers_greedy(data, tmp_path, prompt_file):
    result = compare(data, tmp_path / "out", "--prompts", str(prompt_file), "--temperature", "0",
                     "--repetition-penalty", "1")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "greedy" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(data / "reference-model", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(data / "reference-model")(prompt_file.read_text(), return_tensors="pt")
    expected = model.generate(ids["input_ids"][:, :40], max_new_tokens=12, do_sample=False)[0, 40:].tolist()
    assert tokens(load(tmp_path / "out")) == {"ar": [expected], "tokenswift": [expected]}


def test_more_prompts_than_there_are_takes_all_and_a_short_one_is_taken_whole(data, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "A short one."}\n\n{"text": "Another, and it has a name.", "name": "second"}\n')
    result = compare(data, tmp_path / "out", "--prompts", str(path), "--num-prompts", "9", methods=("ar",))
    assert result.exit_code == 0, result.output
    settings = load(tmp_path / "out")["settings"]
    assert settings["prompt_names"] == ["prompts.jsonl:1", "second"]
    assert settings["prompt_lengths"] == [12, 27]


def test_a_method_that_differs_is_found_and_fails_the_check(data, tmp_path, lie):
    lie("tokenswift")
    result = compare(data, tmp_path)
    assert result.exit_code == 0
    assert "no, at 5" in result.stdout
    row = load(tmp_path)["methods"]["tokenswift"]
    assert not row["identical_to_ar"] and row["first_divergence"] == 5
    assert row["divergence_margin"] is None or row["divergence_margin"] > 1e-4

    result = compare(data, tmp_path, "--check-lossless")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "ts-eval: not lossless: tokenswift differs by more than a tie."


def test_the_check_audits_ar_itself(data, tmp_path, lie):
    assert compare(data, tmp_path / "honest", "--check-lossless").exit_code == 0
    assert load(tmp_path / "honest")["methods"]["ar"]["audits"] == [{"checked": 12, "index": None, "margin": None}]

    lie("ar", "tokenswift")
    result = compare(data, tmp_path / "lying", "--check-lossless")
    assert result.exit_code == 1
    assert "not lossless: ar differs" in result.stderr
    results = load(tmp_path / "lying")
    assert results["methods"]["tokenswift"]["identical_to_ar"]
    assert results["methods"]["ar"]["audits"][0]["index"] == 5


def test_an_audited_tie_passes_the_check(data, tmp_path, lie, monkeypatch):
    lie("tokenswift")
    monkeypatch.setattr(experiment, "divergence_margin", lambda *arguments: 2e-5)
    result = compare(data, tmp_path, "--check-lossless")
    assert result.exit_code == 0
    assert "tie at 5" in result.stdout
    assert load(tmp_path)["methods"]["tokenswift"]["divergence_margin"] == 2e-5


class FixedLogits:
    """A model that gives the same logits after every context."""

    device, config, training = torch.device("cpu"), LlamaConfig(num_hidden_layers=1), False

    def __init__(self, logits: list[float]):
        self.logits = torch.tensor(logits)

    def __call__(self, input_ids, logits_to_keep, **_):
        return type("Output", (), {"logits": self.logits.expand(1, logits_to_keep, -1)})

    def eval(self):
        return self

    def train(self, mode):
        return self


def test_margin_is_the_gap_of_the_scores():
    model = FixedLogits([2.0, 1.25, 0.0, -1.0])
    greedy = decoder.SamplingParams(temperature=0)
    assert summary.divergence_margin(model, [3], 0, 1, greedy) == pytest.approx(0.75, rel=1e-4)
    assert summary.divergence_margin(model, [3], 1, 0, greedy) == pytest.approx(0.75, rel=1e-4)

    params = decoder.SamplingParams(seed=11)
    noise = NoiseRows(11, 4, torch.device("cpu")).rows(1, 1)[0]
    ranked = (model.logits + noise).sort(descending=True)
    first, second = ranked.indices[:2].tolist()
    gap = float(ranked.values[0] - ranked.values[1])
    assert summary.divergence_margin(model, [3], first, second, params) == pytest.approx(gap, rel=1e-4)


def test_margin_at_the_edge_of_a_filter_is_the_distance_to_the_edge():
    # Token 1 stands 1e-5 below the min-p threshold; the noise of some seed prefers it clearly.
    logits = [0.0, torch.log(torch.tensor(0.5)).item() - 1e-5]
    for seed in range(50):
        noise = NoiseRows(seed, 2, torch.device("cpu")).rows(1, 1)[0]
        if noise[1] - noise[0] > 2:
            break
    params = decoder.SamplingParams(min_p=0.5, seed=seed)
    assert summary.divergence_margin(FixedLogits(logits), [0], 0, 1, params) == pytest.approx(1e-5, rel=0.02)


def test_a_finished_comparison_is_taken_over(data, tmp_path, monkeypatch):
    first = compare(data, tmp_path)
    before = load(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("nothing is left to generate")

    monkeypatch.setattr(decoder.Decoder, "stream", refuse)
    again = compare(data, tmp_path)
    assert again.exit_code == 0, again.output
    assert "2 finished generations taken over" in again.stderr
    assert again.stdout == first.stdout
    assert load(tmp_path) == before


def test_other_settings_are_refused_unless_overwritten(data, tmp_path):
    assert compare(data, tmp_path).exit_code == 0
    before = (tmp_path / "generations.jsonl").read_bytes()
    result = compare(data, tmp_path, "--seed", "5")
    assert result.exit_code == 2
    assert "(seed)" in result.stderr and "use another --output" in result.stderr and result.stderr.count("\n") == 1
    assert (tmp_path / "generations.jsonl").read_bytes() == before

    assert compare(data, tmp_path, "--seed", "5", "--overwrite").exit_code == 0
    assert load(tmp_path)["settings"]["seed"] == 5
    assert len(log_lines(tmp_path)) == 3


def test_other_weights_under_the_same_path_are_refused(data, tmp_path):
    save_model(tmp_path / "model")
    arguments = ("--model", str(tmp_path / "model"))
    assert compare(data, tmp_path / "out", *arguments, methods=("ar",)).exit_code == 0
    os.utime(tmp_path / "model/model.safetensors", (1, 1))
    result = compare(data, tmp_path / "out", *arguments, methods=("ar",))
    assert result.exit_code == 2
    assert "weights." in result.stderr


def test_a_line_cut_short_is_generated_again(data, tmp_path):
    compare(data, tmp_path)
    expected = tokens(load(tmp_path))
    log = tmp_path / "generations.jsonl"
    log.write_bytes(log.read_bytes()[:-40])
    result = compare(data, tmp_path)
    assert result.exit_code == 0, result.output
    assert "1 finished generations taken over" in result.stderr
    assert tokens(load(tmp_path)) == expected
    assert [line.get("method") for line in log_lines(tmp_path)] == [None, "ar", "tokenswift"]


def test_killed_and_resumed_gives_the_same_tokens(data, tmp_path):
    arguments = ["--runs", "4", "--max-new-tokens", "100"]
    command = [sys.executable, "-m", "ts_eval.cli", "compare", "ar", "tokenswift", "--data-dir", str(data), *SHORT,
               *arguments, "--output", str(tmp_path / "cut")]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    log = tmp_path / "cut/generations.jsonl"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = log.read_bytes().count(b"\n") - 1
    assert 2 <= finished < 8 and not (tmp_path / "cut/results.json").exists()

    resumed = compare(data, tmp_path / "cut", *arguments)
    assert resumed.exit_code == 0, resumed.output
    assert f"{finished} finished generations taken over" in resumed.stderr
    whole = compare(data, tmp_path / "whole", *arguments)
    assert whole.exit_code == 0
    assert tokens(load(tmp_path / "cut")) == tokens(load(tmp_path / "whole"))


def test_interrupted_says_how_to_resume(data, tmp_path, monkeypatch):
    honest = decoder.Decoder.stream

    def stream(self, *arguments, **named):
        chunks = honest(self, *arguments, **named)
        yield next(chunks)
        if named.get("method") == "tokenswift" and named["sampling"].seed == 1:
            raise KeyboardInterrupt
        yield from chunks

    monkeypatch.setattr(decoder.Decoder, "stream", stream)
    result = compare(data, tmp_path, "--runs", "2")
    assert result.exit_code == 130
    assert "the same command resumes" in result.stderr
    monkeypatch.undo()
    result = compare(data, tmp_path, "--runs", "2")
    assert result.exit_code == 0
    assert "2 finished generations taken over" in result.stderr


def wrong_inputs(data: Path, tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> (arguments, what the sentence must name)."""
    narrow = tmp_path / "narrow"
    decoder.DraftHeads(16).save_pretrained(narrow)
    for name, text in {"empty.txt": " \n", "no-text.jsonl": '{"title": "A"}\n', "no.jsonl": "{'a'\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "folder").mkdir()
    return {
        "no such model": (["--model", str(tmp_path / "nope")], "nope"),
        "no model there": (["--model", str(tmp_path / "folder")], "folder"),
        "neither folder nor id": (["--model", "nope"], "nope"),
        "a model without heads": (["--model", str(data / "reference-model")], "heads"),
        "no such heads": (["--heads", str(tmp_path / "nope")], "nope"),
        "heads of another size": (["--heads", str(narrow)], "hidden size 16"),
        "heads for one method": (["--heads", f"tokenswift={narrow}"], "hidden size 16"),
        "a model for heads": (["--heads", str(data / "reference-model")], "not a heads checkpoint"),
        "two heads for all": (["--heads", str(narrow), "--heads", str(narrow)], "METHOD=CHECKPOINT"),
        "no such prompts": (["--prompts", str(tmp_path / "nope.txt")], "nope.txt"),
        "empty prompt": (["--prompts", str(tmp_path / "empty.txt")], "empty"),
        "no field text": (["--prompts", str(tmp_path / "no-text.jsonl")], "line 1"),
        "no JSON": (["--prompts", str(tmp_path / "no.jsonl")], "line 1"),
        "no text": (["--prompts", str(tmp_path / "binary.txt")], "binary.txt"),
        "too long": (["--max-new-tokens", "500"], "512 positions"),
        "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens"),
        "no runs": (["--runs", "0"], "--runs"),
        "no processes": (["--processes", "0"], "--processes"),
        "bad sampling": (["--top-p", "1.5"], "--top-p must"),
        "bad marks": (["--marks", "1,x"], "--marks"),
        "no such method's heads": (["--heads", f"vllm={narrow}"], "'vllm' is no method"),
        "a folder of prompts": (["--prompts", str(tmp_path / "folder")], "are a folder"),
        "bad tree": (["--tree", "1,x"], "--tree"),
        "zero tree": (["--tree", "0"], "tree"),
        "bad k": (["--ngrams", "-1"], "ngrams"),
        "bad device": (["--device", "abacus"], "abacus"),
        "bad dtype": (["--dtype", "float3"], "float3"),
        "unknown option": (["--speed", "9"], "--speed"),
        "no data": (["--data-dir", str(tmp_path / "nope")], "nope"),
    }


def test_wrong_input_is_one_sentence_and_leaves_nothing(data, tmp_path):
    for name, (arguments, culprit) in wrong_inputs(data, tmp_path).items():
        result = compare(data, tmp_path / "out", *arguments)
        assert result.exit_code == 2, f"{name}: {result.output}"
        assert culprit in result.stderr, f"{name}: {result.stderr}"
        assert result.stderr.count("\n") == 1 and result.stdout == "", f"{name}: {result.output}"
        assert not (tmp_path / "out").exists(), name


@pytest.mark.parametrize(
    "method", ["vllm", "tokenswift:speed=9", "tokenswift:tree", "tokenswift:tree=a", "tokenswift:coupled=maybe"]
)
def test_unknown_methods_and_options_are_refused(data, tmp_path, method):
    result = compare(data, tmp_path / "out", methods=(method,))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and method.rpartition("=")[2] in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_method_takes_options_of_every_kind():
    spec = experiment.MethodSpec.parse("tokenswift:tree=2,2:budget=64:coupled=false:cache=static")
    assert spec.name == "tokenswift"
    assert spec.options == {"tree": (2, 2), "budget": 64, "coupled": False, "cache": "static"}


@pytest.mark.parametrize(("method", "flag"), [("medusa", "--heads"), ("triforce", "--draft-model")])
def test_a_method_that_lacks_a_part_is_refused_by_the_flag(data, tmp_path, method, flag):
    model = ("--model", str(data / "reference-model"))
    result = compare(data, tmp_path / "out", *model, methods=("ar", method))
    assert result.exit_code == 2
    assert flag in result.stderr and method in result.stderr and result.stderr.count("\n") == 1


def test_heads_may_be_given_per_method(data, tmp_path):
    result = compare(data, tmp_path, "--model", str(data / "reference-model"), "--heads",
                     f"tokenswift={data / 'heads-chained'}")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert load(tmp_path)["settings"]["heads"] == {"ar": None, "tokenswift": str(data / "heads-chained")}
