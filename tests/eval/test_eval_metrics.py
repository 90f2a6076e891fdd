"""Measures against hand-computed cases, independent computations, and their bounds and invariances."""

import json
import math
import random
import zlib
from collections import Counter

import pytest
import sacrebleu
import torch
import torchmetrics
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_reference import BOOKS
from torchmetrics import Metric
from transformers import AutoModel, AutoTokenizer

import decoder
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


def longest_by_brute_force(tokens: list[int]) -> int:
    spans = [tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1)]
    return max((len(span) for span, count in Counter(spans).items() if count > 1), default=0)


@given(st.lists(st.integers(0, 2), max_size=24))
def test_longest_repeated_span_is_the_brute_force_one(tokens):
    found = metrics.longest_repeated_span(tokens)
    assert found == longest_by_brute_force(tokens)
    assert found == metrics.longest_repeated_span(tokens[::-1])
    assert metrics.longest_repeated_span([*tokens, *tokens]) >= len(tokens)


def test_longest_repeated_span_by_hand():
    assert metrics.longest_repeated_span("the sea and the sky") == len("the s")
    assert metrics.longest_repeated_span("aaaa") == 3
    assert metrics.longest_repeated_span("abc") == metrics.longest_repeated_span("") == 0


@given(st.lists(st.integers(0, 1), max_size=30), st.integers(1, 5))
def test_repeated_tokens_are_those_of_repeated_ngrams(tokens, n):
    inside = set()
    for i in range(len(tokens) - n + 1):
        for j in range(len(tokens) - n + 1):
            if i != j and tokens[i : i + n] == tokens[j : j + n]:
                inside.update(range(i, i + n))
    assert [place for place, again in enumerate(metrics.repeated(tokens, n)) if again] == sorted(inside)
    share = metrics.repeated_share(tokens, n)
    if len(tokens) < n:
        assert share is None
    else:
        assert share == len(inside) / len(tokens)


def test_repetition_of_a_text_and_its_copy_is_whole_and_of_distinct_tokens_none():
    assert metrics.repeated_share(list(range(50)) * 2) == 1.0
    assert metrics.repeated_share(list(range(100))) == 0.0


def loop_by_brute_force(tokens: list[int], longest: int, shortest: int) -> int | None:
    """The first start of a run whose every token equals the one a period before, for two periods and ``shortest``."""
    for start in range(len(tokens)):
        for period in range(1, longest + 1):
            run = 0
            while start + period + run < len(tokens) and tokens[start + run] == tokens[start + period + run]:
                run += 1
            if run >= 2 * period and run + period >= shortest:
                return start
    return None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), min_size=1, max_size=9),
       st.integers(0, 12))  # fmt: skip
def test_loop_start_is_the_brute_force_one(before, block, times):
    tokens = before + block * times + [9]
    assert metrics.loop_start(tokens, 12) == loop_by_brute_force(tokens, 12, 32)


def test_loop_start_by_hand():
    story = list(range(100, 140))
    assert metrics.loop_start(story + [1, 2, 3, 4] * 8) == 40
    assert metrics.loop_start(story + [1, 2, 3, 4] * 7) is None
    assert metrics.loop_start(story * 3) == 0
    assert metrics.loop_start(story * 2) is None
    assert metrics.loop_start([]) is None
    assert metrics.loop_start([7] * 32, longest_period=1) == 0
    long_block = list(range(1025))
    assert metrics.loop_start(long_block[:-1] * 3) == 0 and metrics.loop_start(long_block * 3) is None


def test_compression_ratio_grows_with_repetition():
    rng = random.Random(0)
    noise = "".join(rng.choice("abcdefghijklmnop") for _ in range(4000))
    assert metrics.compression_ratio("the sea " * 500) > 50 > 3 > metrics.compression_ratio(noise) > 1
    assert metrics.compression_ratio(noise) == len(noise) / len(zlib.compress(noise.encode(), 9))
    assert metrics.compression_ratio("") is None


