"""What data/ promises: it loads offline, fits together, stays small, and decodes losslessly."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import decoder
from decoder import SamplingParams, TokenSwiftOptions

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"
HEADS = {kind: DATA / f"heads-{kind}" for kind in ("chained", "independent", "conditioned", "gated")}


def books(split):
    with gzip.open(DATA / "pg19" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def prompt_text():
    return books("test")[0]["text"][:3000]


def test_splits_have_pg19s_fields_and_share_no_book():
    splits = {split: books(split) for split in ("train", "validation", "test")}
    for found in splits.values():
        assert all(set(book) == {"short_book_title", "publication_date", "url", "text"} for book in found)
    urls = [book["url"] for found in splits.values() for book in found]
    assert len(urls) == len(set(urls)) == 36
    assert sum(path.stat().st_size for path in (DATA / "pg19").glob("*.gz")) < 10e6


def test_reference_model_is_what_the_readme_says():
    model = AutoModelForCausalLM.from_pretrained(DATA / "reference-model", dtype="auto")
    config = model.config
    assert model.dtype == torch.bfloat16
    assert 5e6 < model.num_parameters() < 12e6
    assert config.model_type == "llama" and config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 131_072
    assert config.rope_parameters["rope_theta"] == 500_000
    weights = [path.stat().st_size for path in (DATA / "reference-model").glob("*.safetensors")]
    assert sum(weights) < 24e6 and max(weights) < 15e6


def test_draft_model_speaks_the_same_tokens():
    model = AutoModelForCausalLM.from_pretrained(DATA / "draft-model")
    assert 0.5e6 < model.num_parameters() < 1.5e6
    tokenizers = [AutoTokenizer.from_pretrained(DATA / name) for name in ("reference-model", "draft-model")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert len(tokenizers[0]) == model.config.vocab_size == 4096


def test_tokenizer_gives_any_text_back(prompt_text):
    tokenizer = AutoTokenizer.from_pretrained(DATA / "reference-model")
    for text in (prompt_text, "  tabs\t and\r\nodd \u2014 b\u00fctes \U0001f40b\n\n\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.fixture(scope="module")
def reference():
    """The reference model with heads of all kinds."""
    return decoder.load(DATA / "reference-model", HEADS, dtype="float32")


def with_heads(reference, heads):
    return decoder.Decoder(reference.model, reference.tokenizer, heads)


@pytest.fixture(scope="module", params=[1.0, 0.0], ids=["sampled", "greedy"])
def plain(request, reference, prompt_text):
    """Plain decoding at one temperature."""
    sampling = SamplingParams(temperature=request.param, min_p=0.1, repetition_penalty=1.2, seed=11)
    return sampling, reference.generate(prompt_text, 80, "ar", sampling, ignore_eos=True)


@pytest.mark.parametrize("kind", HEADS)
def test_the_reference_model_decodes_losslessly_in_float32(reference, kind, plain, prompt_text):
    sampling, expected = plain
    dec = with_heads(reference, reference.heads[kind])
    assert list(dec.heads) == [kind] and dec.model.dtype == torch.float32
    options = TokenSwiftOptions(tree=(1, 2, 1, 1), ngrams=2, budget=128)
    drafted = dec.generate(prompt_text, 80, "tokenswift", sampling, options, ignore_eos=True)
    assert drafted.token_ids == expected.token_ids
    assert drafted.stats.tokens_per_step > 2


def test_trained_heads_predict_better_than_untrained_ones(reference, prompt_text):
    """Drafts two tokens ahead without n-grams; untrained heads repeat the model's guess for the next token."""
    untrained = decoder.DraftHeads(reference.model.config.hidden_size)
    untrained.init_from_norm(reference.target.norm.weight)
    options = TokenSwiftOptions(tree=(1, 3, 1, 1), ngrams=0)
    accepted = []
    for heads in (reference.heads["chained"], untrained):
        dec = with_heads(reference, heads)
        sampling = SamplingParams(min_p=0.1, repetition_penalty=1.2, seed=3)
        stats = dec.generate(prompt_text, 200, "tokenswift", sampling, options, ignore_eos=True).stats
        accepted.append(stats.accepted_by_depth[1] / stats.steps)
    assert accepted[0] > accepted[1] + 0.1


def test_better_kinds_of_heads_give_more_tokens_per_step(reference, prompt_text):
    """Fused drafting, where the heads alone decide: gated above conditioned above chained."""
    options = TokenSwiftOptions(tree=(1, 1, 1))
    per_step = []
    for kind in ("chained", "conditioned", "gated"):
        one = with_heads(reference, reference.heads[kind])
        sampling = SamplingParams(min_p=0.1, repetition_penalty=1.2, seed=3)
        out = one.generate(prompt_text, 200, "tokenswift-fused", sampling, options, ignore_eos=True)
        per_step.append(out.stats.tokens_per_step)
    assert per_step[0] + 0.1 < per_step[1] < per_step[2] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, temperature", [("tokenswift", 1.0), ("tokenswift", 0.0), ("auto", 1.0), ("auto", 0.0), ("medusa", 0.7)]
)
def test_ten_thousand_tokens_stay_identical(method, temperature, prompt_text):
    """Past many rebuilds of the partial cache and far past the penalty window; or the audit shows a tie."""
    dec = decoder.load(DATA / "reference-model", HEADS)
    sampling = SamplingParams(temperature=temperature, min_p=0.1, repetition_penalty=1.2, seed=5)
    expected = dec.generate(prompt_text, 10_000, "ar", sampling, ignore_eos=True)
    drafted = dec.generate(prompt_text, 10_000, method, sampling, ignore_eos=True)
    if drafted.token_ids != expected.token_ids:
        reports = [decoder.audit(out) for out in (expected, drafted)]
        assert all(report.equal or report.margin < 1e-4 for report in reports)
    assert len(drafted.token_ids) == 10_000
    assert method != "tokenswift" or drafted.stats.cache_rebuilds > 5
