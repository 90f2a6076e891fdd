"""The scoreboard of exactness: own plain texts, first differences, and a chi-square test that finds a planted bias."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fake_llama_cpp import install
from test_llama_cpp import PROMPT, ROWS, file  # noqa: F401

import decoder
from ts_eval.cli import main
from ts_eval.comparing import draws
from ts_eval.exactness import biased, exactness

SHARES = {"a": 0.5, "b": 0.3, "c": 0.19, "d": 0.009, "e": 0.001}


def drawn(shares, count, seed):
    outcomes = np.random.default_rng(seed).choice(list(shares), size=count, p=list(shares.values()))
    return Counter(outcomes.tolist())


def test_exact_draws_give_an_alarm_as_often_as_is_said():
    """4,000 tests at 1% have 40 alarms, with a standard deviation of 6.3: outside 5 of these once in 1.7 million."""
    found = [draws.chi_square(drawn(SHARES, 500, seed), SHARES)["p"] for seed in range(4000)]
    assert 8 < sum(p < 0.01 for p in found) < 72
    assert 0.45 < np.median(found) < 0.55


def test_a_planted_bias_is_found():
    """A token of probability 0.3 comes with 0.39: some 4.4 standard deviations of 500 draws."""
    planted = SHARES | {"a": 0.41, "b": 0.39}
    found = [draws.chi_square(drawn(planted, 500, seed), SHARES)["p"] for seed in range(200)]
    assert sum(p < draws.FALSE_ALARM for p in found) > 150


def test_rare_outcomes_count_as_one_and_a_single_outcome_is_no_test():
    # b is expected 3 times and goes to the rarest that has a cell, as does what has no probability at all.
    found = draws.chi_square(Counter(a=60, c=37, b=2, z=1), {"a": 0.6, "b": 0.03, "c": 0.37})
    assert found["degrees"] == 1 and found["statistic"] == pytest.approx(0)
    assert draws.chi_square(Counter(a=100), {"a": 1.0}) is None
    # One degree of freedom: the square of a standard normal variable.
    found = draws.chi_square(Counter(a=60, b=40), {"a": 0.5, "b": 0.5})
    assert found["statistic"] == pytest.approx(4) and found["p"] == pytest.approx(0.0455, abs=1e-4)


def test_expected_shares_are_those_of_the_filtered_model():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def behind(text):
        return logits.roll(text[-1])

    sampling = decoder.SamplingParams(temperature=0.5, top_k=2)
    one, two = draws.expected_shares([0], 1000, behind, sampling)
    high, low = (1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2)))
    assert one == pytest.approx({0: high, 1: low})
    assert two == pytest.approx({(0, 0): high**2, (0, 1): high * low, (1, 1): low * high, (1, 2): low * low})
    # With temperature behind the filter of 0.2 the second token stays: e^-1 of the first, and e^-2 before it is not.
    sampling = decoder.SamplingParams(temperature=0.5, min_p=0.2)
    assert draws.probabilities(logits, sampling).tolist() == pytest.approx([1, 0, 0, 0])
    last = draws.probabilities(logits, sampling, temperature_last=True)
    assert last.tolist() == pytest.approx([high, low, 0, 0])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"text": PROMPT}, {"text": PROMPT[::-1]}, {"text": PROMPT[3:] + PROMPT}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def board(file, prompts, output, methods=("suffix", *ROWS), **named):  # noqa: F811
    sampling = {"temperature": 0.9, "top_k": 4, "min_p": 0.0, "repetition_penalty": 1.0} | named.pop("sampling", {})
    settings = {"max_new_tokens": 24, "draws": 80, "sampling": sampling} | named
    return exactness(methods, model=str(file), prompts=prompts, output=output, **settings)


def test_the_scoreboard_of_exact_engines(file, prompts, tmp_path, monkeypatch):  # noqa: F811
    install(monkeypatch)
    results = board(file, prompts, tmp_path / "out")
    rows = results["rows"]
    assert list(rows) == ["ar", "suffix", *ROWS]
    assert [row["plain"] for row in rows.values()] == ["ar", "ar", "llama.cpp", "llama.cpp"]
    for name, row in rows.items():
        plain = name in ("ar", "llama.cpp")
        for part in ("greedy", "sampled"):
            assert row[part]["texts"] == 3 and row[part]["tokens_per_second"] > 0
            assert row[part]["same"] == (None if plain else 3) and not row[part]["differences"]
        assert biased(results, row) is False
        assert row["draws"]["tokens_per_step"] == 1 if plain else row["draws"]["tokens_per_step"] >= 1
    assert rows["llama.cpp-prompt-lookup"]["draws"]["tokens_per_step"] > 1
    assert rows["llama.cpp"]["draws"]["two"]["degrees"] >= 2
    assert results["false_alarm"] == {"odds": draws.FALSE_ALARM, "tests": 8}
    page = (tmp_path / "out/exactness.md").read_text()
    assert "| suffix | tokenswift-decoder" in page and "| 3 of 3 |" in page and "| from the model |" in page
    assert "llama-cpp-python 0.0.1" in page and results["environment"]["cpu"] in page
    assert json.loads((tmp_path / "out/exactness.json").read_text()) == results


def test_a_biased_engine_is_found(file, prompts, tmp_path, monkeypatch):  # noqa: F811
    """It keeps what it drafted wherever the filters leave it."""
    install(monkeypatch, biased=True)
    results = board(file, prompts, tmp_path / "out", methods=ROWS, sampling={"top_k": 200})
    rows = results["rows"]
    assert biased(results, rows["llama.cpp"]) is False and biased(results, rows["llama.cpp-prompt-lookup"]) is True
    sampled = rows["llama.cpp-prompt-lookup"]["sampled"]
    assert sampled["same"] < 3 and sampled["earliest_difference"] <= sampled["median_difference"]
    assert "NOT from the model" in (tmp_path / "out/exactness.md").read_text()


def command(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(main, ["exactness", *map(str, arguments)])


def test_the_command_takes_all_at_hand_and_goes_on_where_it_was_cut(data, tmp_path):
    flags = ("--data-dir", data, "--prompt-tokens", 40, "--max-new-tokens", 6, "--draws", 5, "--output", tmp_path)
    first = command("prompt-lookup", "hf", "hf-prompt-lookup", *flags)
    assert first.exit_code == 0, first.output
    assert "transformers draws from a generator of PyTorch" in " ".join(first.stdout.split())
    made = {part: (tmp_path / part / "generations.jsonl").read_text() for part in ("greedy", "sampled", "draws")}
    (tmp_path / "draws/generations.jsonl").write_text("\n".join(made["draws"].split("\n")[:8]) + "\n")
    again = command("prompt-lookup", "hf", "hf-prompt-lookup", *flags)
    assert again.exit_code == 0 and "7 finished generations taken over" in again.stderr
    assert (tmp_path / "greedy/generations.jsonl").read_text() == made["greedy"]
    lines = (tmp_path / "draws/generations.jsonl").read_text().splitlines()
    texts = [[json.loads(line).get("token_ids") for line in part] for part in (lines, made["draws"].splitlines())]
    assert texts[0] == texts[1] and len(texts[0]) == 1 + 5 * 4


def test_what_cannot_run_is_left_out_and_said(data, tmp_path):
    flags = ("--data-dir", data, "--prompt-tokens", 20, "--max-new-tokens", 2, "--draws", 0, "--output", tmp_path)
    result = command("--model", data / "reference-model", *flags)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "exactness.json").read_text())["rows"]
    assert {"ar", "auto", "suffix", "hf", "hf-prompt-lookup"} <= set(rows) and not set(ROWS) & set(rows)
    assert all(row["draws"] is None for row in rows.values())
    assert "without llama.cpp: llama.cpp reads GGUF files" in result.stderr
    assert "without hf-assisted: hf-assisted needs a small model" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--draws", "-1"), "--draws must be at least 0, not -1"),
        (("--temperature", "0"), "--temperature must be above 0: greedy texts are generated as well"),
        (("nothing",), "unknown method 'nothing'"),
    ],
)
def test_wrong_input_is_one_sentence(data, tmp_path, arguments, reason):
    result = command(*arguments, "--data-dir", data, "--output", tmp_path / "out")
    assert result.exit_code == 2 and reason in result.stderr and result.stderr.count("\n") <= 2
    assert not (tmp_path / "out").exists()