def tokens_of(data, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(data / "reference-model")(text)["input_ids"]


def plain_perplexity(model, token_ids: list[int], prompt: int = 1) -> float:
    """torchmetrics' own, over one pass without a cache; the first ``prompt`` tokens are not scored."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits
    return float(torchmetrics.text.Perplexity()(logits[:, prompt - 1 : -1], torch.tensor([token_ids[prompt:]])))


def test_perplexity_is_torchmetrics_of_one_plain_pass(data):
    model = decoder.load(str(data / "reference-model")).model
    ids = tokens_of(data, BOOKS["The Mill"])[:400]
    assert metrics.perplexity(model, ids) == pytest.approx(plain_perplexity(model, ids), rel=1e-5)
    after = metrics.perplexity(model, ids[300:], ids[:300])
    assert after == pytest.approx(plain_perplexity(model, ids, prompt=300), rel=1e-5)
    assert metrics.perplexity(model, ids[:1]) is None and metrics.perplexity(model, [], ids) is None
    # Modules that were in training mode are again, and no others.
    model.get_decoder().layers[0].train()
    before = {name: module.training for name, module in model.named_modules()}
    metrics.perplexity(model, ids[:20])
    assert {name: module.training for name, module in model.named_modules()} == before
    model.eval()
    # The fewest tokens that can be scored, a whole pass, and a last pass with one token.
    for length in (2, 257, 258):
        assert metrics.perplexity(model, ids[:length]) == pytest.approx(plain_perplexity(model, ids[:length]), rel=1e-5)
    metric = metrics.Perplexity(model)
    metric.update(ids)
    metric.update(ids[:1])
    assert metric.compute().item() == metrics.perplexity(model, ids)


def test_embeddings_are_the_mean_over_each_sentences_own_tokens(embedding_model):
    embed = metrics.SentenceEmbedder(str(embedding_model), batch_size=3)
    sentences = ["A lamp.", "The keeper climbed the stairs.", "Sea", "And so he looked upon the sea."]
    model = AutoModel.from_pretrained(embedding_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(embedding_model)
    for sentence, vector in zip(sentences, embed(sentences), strict=True):
        with torch.inference_mode():
            alone = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, alone, rtol=1e-4, atol=1e-5)


def test_semantic_diversity_is_the_mean_over_pairs():
    text = " ".join(f"word{i}" for i in range(60))
    vectors = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    pairs = [1 - torch.cosine_similarity(vectors[i], vectors[j], dim=0) for i in range(6) for j in range(6) if i != j]
    found = metrics.semantic_diversity(text, lambda sentences: vectors, segments=6)
    assert found == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-5)
    assert metrics.semantic_diversity(text, lambda s: torch.ones(6, 5), segments=6) == pytest.approx(0.0, abs=1e-12)
    assert metrics.semantic_diversity("too short", lambda s: vectors) is None
    # Fifty segments unless told otherwise, as Self-BLEU has.
    fifty = " ".join(map(str, range(50)))
    assert metrics.semantic_diversity(fifty, lambda s: torch.eye(50)[: len(s)]) == pytest.approx(1.0)
    assert metrics.semantic_diversity(fifty.removesuffix(" 49"), lambda s: torch.eye(50)[: len(s)]) is None
    apart = torch.eye(2)
    assert metrics.semantic_diversity("two parts", lambda s: apart, segments=2) == pytest.approx(1.0)
    metric = metrics.SemanticDiversity(lambda sentences: vectors, segments=6)
    metric.update(text)
    metric.update("short")
    assert metric.compute().item() == pytest.approx(found)


def test_rates_by_hand():
    assert metrics.acceptance_rate(6, 8) == 0.75
    assert metrics.ngram_acceptance_rate(2, 8) == 0.25
    assert metrics.tokens_per_step(9, 3) == 3.0
    assert metrics.acceptance_rate(0, 0) is None
    assert metrics.ngram_acceptance_rate(0, 0) is None
    assert metrics.tokens_per_step(0, 0) is None
    assert metrics.acceptance_rate(None, None) is None
    assert metrics.acceptance_by_depth([6, 3], 8) == [0.75, 0.375]
    assert metrics.acceptance_by_source({"heads": 6, "ngrams": 3}, 8) == {"heads": 0.75, "ngrams": 0.375}


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

    by_ngrams, by_depth = metrics.NgramAcceptanceRate(), metrics.AcceptanceByDepth(3)
    by_source = metrics.AcceptanceBySource(["heads", "ngrams"])
    for accepted, depths, steps in ((2, [2], 2), (1, [2, 1, 1], 4)):
        by_ngrams.update(accepted, 8)
        by_depth.update(depths, steps)
        by_source.update({"ngrams": accepted}, 8)
    assert by_ngrams.compute() == metrics.ngram_acceptance_rate(3, 16)
    assert by_depth.compute().tolist() == metrics.acceptance_by_depth([4, 1, 1], 6)
    assert by_source.compute() == {"heads": 0.0, "ngrams": 3 / 16}
    with pytest.raises(ValueError, match="4 depths"):
        by_depth.update([1, 1, 1, 1], 1)

    for metric, measure in (
        (metrics.LongestRepeatedSpan(), metrics.longest_repeated_span),
        (metrics.RepeatedShare(2), lambda text: metrics.repeated_share(text, 2)),
        (metrics.LoopStart(), metrics.loop_start),
        (metrics.CompressionRatio(), metrics.compression_ratio),
    ):
        for text in ("ab" * 20, "xyz" + "ab" * 20):
            metric.update(text)
        assert metric.compute().item() == pytest.approx((measure("ab" * 20) + measure("xyz" + "ab" * 20)) / 2)

    distinct = metrics.Distinct(2)
    for text in ("abab", "a", "abc"):
        distinct.update(text)
    assert distinct.compute().item() == pytest.approx((2 / 3 + 1) / 2)

    text = "the lamp upon the sea and the keeper climbed " * 4
    self_bleu = metrics.SelfBLEU(order=2, segments=4)
    self_bleu.update(text)
    self_bleu.update("short")
    assert self_bleu.compute().item() == pytest.approx(metrics.self_bleu(text, (2,), 4)["2"])


def test_classes_say_which_way_is_better():
    lower = {"SelfBLEU", "Perplexity", "LongestRepeatedSpan", "RepeatedShare", "CompressionRatio"}
    classes = [value for value in vars(metrics).values() if isinstance(value, type) and issubclass(value, Metric)]
    assert len(classes) > len(lower)
    for one in classes:
        assert one.higher_is_better is (one.__name__ not in lower), one.__name__


def test_command_measures_words_and_tokens_of_any_text(data, prompt_file, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    text = prompt_file.read_text()
    result = CliRunner().invoke(main, ["metrics", str(prompt_file), str(empty), "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert rows[str(prompt_file)] == {"words": len(text.split()), **metrics.measure_text(text)}
    assert rows[str(empty)]["distinct"]["1"] is None

    result = CliRunner().invoke(main, ["metrics", str(prompt_file), "--tokenizer", str(data / "reference-model")])
    assert result.exit_code == 0
    # The tiny tokenizer's tokens are bytes.
    assert f"{len(text):,}" in result.stdout
    assert f"{metrics.distinct_n(text, 2):.3f}" in result.stdout


def test_command_scores_a_text_with_models(data, prompt_file, embedding_model):
    prompt_file.write_text(prompt_file.read_text()[:400])
    model = str(data / "reference-model")
    arguments = ["metrics", str(prompt_file), "--model", model, "--embedding-model", str(embedding_model)]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)[str(prompt_file)]
    assert row["tokens"] == 400
    backbone = decoder.load(model).model
    assert row["perplexity"] == pytest.approx(plain_perplexity(backbone, tokens_of(data, prompt_file.read_text())))
    embed = metrics.SentenceEmbedder(str(embedding_model))
    assert row["semantic_diversity"] == metrics.semantic_diversity(prompt_file.read_text(), embed)
    shown = CliRunner().invoke(main, arguments).stdout
    assert "perplexity" in shown and "semantic" in shown


def test_command_leaves_the_perplexity_out_where_it_is_told_to(data, prompt_file, monkeypatch):
    prompt_file.write_text(prompt_file.read_text()[:400])
    # Nor are the model's weights loaded then.
    monkeypatch.setattr(decoder, "load", lambda *arguments: pytest.fail("loaded"))
    arguments = ["metrics", str(prompt_file), "--model", str(data / "reference-model"), "--no-perplexity"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)[str(prompt_file)]
    assert row["tokens"] == 400 and "perplexity" not in row
    assert "perplexity" not in CliRunner().invoke(main, arguments).stdout


def test_command_refuses_what_it_cannot_read(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for file in (binary, tmp_path / "missing.txt"):
        result = CliRunner().invoke(main, ["metrics", str(file)])
        assert result.exit_code == 2
        assert str(file) in result.stderr and result.stderr.count("\n") == 1
