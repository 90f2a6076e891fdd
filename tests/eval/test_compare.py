"""`ts-eval compare` on a tiny random model: the experiment, what it writes, what it refuses, and how it resumes."""

import ctypes
import gc
import itertools
import json
import math
import multiprocessing
import os
import resource
import time
import weakref
from pathlib import Path

import datasets
import portalocker
import pytest
import torch
from click.testing import CliRunner
from tests.forked import forked
from tiny_reference import BOOKS, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import decoder
from decoder.cli.journal import whole_lines
from decoder.drafters import Autoregressive
from decoder.jobs.on_ray import Cluster
from decoder.sampling.sampler import NoiseRows
from decoder.sequence import Sequence
from ts_eval import compare as experiment
from ts_eval import defaults, metrics
from ts_eval.cli import main
from ts_eval.comparing import checks, processes, rounds
from ts_eval.comparing.method_spec import MethodSpec
from ts_eval.comparing.progress import Progress
from ts_eval.report.table import describe, notes

SHORT = ["--prompt-tokens", "40", "--max-new-tokens", "12", "--runs", "1", "--tree", "1,2", "--ngrams", "2"]
PAPER = "tokenswift:tree=1,3,3,3:ngrams=20"
slow = pytest.mark.slow


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
                if arguments[2] in methods:
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
    own = {name: results["settings"]["sampling"][name] for name in defaults.SAMPLING}
    assert own == defaults.SAMPLING and results["settings"]["sampling"]["suppress_tokens"] == []
    assert results["environment"]["versions"]["torch"] == torch.__version__
    assert results["environment"]["threads"] == torch.get_num_threads()

    keys = {"tokens_per_second", "ms_per_token", "speedup", "acceptance_rate", "ngram_acceptance_rate",
            "tokens_per_step", "distinct", "self_bleu", "identical_to_ar", "first_divergence", "divergence_margin",
            "runs"}  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(data / "reference-model")
    for name, row in results["methods"].items():
        assert keys <= row.keys()
        assert row["bitwise"] is results["settings"]["bitwise"]
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


@pytest.mark.parametrize(
    ("speedup", "device", "advice"), [(0.8, "cpu", True), (1.2, "cpu", False), (0.8, "cuda", False)]
)
def test_the_papers_tree_on_a_cpu_comes_with_advice(data, tmp_path_factory, speedup, device, advice):
    output = tmp_path_factory.getbasetemp() / "table"
    assert compare(data, output, methods=("ar", "tokenswift", PAPER)).exit_code == 0
    results = load(output)
    results["environment"]["device"] = device
    results["methods"][PAPER]["speedup"] = speedup
    # A small tree of the user's own needs none.
    results["methods"]["tokenswift"]["speedup"] = 0.5
    assert ("without --tree and --ngrams what pays is chosen" in notes(results)) == advice


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
    assert result.stderr.splitlines()[-1] == "ts-eval: not lossless: tokenswift differs where bitwise excuses no tie."
    loose = compare(data, tmp_path / "loose", "--check-lossless", "--no-bitwise")
    assert loose.exit_code == 1
    assert loose.stderr.splitlines()[-1] == "ts-eval: not lossless: tokenswift differs by more than a tie."


@pytest.mark.parametrize("bitwise, found", [(True, ["tokenswift"]), (False, [])])
def test_a_tie_excuses_only_where_bitwise_is_off(data, tmp_path, lie, bitwise, found):
    lie("tokenswift")
    assert compare(data, tmp_path, "--bitwise" if bitwise else "--no-bitwise").exit_code == 0
    results = load(tmp_path)
    assert results["settings"]["bitwise"] is bitwise
    assert ("bitwise" in describe(results)) is bitwise
    results["methods"]["tokenswift"]["divergence_margin"] = results["settings"]["tie_tolerance"] / 2
    assert checks.differs(results) == found


