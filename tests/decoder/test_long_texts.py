"""Windows, states, compressed keys and experts over 600 tokens: all methods give the text of plain decoding."""

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.sequence import Sequence

from .conftest import all_heads, random_heads, random_tokens, transformers_text
from .recurrent_models import ALL
from .test_families import ROUTED, tiny
from .test_windows import FAMILIES as WINDOWED

FAMILIES = {**WINDOWED, **ALL, "glm4_moe": ("glm4_moe", dict(ROUTED, head_dim=8))}
UNREADABLE = ("gemma3n_text", "longcat_flash")  # layers hand on more than a hidden state, or are counted in another way
LENGTH, SAMPLED_LENGTH = 600, 150
PENALTY = 2.0  # less leaves texts of one token
GREEDY = SamplingParams(temperature=0, repetition_penalty=PENALTY, penalty_window=2 * LENGTH)
SAMPLED = SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, penalty_window=16)
# With budgets of fewer tokens than the texts have.
TREES = [
    TokenSwiftOptions(tree=(2, 2, 1), ngrams=2, budget=64, sink=4),
    TokenSwiftOptions(tree=(1, 1, 1, 1, 1, 1), ngrams=0, budget=64, sink=4),
    TokenSwiftOptions(budget=64, sink=4),
]

pytestmark = pytest.mark.slow


def drafting(dec):
    """The methods that can draft with it; EAGLE-3 heads cannot read the layers of some."""
    return [method for method in methods() if method not in ("ar", *({"eagle3"} - dec.heads.keys()))]


def heads_of(model):
    return {"chained": random_heads(model)} if model.config.model_type in UNREADABLE else all_heads(model)


def made(name, positions=1024):
    model_type, overrides = FAMILIES[name]
    model = tiny(model_type, **{**overrides, "max_position_embeddings": positions})
    model.set_attn_implementation("eager")  # others may leave out caps
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def dec(name):
    """Its draft model is another one of the family."""
    model, small = made(name), made(name)
    for parameter in small.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return Decoder(model, heads=heads_of(model), draft_model=small)


@pytest.fixture(scope="module")
def sampled(dec):
    """Plain decoding's text."""
    return dec.generate(random_tokens(30, 2), LENGTH, "ar", SAMPLED).token_ids


def test_greedy_texts_of_all_methods_are_transformers_own(dec):
    prompt = random_tokens(30, 2)
    expected = transformers_text(dec.model, prompt, LENGTH, repetition_penalty=PENALTY)
    assert len(set(expected)) > 20
    for number, method in enumerate(["ar", *drafting(dec)]):
        out = dec.generate(prompt, LENGTH, method, GREEDY, TREES[number % 2])
        assert (method, out.token_ids) == (method, expected)


def test_sampled_texts_of_all_methods_and_trees_are_plain_decodings(dec, sampled):
    for method in drafting(dec):
        for options in TREES:
            out = dec.generate(random_tokens(30, 2), SAMPLED_LENGTH, method, SAMPLED, options)
            assert (method, options, out.token_ids) == (method, options, sampled[:SAMPLED_LENGTH])


def test_texts_together_are_those_alone(dec, sampled):
    prompts, params = [random_tokens(9, 4), random_tokens(30, 2), random_tokens(70, 5)], [SAMPLED, SAMPLED, GREEDY]
    lengths = [150, LENGTH // 2, 200]
    alone = [dec.generate(*given).token_ids for given in zip(prompts, lengths, ["ar"] * 3, params, strict=True)]
    assert alone[1] == sampled[: LENGTH // 2]
    for method in ("tokenswift", "magicdec", "auto"):
        together = dec.generate_batch(prompts, LENGTH // 2, method, params, TREES[0])
        assert [out.token_ids[: len(text)] for out, text in zip(together, alone, strict=True)] == alone


def test_resumed_texts_and_reused_beginnings_are_fresh_ones(dec, sampled):
    """A text may end behind any pass, so that what is kept of it is a state behind any of its tokens."""
    reusing, prompt = Decoder(dec.model, heads=dec.heads, prefix_cache_bytes=2**26), random_tokens(30, 2)
    for cut, method in zip((0, 87, 200, 333, 450), ("ar", "tokenswift", "medusa", "auto", "suffix"), strict=True):
        # The penalty's window reaches behind the prompt.
        given = prompt + sampled[:cut], min(150, LENGTH - cut)
        expected = sampled[cut : cut + 150]
        if dec.target.has_two_forms:
            # What the text has added to its prompt is another text's prompt, and computed otherwise there.
            expected = dec.generate(*given, "ar", SAMPLED).token_ids
        out = reusing.generate(*given, method, SAMPLED, TREES[0])
        assert out.token_ids == expected, (cut, method)
    for other in (
        prompt + sampled[:300] + random_tokens(9, 6),
        prompt[:20] + random_tokens(20, 7),
        prompt + sampled[:40],
    ):
        expected = dec.generate(other, 40, "ar", SAMPLED).token_ids
        assert reusing.generate(other, 40, "tokenswift", SAMPLED, TREES[0]).token_ids == expected


def test_preempted_texts_go_on_as_if_they_had_not_been(name, monkeypatch):
    """There is room for two of three texts at their end, so that one is read again from its beginning."""
    positions, found, preempt = 320, [], Sequence.preempt
    model = made(name, positions)
    dec, texts = Decoder(model, heads=heads_of(model)), [random_tokens(count, count) for count in (20, 24, 28)]
    params = [SamplingParams(seed=seed) for seed in range(3)]
    whole = [dec.generate(*text, "ar", own).token_ids for *text, own in zip(texts, (None,) * 3, params, strict=True)]
    monkeypatch.setattr(Sequence, "preempt", lambda sequence: (found.append(sequence), preempt(sequence)))
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    room = (dec.target.kv_bytes * (2 * (positions + 64) + 10) + 3 * dec.target.beside_bytes(positions)) / 0.6
    monkeypatch.setattr("decoder.admission.available_memory", lambda device: room)
    outs = dec.generate_batch(texts, None, "medusa", params, TREES[0])
    assert [out.token_ids for out in outs] == whole
    if dec.target.kv_bytes:  # a model that keeps windows and states alone has room for all texts, however long
        assert found
