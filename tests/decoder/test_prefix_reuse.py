"""Prefix reuse: what is prefilled gets less, and no text, and with bitwise no bit of it, becomes another."""

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.model.target import Target

from .conftest import random_heads, random_tokens, tiny_llama

PLENTY = 2**24
METHODS = ["ar", "tokenswift", "medusa", "magicdec", "triforce", "prompt-lookup", "auto"]


def decoders(dtype=torch.float64, **overrides):
    """A decoder that reuses, and one that does not, of equal models."""
    made = []
    for size in (PLENTY, 0):
        model = tiny_llama(dtype, **overrides)
        small = tiny_llama(dtype, seed=2, num_hidden_layers=1) if dtype == torch.float64 else None
        made.append(Decoder(model, heads=random_heads(model), draft_model=small, prefix_cache_bytes=size))
    return made


@pytest.fixture(scope="module")
def made():
    return decoders()


@pytest.fixture
def pair(made):
    reusing, fresh = made
    reusing.prefixes.clear()
    return reusing, fresh


@pytest.fixture
def prefilled(monkeypatch):
    """How many tokens each prefill of a target reads."""
    counts, prefill = [], Target.prefill

    def counted(target, tokens, *args):
        counts.append(len(tokens))
        return prefill(target, tokens, *args)

    monkeypatch.setattr(Target, "prefill", counted)
    return counts


def both(pair, prompt, new, method, seed=0, **asked):
    """The text of the decoder that reuses, after it was compared with the other one's."""
    sampling = SamplingParams(seed=seed, min_p=0.02, repetition_penalty=1.1, penalty_window=30)
    reusing = pair[0].generate(prompt, new, method, sampling, return_logprobs=True, **asked)
    fresh = pair[1].generate(prompt, new, "ar", sampling, return_logprobs=True)
    assert reusing.token_ids == fresh.token_ids
    assert fresh.stats.reused_tokens == 0
    if pair[0].bitwise:
        assert reusing.logprobs == fresh.logprobs
    else:
        assert reusing.logprobs == pytest.approx(fresh.logprobs, abs=1e-9)
    return reusing


@pytest.mark.parametrize("method", METHODS)
def test_the_turns_of_a_chat_prefill_what_is_new(pair, method, prefilled):
    prompt = random_tokens(40, 1)
    for turn in range(3):
        before = len(prompt)
        out = both(pair, prompt, 25, method, seed=turn)
        prompt = prompt + out.token_ids + random_tokens(12, 10 + turn)
        if turn:
            # All that the last turn had committed, but the pair that is computed again to be compared.
            assert out.stats.reused_tokens == before - 12 - 2
    if method not in ("triforce", "auto"):
        # The decoder that reuses and the other one in turns. With those two the draft model has prefills of its own.
        assert prefilled == [39, 39, 13, 76, 13, 113]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_bitwise_a_text_has_the_bits_of_a_fresh_one(dtype, with_native):
    pair = decoders(dtype, hidden_size=64)
    assert all(dec.bitwise for dec in pair)
    prompt = random_tokens(150, 1)
    for turn in range(3):
        out = both(pair, prompt, 40, "tokenswift", seed=turn)
        assert bool(out.stats.reused_tokens) == bool(turn)
        prompt = (prompt + out.token_ids)[: -7 if turn else None] + random_tokens(33, 10 + turn)


def test_a_shared_beginning_a_shorter_prompt_and_the_same_one_again(pair):
    system = random_tokens(50, 1)
    both(pair, system + random_tokens(20, 2), 10, "ar")
    assert both(pair, system + random_tokens(20, 3), 10, "ar").stats.reused_tokens in (49, 50)
    assert both(pair, system + random_tokens(20, 2), 30, "medusa").stats.reused_tokens == 68
    assert both(pair, system[:30], 30, "ar").stats.reused_tokens == 28
    assert both(pair, random_tokens(50, 9), 5, "ar").stats.reused_tokens == 0
    # Too short to be worth it.
    assert both(pair, system[:10] + random_tokens(30, 4), 5, "ar").stats.reused_tokens == 0


def test_a_drafter_that_reads_the_prompts_last_queries_still_gets_them(pair):
    options = TokenSwiftOptions(draft_cache="snapkv", budget=40, sink=16)
    prompt = random_tokens(200, 1)
    first = both(pair, prompt, 30, "magicdec", options=options)
    again = both(pair, prompt, 30, "magicdec", options=options)
    assert 0 < again.stats.reused_tokens < 199 and again.stats.accepted == first.stats.accepted


