"""Measures against hand-computed cases, independent computations, and their bounds and invariances."""

import json
import math
import random
from collections import Counter

import pytest
import sacrebleu
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_eval import metrics
from ts_eval.cli import main


def test_distinct_by_hand():
    # 1-grams a b a b: 2 of 4; 2-grams ab ba ab: 2 of 3; 3-grams aba bab: 2 of 2; one 4-gram.
    assert metrics.distinct("abab") == {
        "1": 0.5,
        "2": pytest.approx(2 / 3),
        "3": 1.0,
        "4": 1.0,
        "mean": pytest.approx((0.5 + 2 / 3 + 2) / 4),
    }


def test_distinct_of_a_short_text_is_none_and_so_is_its_mean():
    assert metrics.distinct([7, 8]) == {"1": 1.0, "2": 1.0, "3": None, "4": None, "mean": None}
    assert metrics.distinct_n([], 1) is None
    with pytest.raises(ValueError, match="n must be"):
        metrics.distinct_n([1], 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
def test_distinct_matches_a_counter_is_bounded_and_blind_to_names(tokens, n):
    value = metrics.distinct_n(tokens, n)
    counts = Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    if not counts:
        assert value is None
        return
    assert value == len(counts) / counts.total()
    assert 0 < value <= 1
    assert metrics.distinct_n([f"token {token}" for token in tokens], n) == value
    assert metrics.distinct_n(tokens[::-1], n) == value


def slow_self_bleu(text: str, order: int, segments: int) -> float:
    """The definition, with sacrebleu doing all of it."""
    words = text.split()
    pieces = [" ".join(words[i * len(words) // segments : (i + 1) * len(words) // segments]) for i in range(segments)]
    bleu = sacrebleu.BLEU(max_ngram_order=order, effective_order=True)
    scores = [bleu.sentence_score(piece, pieces[:i] + pieces[i + 1 :]).score for i, piece in enumerate(pieces)]
    return sum(scores) / segments / 100


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(15, 90))
def test_self_bleu_is_sacrebleus(seed, segments, length):
    rng = random.Random(seed)
    text = " ".join(rng.choice(["sea", "lamp,", "the", "keeper's", "stairs.", "and"]) for _ in range(length))
    fast = metrics.self_bleu(text, segments=segments)
    for order in metrics.BLEU_ORDERS:
        if length // segments < order:
            assert fast[str(order)] is None
        else:
            assert fast[str(order)] == pytest.approx(slow_self_bleu(text, order, segments))
            assert 0 <= fast[str(order)] <= 1


def test_self_bleu_of_identical_segments_is_one_and_of_disjoint_ones_zero():
    assert metrics.self_bleu("the lamp upon the sea and the keeper " * 50) == dict.fromkeys("2345", pytest.approx(1.0))
    words = " ".join(f"word{i}" for i in range(500))
    assert metrics.self_bleu(words) == dict.fromkeys("2345", 0.0)


def test_self_bleu_of_a_short_text_is_none():
    assert metrics.self_bleu("too short " * 20) == dict.fromkeys("2345")
    with pytest.raises(ValueError, match="segments"):
        metrics.self_bleu("a b c", segments=1)


def test_rates_by_hand():
    assert metrics.acceptance_rate(6, 8) == 0.75
    assert metrics.ngram_acceptance_rate(2, 8) == 0.25
    assert metrics.tokens_per_step(9, 3) == 3.0
    assert metrics.acceptance_rate(0, 0) is None
    assert metrics.ngram_acceptance_rate(0, 0) is None
    assert metrics.tokens_per_step(0, 0) is None


def test_torchmetrics_classes_agree_with_the_functions():
    alpha, per_step = metrics.AcceptanceRate(), metrics.TokensPerStep()
    for accepted, drafted, steps in ((3, 4, 1), (0, 12, 3)):
        alpha.update(accepted, drafted)
        per_step.update(accepted + steps, steps)
    assert alpha.compute() == metrics.acceptance_rate(3, 16)
    assert per_step.compute() == metrics.tokens_per_step(7, 4)
    nothing_drafted = metrics.AcceptanceRate()
    nothing_drafted.update(0, 0)
    assert math.isnan(nothing_drafted.compute())

    distinct = metrics.Distinct(2)
    for text in ("abab", "a", "abc"):
        distinct.update(text)
    assert distinct.compute().item() == pytest.approx((2 / 3 + 1) / 2)

    text = "the lamp upon the sea and the keeper climbed " * 4
    self_bleu = metrics.SelfBLEU(order=2, segments=4)
    self_bleu.update(text)
    self_bleu.update("short")
    assert self_bleu.compute().item() == pytest.approx(metrics.self_bleu(text, (2,), 4)["2"])


def test_command_measures_words_and_tokens_of_any_text(data, prompt_file, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    text = prompt_file.read_text()
    result = CliRunner().invoke(main, ["metrics", str(prompt_file), str(empty), "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert rows[str(prompt_file)] == {
        "words": len(text.split()),
        "distinct": metrics.distinct(text.split()),
        "self_bleu": metrics.self_bleu(text),
    }
    assert rows[str(empty)]["distinct"]["1"] is None

    result = CliRunner().invoke(main, ["metrics", str(prompt_file), "--tokenizer", str(data / "reference-model")])
    assert result.exit_code == 0
    # The tiny tokenizer's tokens are bytes.
    assert f"{len(text):,}" in result.stdout
    assert f"{metrics.distinct_n(text, 2):.3f}" in result.stdout


def test_command_refuses_what_it_cannot_read(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for file in (binary, tmp_path / "missing.txt"):
        result = CliRunner().invoke(main, ["metrics", str(file)])
        assert result.exit_code == 2
        assert str(file) in result.stderr and result.stderr.count("\n") == 1
