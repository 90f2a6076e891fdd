"""Whole models with weights of four or eight bits: every text is plain decoding's, and little else has changed."""

import copy

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.backends.native import library as native
from decoder.backends.native.mxint8 import mxint8_holds
from decoder.model.short_weights import INT8, SHORT, make_short

from .conftest import VOCAB, all_heads, tiny_llama

SHAPE = dict(hidden_size=64, intermediate_size=128)
SAMPLINGS = [
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20),
    SamplingParams(temperature=0),
]
AROUND = [torch.float32, torch.bfloat16]


def short(dtype, around, seed=0, **overrides):
    model = tiny_llama(torch.float32, seed, **SHAPE | overrides)
    make_short(model, dtype, around)
    return model


@pytest.fixture(scope="module", params=[(dtype, around) for dtype in SHORT for around in AROUND], ids=str)
def exact(request):
    dtype, around = request.param
    if not native.available():
        pytest.skip("there is no C compiler here")
    if around == torch.bfloat16 and not native.multiplies(torch.bfloat16):
        pytest.skip("the processor does not multiply bfloat16")
    model = short(dtype, around)
    small = tiny_llama(around, seed=2, num_hidden_layers=1)
    dec = Decoder(model, heads=all_heads(model), draft_model=small, bitwise=True)
    assert not native.available() or "passes in one call" in dec.report()
    return dec


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("params", SAMPLINGS, ids=["sampled", "greedy"])
@pytest.mark.parametrize("method", [method for method in methods() if method != "ar"])
def test_every_method_gives_the_text_and_the_bits_of_plain_decoding(exact, prompt, method, params):
    options = TokenSwiftOptions(tree=(1, 2, 2), ngrams=3, budget=20)
    given = dict(sampling=params, ignore_eos=True, return_logprobs=True)
    plain = exact.generate(prompt, 50, "ar", **given)
    drafted = exact.generate(prompt, 50, method, options=options, **given)
    assert drafted.token_ids == plain.token_ids and drafted.logprobs == plain.logprobs
    # And with the text so far as the prompt.
    resumed = exact.generate(prompt + plain.token_ids[:20], 30, method, options=options, **given)
    assert resumed.token_ids == plain.token_ids[20:] and resumed.logprobs == plain.logprobs[20:]


def test_texts_in_one_pass_are_each_what_they_are_alone(exact, prompt):
    prompts = [prompt, prompt[:7], prompt[5:31]]
    together = exact.generate_batch(prompts, 30, "auto", sampling=SAMPLINGS[0], ignore_eos=True)
    alone = [exact.generate(one, 30, "ar", sampling=SAMPLINGS[0], ignore_eos=True) for one in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_plain_decoding_is_what_transformers_generates_with_the_same_layers_but_for_ties(exact, prompt):
    own = exact.generate(prompt, 40, "ar", sampling=SamplingParams(temperature=0), ignore_eos=True).token_ids
    with torch.inference_mode():
        logits = exact.model(torch.tensor([prompt + own])).logits[0, 49:-1].float()
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(own)[:, None])[:, 0]
    assert (behind <= 2**-6 * logits.abs().max()).all()
    assert (behind == 0).float().mean() > 0.9


@pytest.mark.skipif(not native.available(), reason="no native library")
def test_held_in_bytes_or_not_the_text_is_the_same(prompt, monkeypatch):
    dtype = torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32
    given = dict(sampling=SAMPLINGS[0], ignore_eos=True, return_logprobs=True)
    model = short(INT8, dtype)
    in_bytes = Decoder(model, bitwise=True)
    fast = in_bytes.generate(prompt, 60, "ar", **given)
    monkeypatch.setattr("decoder.backends.native.packed_weight.mxint8_holds", lambda weight: False)
    plain = Decoder(copy.deepcopy(model), bitwise=True)
    assert "MXInt8" in in_bytes.report() and "MXInt8" not in plain.report()
    slow = plain.generate(prompt, 60, "ar", **given)
    assert slow.token_ids == fast.token_ids and slow.logprobs == fast.logprobs


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("dtype", SHORT)
def test_no_rounding_moves_a_position(dtype, around):
    """The rotary embedding's frequencies keep their digits, without which far positions run together."""
    model = short(dtype, around)
    expected = tiny_llama(torch.float32, **SHAPE).model.rotary_emb.inv_freq
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("dtype", SHORT)
def test_a_tied_head_stays_tied(dtype):
    model = short(dtype, torch.bfloat16, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight and mxint8_holds(model.lm_head.weight)