def test_batches_and_streams_take_part(pair):
    reusing, _ = pair
    system = random_tokens(60, 1)
    stream = reusing.stream(system + random_tokens(9, 2), 100, "ar")
    for _ in range(5):
        next(stream)
    # A stream that is closed leaves its text behind, too.
    stream.close()
    assert reusing.prefixes.nbytes
    prompts = [system + random_tokens(5 + index, 20 + index) for index in range(5)]
    outs, expected = (dec.generate_batch(prompts, 20, max_batch=2) for dec in pair)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert all(out.stats.reused_tokens >= 59 for out in outs)


def test_what_is_kept_is_bounded_and_the_least_recently_used_leaves(pair, model):
    reusing, _ = pair
    a_text = 40 * (reusing.target.kv_bytes + 4)
    dec = Decoder(model, prefix_cache_bytes=int(2.5 * a_text))
    prompts = [random_tokens(31, seed) for seed in range(3)]

    def reused(index):
        out = dec.generate(prompts[index], 10, "ar", SamplingParams(temperature=0))
        assert dec.prefixes.nbytes <= 2.5 * a_text
        return out.stats.reused_tokens

    assert [reused(0), reused(1)] == [0, 0]
    assert reused(0) and reused(1) and reused(0)
    assert not reused(2), "it was never there"
    # The second text was used least recently.
    assert reused(0) and reused(2) and not reused(1)
    # Of a text that is longer than all that may be kept, the beginning is.
    long = random_tokens(500, 9)
    assert dec.generate(long, 5, "ar").stats.reused_tokens == 0
    assert dec.generate(long, 5, "ar").stats.reused_tokens == 99
    assert 2.4 * a_text < dec.prefixes.nbytes <= 2.5 * a_text


CHANGES = {
    "written to": lambda model: model.model.layers[0].mlp.up_proj.weight.mul_(1.5),
    "unseen by PyTorch": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5),
    "another tensor": lambda model: setattr(
        model.model.layers[1].self_attn.k_proj, "weight", torch.nn.Parameter(torch.randn(16, 32, dtype=torch.float64))
    ),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.01),
    "another dtype": lambda model: model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_forgets(change):
    made = [Decoder(tiny_llama(), prefix_cache_bytes=size) for size in (PLENTY, 0)]
    prompt = random_tokens(60, 1)
    both(made, prompt, 10, "ar")
    with torch.no_grad():
        for dec in made:
            torch.manual_seed(3)
            CHANGES[change](dec.model)
    outs = [dec.generate(prompt, 40, "ar", SamplingParams(seed=1)) for dec in made]
    assert outs[0].token_ids == outs[1].token_ids and outs[0].stats.reused_tokens == 0
    again = made[0].generate(prompt, 40, "ar", SamplingParams(seed=1))
    assert again.token_ids == outs[0].token_ids and again.stats.reused_tokens == 58


@pytest.mark.parametrize("method", ["ar", "suffix"])
def test_a_text_during_which_the_model_changed_is_not_kept(method):
    """Its first pairs are of the old weights, its last ones of the new; no pair that is compared would show that."""
    made = [Decoder(tiny_llama(), prefix_cache_bytes=size) for size in (PLENTY, 0)]
    prompt = random_tokens(60, 1)
    stream = made[0].stream(prompt, 30, method)
    chunks = [next(stream) for _ in range(5)]
    with torch.no_grad():
        for dec in made:
            CHANGES["written to"](dec.model)
    # A text that begins with the new weights, while the other one still runs, is kept.
    other = random_tokens(40, 2)
    both(made, other, 5, "ar")
    chunks += stream
    assert len([token for chunk in chunks for token in chunk.token_ids]) == 30
    longer = prompt + [token for chunk in chunks for token in chunk.token_ids][:25]
    assert both(made, longer, 10, "ar").stats.reused_tokens == 0
    assert both(made, other, 5, "ar").stats.reused_tokens == 38


def test_a_text_that_failed_is_not_kept(pair):
    def failing(context, logits):
        if len(context) > 50:
            raise RuntimeError("no rule")
        return logits

    with pytest.raises(RuntimeError, match="no rule"):
        pair[0].generate(random_tokens(40, 1), 30, "ar", logits_hook=failing)
    assert pair[0].prefixes.nbytes == 0


@pytest.mark.parametrize("size", [-1, 1.5, True, "1GB"])
def test_sizes_that_are_none_end_in_a_sentence(model, size):
    with pytest.raises(ValueError, match="prefix_cache_bytes must be an integer of at least 0"):
        Decoder(model, prefix_cache_bytes=size)