@pytest.mark.parametrize("batch", ["1", "2"])
def test_the_check_compares_log_probabilities_to_the_last_bit(data, tmp_path, monkeypatch, batch):
    """Equal tokens with another log-probability are a fault where bits are promised, and nothing elsewhere."""
    arguments = ("--num-prompts", "2", "--batch", batch)
    assert compare(data, tmp_path / "unasked", *arguments).exit_code == 0
    assert load(tmp_path / "unasked")["methods"]["tokenswift"]["logprobs_equal"] is None
    honest = compare(data, tmp_path / "honest", *arguments, "--check-lossless")
    assert honest.exit_code == 0 and "to the last bit" in " ".join(honest.stdout.split())
    rows = load(tmp_path / "honest")["methods"]
    assert all(row["logprobs_equal"] for row in rows.values())
    assert all(len(run["logprobs"]) == 12 and max(run["logprobs"]) < 0 for run in rows["tokenswift"]["runs"])

    chunk_of = Sequence.chunk

    def chunk(self, tokens):
        found = chunk_of(self, tokens)
        if found.logprobs and not isinstance(self.drafter, Autoregressive):
            found.logprobs[0] = math.nextafter(found.logprobs[0], 0)
        return found

    monkeypatch.setattr(Sequence, "chunk", chunk)
    lying = compare(data, tmp_path / "lying", *arguments, "--check-lossless")
    assert lying.exit_code == 1 and "tokenswift differs where bitwise" in lying.stderr
    assert load(tmp_path / "lying")["methods"]["tokenswift"]["identical_to_ar"]
    loose = compare(data, tmp_path / "loose", *arguments, "--check-lossless", "--no-bitwise")
    assert loose.exit_code == 0


def test_demanding_bits_where_they_cannot_be_had_is_one_sentence(data, tmp_path, monkeypatch):
    shuffled = "its sums are shuffled"
    monkeypatch.setattr("decoder.backends.bitwise_check.model_fault", lambda target: shuffled)
    result = compare(data, tmp_path / "demanded", "--bitwise")
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        "ts-eval: bitwise cannot be had here: its sums are shuffled; leave it at 'auto' or switch it off"
    )
    assert not (tmp_path / "demanded" / "results.json").exists()
    assert compare(data, tmp_path / "auto").exit_code == 0
    assert load(tmp_path / "auto")["settings"]["bitwise"] is False


def test_the_check_audits_ar_itself(data, tmp_path, lie):
    assert compare(data, tmp_path / "honest", "--check-lossless").exit_code == 0
    for row in load(tmp_path / "honest")["methods"].values():
        assert row["audits"] == [{"checked": 12, "index": None, "margin": None, "ties": [], "fault": None}]

    lie("ar", "tokenswift")
    result = compare(data, tmp_path / "lying", "--check-lossless")
    assert result.exit_code == 1
    assert "not lossless: ar, tokenswift differ where" in result.stderr
    results = load(tmp_path / "lying")
    assert results["methods"]["tokenswift"]["identical_to_ar"]
    assert results["methods"]["ar"]["audits"][0]["index"] == results["methods"]["ar"]["audits"][0]["fault"] == 5


def test_an_audited_tie_passes_the_check(data, tmp_path, lie, monkeypatch):
    lie("tokenswift")
    monkeypatch.setattr(experiment, "divergence_margin", lambda *arguments: 1e-9)
    # Its own audit finds what the margin alone would have excused.
    assert compare(data, tmp_path / "wrong", "--check-lossless", "--no-bitwise").exit_code == 1
    assert load(tmp_path / "wrong")["methods"]["tokenswift"]["audits"][0]["fault"] == 5
    tie = {"checked": 12, "index": 5, "margin": 1e-9, "ties": [5], "fault": None}
    monkeypatch.setattr(checks, "audit_of", lambda *arguments: tie)
    result = compare(data, tmp_path / "tie", "--check-lossless", "--no-bitwise")
    assert result.exit_code == 0
    assert "tie at 5" in result.stdout
    # Of both rows, for this stand-in scores ar's text, too.
    assert "the 24 tokens of all rows are its own choices, but 2 ties within rounding" in " ".join(
        result.stdout.split()
    )
    results = load(tmp_path / "tie")
    assert results["methods"]["tokenswift"]["divergence_margin"] == 1e-9
    assert 1e-9 < results["settings"]["tie_tolerance"] < 1e-4


class FixedLogits(torch.nn.Module):
    """A model that gives the same logits after every context."""

    device, config = torch.device("cpu"), LlamaConfig(num_hidden_layers=1)

    def __init__(self, logits: list[float]):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, input_ids, logits_to_keep, **_):
        return type("Output", (), {"logits": self.logits.expand(1, logits_to_keep, -1)})


def test_margin_is_the_gap_of_the_scores():
    model = FixedLogits([2.0, 1.25, 0.0, -1.0])
    greedy = decoder.SamplingParams(temperature=0)
    assert checks.divergence_margin(model, [3], 0, 1, greedy) == pytest.approx(0.75, rel=1e-4)
    assert checks.divergence_margin(model, [3], 1, 0, greedy) == pytest.approx(0.75, rel=1e-4)

    params = decoder.SamplingParams(seed=11)
    noise = NoiseRows(11, 4, torch.device("cpu")).rows(1, 1)[0]
    ranked = (model.logits + noise).sort(descending=True)
    first, second = ranked.indices[:2].tolist()
    gap = float(ranked.values[0] - ranked.values[1])
    assert checks.divergence_margin(model, [3], first, second, params) == pytest.approx(gap, rel=1e-4)


def test_margin_at_the_edge_of_a_filter_is_the_distance_to_the_edge():
    # Token 1 stands 1e-5 below the min-p threshold; the noise of some seed prefers it clearly.
    logits = [0.0, torch.log(torch.tensor(0.5)).item() - 1e-5]
    for seed in range(50):
        noise = NoiseRows(seed, 2, torch.device("cpu")).rows(1, 1)[0]
        if noise[1] - noise[0] > 2:
            break
    params = decoder.SamplingParams(min_p=0.5, seed=seed)
    assert checks.divergence_margin(FixedLogits(logits), [0], 0, 1, params) == pytest.approx(1e-5, rel=0.02)


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


def test_a_damaged_line_in_front_of_others_is_refused_and_nothing_is_lost(data, tmp_path):
    compare(data, tmp_path)
    log = tmp_path / "generations.jsonl"
    header, first, *others = log.read_bytes().splitlines(keepends=True)
    damaged = b"".join([header, first[:-40] + b"\n", *others])
    log.write_bytes(damaged)
    for _ in range(2):
        result = compare(data, tmp_path)
        assert (result.exit_code, log.read_bytes()) == (2, damaged)
        assert f"line 2 of {log} is damaged" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("line", ["no JSON", '{"tokens": [1]}', '{"resumed_at": 1}'])
def test_a_damaged_step_is_refused_and_nothing_is_lost(tmp_path, line):
    part = tmp_path / "part.jsonl"
    part.write_text(f'{{"method": "ar"}}\n{line}\n{{"resumed_at": 1}}\n')
    with pytest.raises(ValueError, match=f"line 2 of {part} is damaged"):
        Progress(part, {"method": "ar"})
    assert part.read_text().count("\n") == 3


def test_killed_in_the_middle_and_resumed_gives_the_same_tokens_and_metrics(data, tmp_path):
    arguments = ["--runs", "2", "--max-new-tokens", "60"]
    command = ["compare", "ar", "tokenswift", "--data-dir", data, "--device", "cpu", *SHORT]
    with open(tmp_path / "said", "wb") as said:
        process = forked(main, [*command, *arguments, "--output", tmp_path / "cut"], stderr=said.fileno())
    log, parts = tmp_path / "cut/generations.jsonl", tmp_path / "cut/in-progress"
    deadline = time.monotonic() + 300

    def under_way() -> bool:
        """Two generations are finished, and of another one there are some steps."""
        done = [(line["method"], line["run"]) for line, _ in list(whole_lines(log))[1:]]
        started = [[line for line, _ in whole_lines(part)] for part in parts.glob("*.jsonl")]
        return len(done) >= 2 and any(
            len(lines) > 10 and (lines[0]["method"], lines[0]["run"]) not in done for lines in started
        )

    while not under_way():
        assert process.is_alive(), (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join()
    finished = log.read_bytes().count(b"\n") - 1
    assert 2 <= finished < 4 and not (tmp_path / "cut/results.json").exists()

    resumed = compare(data, tmp_path / "cut", *arguments)
    assert resumed.exit_code == 0, resumed.output
    assert f"{finished} finished generations taken over" in resumed.stderr
    assert "1 cut generation will be continued" in resumed.stderr
    whole = compare(data, tmp_path / "whole", *arguments)
    assert whole.exit_code == 0
    cut, uncut = load(tmp_path / "cut"), load(tmp_path / "whole")
    assert tokens(cut) == tokens(uncut)
    for name in ("ar", "tokenswift"):
        assert measures(cut["methods"][name]) == measures(uncut["methods"][name])
    assert sum(row["resumed"] for row in cut["methods"].values()) == 1


def test_interrupted_says_how_to_resume(data, tmp_path, monkeypatch):
    honest = decoder.Decoder.stream

    def stream(self, *arguments, **named):
        chunks = honest(self, *arguments, **named)
        yield next(chunks)
        if arguments[2] == "tokenswift" and arguments[3].seed == 1:
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
    spec = MethodSpec.parse("tokenswift:tree=2,2:budget=64:coupled=false:cache=static")
    assert spec.name == "tokenswift"
    assert spec.options == {"tree": (2, 2), "budget": 64, "coupled": False, "cache": "static"}


@pytest.mark.parametrize(
    ("method", "flag"), [("medusa", "--heads"), ("draft-model", "--draft-model"), ("triforce", "--draft-model")]
)
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


TEXT_MEASURES = ("distinct", "distinct_words", "self_bleu", "longest_repeated_span", "repeated_share", "loop_start",
                 "compression_ratio", "perplexity", "semantic_diversity")  # fmt: skip


def measures(row: dict) -> dict:
    return {name: row[name] for name in TEXT_MEASURES}


def with_every_part(data: Path) -> tuple[str, ...]:
    heads = "--heads", str(data / "heads-chained"), "--heads", f"eagle3={data / 'heads-eagle3'}"
    return "--draft-model", str(data / "reference-model"), *heads


@pytest.fixture(scope="module")
def uncut(data, tmp_path_factory):
    """The flags of a comparison of 60 tokens, and the rows of all methods that nothing has cut."""
    flags = ("--max-new-tokens", "60", *with_every_part(data))
    folder = tmp_path_factory.mktemp("uncut")
    assert compare(data, folder, *flags, methods=decoder.methods()).exit_code == 0
    return flags, load(folder)["methods"]


# Plain decoding and those that keep something of their own beside the text: statistics, a partial cache, another
# model's cache, a draft model's. The others draft from the text and its last hidden state.
@pytest.mark.parametrize(
    "method",
    [
        method if method in ("ar", "auto", "draft-model", "tokenswift", "eagle3") else pytest.param(method, marks=slow)
        for method in decoder.methods()
    ],
)
def test_a_generation_cut_in_the_middle_goes_on_to_the_same_text(data, uncut, tmp_path, monkeypatch, method):
    flags, wholes = uncut
    methods = ("ar",) if method == "ar" else ("ar", method)
    honest = decoder.Decoder.stream
    cut_after = None

    def stream(self, *arguments, **named):
        for place, chunk in enumerate(honest(self, *arguments, **named)):
            if place == cut_after and arguments[2] == method:
                raise KeyboardInterrupt
            yield chunk

    # Shorter than the cuts, so that these fall into the generation itself.
    monkeypatch.setattr(rounds, "WARM_UP_NEW_TOKENS", 2)
    monkeypatch.setattr(decoder.Decoder, "stream", stream)
    for steps in (4, 2):
        cut_after = steps
        result = compare(data, tmp_path / "cut", *flags, methods=methods)
        assert result.exit_code == 130 and "the same command resumes" in result.stderr
    cut_after = None
    result = compare(data, tmp_path / "cut", *flags, methods=methods)
    assert result.exit_code == 0, result.output
    assert "1 cut generation will be continued" in result.stderr
    assert not (tmp_path / "cut/in-progress").exists()

    row, expected = load(tmp_path / "cut")["methods"][method], wholes[method]
    run, whole = row["runs"][0], expected["runs"][0]
    assert run["token_ids"] == whole["token_ids"] and run["text"] == whole["text"]
    assert measures(row) == measures(expected)
    assert row["resumed"] == 1 and "Cut and resumed" in result.stdout
    assert run["resumed_at"] == [sum(run["step_tokens"][:4]), sum(run["step_tokens"][:6])]
    # Counts and times are the sums of the three parts.
    assert sum(run["step_tokens"]) == 60 and len(run["step_tokens"]) == run["steps"]
    assert (run["drafted"], run["accepted"]) == (run["step_drafted"][-1], run["step_accepted"][-1])
    assert sum(run["accepted_by_depth"]) == run["accepted"]
    assert run["decode_seconds"] == pytest.approx(run["step_seconds"][-1], abs=1e-6)
    assert run["step_seconds"] == sorted(run["step_seconds"])
    assert run["cache_rebuilds"] is None


@pytest.mark.parametrize("method", ["tokenswift:verification=independent", "hf"])
def test_a_cut_generation_whose_draws_are_a_sequence_starts_over(data, tmp_path, monkeypatch, method):
    assert compare(data, tmp_path / "whole", methods=("ar", method)).exit_code == 0
    honest = Progress.add
    steps = []

    def add(self, tokens, counts, logprobs):
        honest(self, tokens, counts, logprobs)
        steps.append(self._header["method"])
        if steps.count(method) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "add", add)
    assert compare(data, tmp_path / "cut", methods=("ar", method)).exit_code == 130
    monkeypatch.undo()
    assert compare(data, tmp_path / "cut", methods=("ar", method)).exit_code == 0
    assert tokens(load(tmp_path / "cut")) == tokens(load(tmp_path / "whole"))
    assert load(tmp_path / "cut")["methods"][method]["resumed"] == 0


def test_a_cut_generation_of_other_settings_is_never_continued(data, tmp_path, monkeypatch):
    honest = decoder.Decoder.stream

    def stream(self, *arguments, **named):
        chunks = honest(self, *arguments, **named)
        yield next(chunks)
        yield from itertools.islice(chunks, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "WARM_UP_NEW_TOKENS", 1)
    monkeypatch.setattr(decoder.Decoder, "stream", stream)
    assert compare(data, tmp_path, methods=("ar",)).exit_code == 130
    monkeypatch.undo()
    refused = compare(data, tmp_path, "--seed", "3", methods=("ar",))
    assert refused.exit_code == 2 and "(seed)" in refused.stderr
    assert compare(data, tmp_path, "--seed", "3", "--overwrite", methods=("ar",)).exit_code == 0
    assert load(tmp_path)["methods"]["ar"]["resumed"] == 0
    assert not (tmp_path / "in-progress").exists()


def test_along_the_length_adds_up_with_the_steps(data, tmp_path):
    marks = ("--max-new-tokens", "50", "--marks", "50,10,30")
    assert compare(data, tmp_path, *marks, "--runs", "2").exit_code == 0
    results = load(tmp_path)
    for name, row in results["methods"].items():
        assert [mark["tokens"] for mark in row["along_length"]] == [10, 30, 50]
        for run, reference in zip(row["runs"], results["methods"]["ar"]["runs"], strict=True):
            assert sum(run["step_tokens"]) == 50
            assert run["step_seconds"][-1] == pytest.approx(run["decode_seconds"], abs=1e-6)
            last = run["along_length"][-1]
            assert last["ms_per_token"] == pytest.approx(run["ms_per_token"], rel=1e-3)
            assert last["acceptance_rate"] == run["acceptance_rate"]
            for mark, at_ar in zip(run["along_length"], reference["along_length"], strict=True):
                # ar takes one token per step, so its clock there can be read off directly.
                count = mark["tokens"]
                assert at_ar["ms_per_token"] == pytest.approx(1000 * reference["step_seconds"][count - 1] / count)
        middle = row["along_length"][1]
        assert middle["speedup"] == 1.0 if name == "ar" else middle["speedup"] > 0
        between = [run["along_length"][1] for run in row["runs"]]
        assert middle["ms_per_token"] == pytest.approx(sum(mark["ms_per_token"] for mark in between) / 2)
    first, second = results["methods"]["ar"]["runs"][0]["along_length"][:2]
    gap = second["ms_per_token"] * 30 - first["ms_per_token"] * 10
    assert second["ms_per_token_since"] == pytest.approx(gap / 20)


def test_acceptance_is_told_by_depth_and_source(data, tmp_path):
    assert compare(data, tmp_path, "--max-new-tokens", "40", "--runs", "2").exit_code == 0
    row = load(tmp_path)["methods"]["tokenswift"]
    steps, drafted = (sum(run[name] for run in row["runs"]) for name in ("steps", "drafted"))
    by_depth = [sum(run["accepted_by_depth"][depth] for run in row["runs"]) / steps for depth in range(2)]
    assert row["acceptance_by_depth"][:2] == by_depth
    assert row["acceptance_by_depth"] == sorted(row["acceptance_by_depth"], reverse=True)
    assert set(row["acceptance_by_source"]) <= {"heads", "ngrams"}
    for source, share in row["acceptance_by_source"].items():
        assert share == sum(run["accepted_by_source"].get(source, 0) for run in row["runs"]) / drafted


def test_transformers_rows_are_ars_text_when_greedy_under_the_same_penalty(data, tmp_path):
    rows = ("ar", "hf", "hf-prompt-lookup")
    greedy = ("--temperature", "0", "--max-new-tokens", "30", "--check-lossless")
    result = compare(data, tmp_path / "greedy", *greedy, methods=rows)
    assert result.exit_code == 0, result.output
    for name in rows[1:]:
        row = load(tmp_path / "greedy")["methods"][name]
        assert row["identical_to_ar"] is True
        assert row["acceptance_rate"] is None and row["acceptance_by_depth"] == []
        run = row["runs"][0]
        assert sum(run["step_tokens"]) == 30 and run["prefill_seconds"] > 0
        # The first step's tokens come out of the pass over the prompt.
        timed = 30 - run["step_tokens"][0]
        assert run["ms_per_token"] == pytest.approx(1000 * run["decode_seconds"] / timed)
    assert load(tmp_path / "greedy")["methods"]["hf"]["tokens_per_step"] == 1.0

    # A window shorter than the text is nothing transformers knows.
    result = compare(data, tmp_path / "window", *greedy, "--penalty-window", "50", methods=rows)
    assert result.exit_code == 0
    assert load(tmp_path / "window")["methods"]["hf"]["identical_to_ar"] is None


def test_transformers_rows_when_sampling_are_not_compared(data, tmp_path):
    result = compare(data, tmp_path / "one", "--check-lossless", methods=("ar", "hf"))
    assert result.exit_code == 0, result.output
    row = load(tmp_path / "one")["methods"]["hf"]
    assert (row["identical_to_ar"], row["first_divergence"], row["divergence_margin"]) == (None, None, None)
    assert "transformers' own rows" in " ".join(result.stdout.split())
    assert compare(data, tmp_path / "two", methods=("ar", "hf")).exit_code == 0
    assert tokens(load(tmp_path / "one")) == tokens(load(tmp_path / "two"))
    assert compare(data, tmp_path / "other", "--seed", "1", methods=("ar", "hf")).exit_code == 0
    assert tokens(load(tmp_path / "one"))["hf"] != tokens(load(tmp_path / "other"))["hf"]


def test_transformers_sampling_is_that_of_its_own_arguments(data, tmp_path):
    flags = ("--temperature", "0.8", "--top-k", "30", "--top-p", "0.9", "--min-p", "0.01", "--eta-cutoff", "0.0003")
    assert compare(data, tmp_path, *flags, "--seed", "7", methods=("ar", "hf")).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(data / "reference-model", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(data / "reference-model")(BOOKS["The Lighthouse"], return_tensors="pt")
    torch.manual_seed(7)
    expected = model.generate(ids["input_ids"][:, :40], max_new_tokens=12, do_sample=True, temperature=0.8, top_k=30,
                              top_p=0.9, min_p=0.01, eta_cutoff=0.0003, repetition_penalty=1.2)  # fmt: skip
    assert tokens(load(tmp_path))["hf"] == [expected[0, 40:].tolist()]


def test_a_full_disk_ends_in_a_sentence_and_keeps_what_is_finished(data, tmp_path):
    whole = compare(data, tmp_path / "whole", "--runs", "3")
    assert whole.exit_code == 0
    size = (tmp_path / "whole/generations.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 // 3, hard))
    try:
        result = compare(data, tmp_path / "cut", "--runs", "3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2
    assert "generations.jsonl: File too large" in result.stderr
    assert "is kept in" in result.stderr and result.stderr.strip().count("\n") == 0
    resumed = compare(data, tmp_path / "cut", "--runs", "3")
    assert resumed.exit_code == 0 and "finished generations taken over" in resumed.stderr
    assert tokens(load(tmp_path / "cut")) == tokens(load(tmp_path / "whole"))


def test_a_folder_that_cannot_be_made_keeps_nothing(data, tmp_path):
    (tmp_path / "file").write_text("")
    result = compare(data, tmp_path / "file/out")
    assert result.exit_code == 2 and "is kept in" not in result.stderr
    [sentence] = result.stderr.splitlines()
    assert sentence.startswith(f"ts-eval: nothing can be written to {tmp_path / 'file'}")
    assert sentence.endswith("(Not a directory): make room for it, or use another --output")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_too_little_memory_ends_in_a_sentence_and_keeps_what_is_finished(data, tmp_path, monkeypatch, kind):
    honest = decoder.Decoder.stream

    def stream(self, *arguments, **named):
        if arguments[2] == "tokenswift" and len(arguments[0]) == 40 and arguments[1] == 25:
            if kind == "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 13.4 GiB.")
            torch.empty(2**60, dtype=torch.uint8)
        yield from honest(self, *arguments, **named)

    monkeypatch.setattr(decoder.Decoder, "stream", stream)
    result = compare(data, tmp_path, "--max-new-tokens", "25")
    assert result.exit_code == 2, result.output
    assert "out of memory at tokenswift prompt 1/1 run 1/1" in result.stderr and "is kept in" in result.stderr
    monkeypatch.undo()
    result = compare(data, tmp_path, "--max-new-tokens", "25")
    assert result.exit_code == 0 and "1 finished generations taken over" in result.stderr


def test_two_writers_do_not_share_a_folder(data, tmp_path):
    assert compare(data, tmp_path, methods=("ar",)).exit_code == 0
    with open(tmp_path / "generations.jsonl", "r+b") as log:
        portalocker.lock(log, portalocker.LOCK_EX | portalocker.LOCK_NB)
        result = compare(data, tmp_path, methods=("ar",))
    assert result.exit_code == 2 and "another ts-eval writes to" in result.stderr


# Users' processes are spawned and import everything again, which takes far longer than the texts of this test.
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_share_the_prompts(data, tmp_path, monkeypatch, start):
    context = multiprocessing.get_context(start)
    asked = []
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda method: asked.append(method) or context)
    arguments = ("--num-prompts", "2", "--runs", "2", "--device", "cpu")
    two = compare(data, tmp_path / "two", *arguments, "--processes", "2", "--check-lossless")
    assert two.exit_code == 0, two.output
    assert asked == ["spawn"]
    logs = [tmp_path / "two/generations.jsonl", tmp_path / "two/generations-1.jsonl"]
    done = [{(r["prompt_index"], r["run"]) for r in map(json.loads, log.read_text().splitlines()[1:])} for log in logs]
    assert done == [{(0, 0), (0, 1)}, {(1, 0), (1, 1)}]
    one = compare(data, tmp_path / "one", *arguments)
    assert one.exit_code == 0
    assert tokens(load(tmp_path / "two")) == tokens(load(tmp_path / "one"))


@pytest.fixture
def blocks(monkeypatch):
    """The blocks that a Ray cluster would be given, which two processes, both this one, do in turn."""
    given = []

    def in_turn(self, ready, items, block):
        processes = [ready(), ready()]
        for number, start in enumerate(range(0, len(items), block)):
            given.append(items[start : start + block])
            do, identity = processes[number % 2]
            yield from ((item, result, identity) for item, result in zip(given[-1], do(given[-1]), strict=True))

    monkeypatch.setattr(Cluster, "map", in_turn)
    return given


def test_a_cluster_shares_the_prompts(data, tmp_path, blocks):
    arguments = ("--num-prompts", "2", "--runs", "2", "--device", "cpu", "--check-lossless")
    shared = compare(data, tmp_path / "ray", *arguments, "--ray", "auto")
    assert shared.exit_code == 0, shared.output
    assert blocks == [[0], [1], [2], [3]]
    one = compare(data, tmp_path / "one", *arguments)
    assert one.exit_code == 0 and tokens(load(tmp_path / "ray")) == tokens(load(tmp_path / "one"))
    # What is there is not generated again.
    assert compare(data, tmp_path / "ray", *arguments, "--runs", "2", "--ray", "auto").exit_code == 0
    assert len(blocks) == 4
    refused = compare(data, tmp_path / "no", *arguments, "--ray", "auto", "--processes", "2")
    assert refused.exit_code == 2 and "--ray shares the prompts by itself" in refused.stderr


def test_a_launchers_processes_share_the_prompts(data, tmp_path, monkeypatch):
    arguments = ("--num-prompts", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    other = compare(data, tmp_path / "two", *arguments)
    assert other.exit_code == 0 and other.stdout == "" and not (tmp_path / "two/results.json").exists()
    monkeypatch.setenv("RANK", "0")
    assert compare(data, tmp_path / "two", *arguments).exit_code == 0
    assert "4 finished generations taken over" in compare(data, tmp_path / "two", *arguments).stderr
    monkeypatch.delenv("WORLD_SIZE")
    assert compare(data, tmp_path / "one", *arguments).exit_code == 0
    assert tokens(load(tmp_path / "two")) == tokens(load(tmp_path / "one"))


def test_a_failing_process_is_told_in_a_sentence(data, tmp_path, monkeypatch):
    # Nothing is imported again, as in the test above.
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda method: fork)
    (tmp_path / "out").mkdir()
    # The other process cannot write its log where a folder stands.
    (tmp_path / "out/generations-1.jsonl").mkdir()
    result = compare(data, tmp_path / "out", "--num-prompts", "2", "--processes", "2", "--device", "cpu")
    sentence = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and "generations-1.jsonl" in sentence and sentence.count("is kept in") == 1


def test_prompts_come_from_the_hub(data, tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return iter([{"short_book_title": title, "text": text} for title, text in BOOKS.items()])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = ("--prompts", "owner/books:validation")
    assert compare(data, tmp_path / "one", *hub, methods=("ar",)).exit_code == 0
    assert asked == [("owner/books", "validation", True)]
    # Books: one of them unless more are asked for.
    assert load(tmp_path / "one")["settings"]["prompt_names"] == ["The Lighthouse"]
    assert compare(data, tmp_path / "two", *hub, "--num-prompts", "9", methods=("ar",)).exit_code == 0
    assert load(tmp_path / "two")["settings"]["prompt_names"] == list(BOOKS)


def test_a_hub_dataset_that_cannot_be_read_is_told_in_a_sentence(data, tmp_path, monkeypatch):
    def load_dataset(name, split, streaming):
        raise RuntimeError("Couldn't reach 'owner/books' on the Hub (ConnectionError). More.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    result = compare(data, tmp_path / "out", "--prompts", "owner/books", methods=("ar",))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "owner/books (split test) cannot be read: Couldn't reach" in result.stderr


def test_a_stretched_model_is_compared_with_itself(data, tmp_path):
    plain = compare(data, tmp_path / "plain", "--check-lossless", methods=("ar",))
    longer = compare(data, tmp_path / "longer", "--yarn", "2", "--check-lossless", methods=("ar", "suffix"))
    assert plain.exit_code == longer.exit_code == 0, longer.output
    assert load(tmp_path / "longer")["settings"]["yarn"] == 2 and "yarn" not in load(tmp_path / "plain")["settings"]
    one, other = (load(tmp_path / name)["methods"]["ar"]["runs"][0]["perplexity"] for name in ("plain", "longer"))
    assert load(tmp_path / "longer")["methods"]["suffix"]["identical_to_ar"] and one != other
    again = compare(data, tmp_path / "longer", "--check-lossless", methods=("ar", "suffix"))
    assert again.exit_code == 2 and "yarn" in again.stderr
    refused = compare(data, tmp_path / "llama", "--yarn", "2", methods=("ar", "llama.cpp"))
    assert refused.exit_code == 2 and "leave out its rows, or --yarn" in refused.stderr


def test_results_say_where_they_come_from(data, tmp_path):
    # What earlier tests have freed goes back, so that memory grows by what this one takes.
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    assert compare(data, tmp_path, "--heads", str(data / "heads-gated"), methods=("ar", "auto")).exit_code == 0
    results = load(tmp_path)
    environment = results["environment"]
    assert environment["arguments"][:3] == ["compare", "ar", "auto"] and "--output" in environment["arguments"]
    assert set(environment["versions"]) >= {"tokenswift-decoder", "tokenswift-eval", "torch", "transformers"}
    assert environment["device"] == "cpu" and results["settings"]["seed"] == 0
    run = results["methods"]["ar"]["runs"][0]
    assert run["peak_memory_bytes"] >= run["memory_before_bytes"] > 0
    # Weights, and two of K and V: 2 layers of 2 heads of 8 numbers of 4 bytes, for 52 positions and the root.
    model = AutoModelForCausalLM.from_pretrained(data / "reference-model", dtype=torch.float32)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    planned = results["methods"]["ar"]["planned_memory_bytes"]
    caches = 2 * 2 * 2 * 8 * 4 * 53 + 1 + 256 * 4
    assert planned == weights + caches
    assert results["methods"]["ar"]["planned_memory_above_model_bytes"] == caches
    # auto's trees have up to 64 nodes, whose K and V, mask and logits there is room for.
    wide = 2 * 2 * 2 * 8 * 4 * (52 + 64) + 64**2 + 64 * 256 * 4
    heads = sum(parameter.nbytes for parameter in decoder.DraftHeads.from_pretrained(data / "heads-gated").parameters())
    auto = results["methods"]["auto"]
    assert auto["planned_memory_above_model_bytes"] == wide
    assert auto["planned_memory_bytes"] == weights + heads + wide
    assert run["memory_loaded_bytes"] > run["memory_before_bytes"]
    above = max(0, run["peak_memory_bytes"] - run["memory_loaded_bytes"])
    assert results["methods"]["ar"]["memory_above_model_bytes"] == above


def test_what_turns_leave_is_looked_for_without_all_that_was_there_before():
    class Held:
        pass

    def cycle():
        one = Held()
        one.itself = one
        return weakref.ref(one)

    gc.unfreeze()  # what was there before this test
    before = cycle()
    with pytest.raises(OSError), rounds.settled():
        assert before() is None and gc.get_freeze_count() > 10_000
        left = cycle()
        assert left() is not None
        gc.collect()
        assert left() is None
        raise OSError
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with rounds.settled():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() > 10_000
