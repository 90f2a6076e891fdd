"""Compressed keys in the native library: attended to as they are kept, equal to transformers' model, and lossless."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.base import Chain, PassBatch
from decoder.backends.native import library as native
from decoder.backends.native.backend import NATIVE
from decoder.backends.native.compressed import PackedExpansion, _ByHead
from decoder.cache.full import FullCache

from .conftest import random_heads, random_tokens, transformers_text
from .recurrent_models import LATENTS
from .test_families import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native library")
MODELS = {
    "deepseek_v2, 32": ("deepseek_v2", {}, torch.float32),
    "deepseek_v3, 16": ("deepseek_v3", {}, torch.bfloat16),
    "glm4_moe_lite, 32": ("glm4_moe_lite", {"q_lora_rank": 12}, torch.float32),
}
SAMPLED = SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, penalty_window=16)
NARROW = TokenSwiftOptions(tree=(1, 2, 1), ngrams=3, budget=24, sink=4)


def made(name):
    family, more, dtype = MODELS[name]
    model_type, own = LATENTS[family]
    return tiny(model_type, dtype, **{**own, **more})


@pytest.fixture(scope="module", params=MODELS)
def dec(request):
    if not native.multiplies(MODELS[request.param][2]):
        pytest.skip("the library does not multiply this dtype here")
    model = made(request.param)
    return Decoder(model, heads=random_heads(model), prefix_cache_bytes=1 << 22)


def test_the_library_runs_them_bit_for_bit(dec):
    assert dec.target.backend.name == NATIVE and dec.bitwise and dec.target.flattens
    attention = dec.model.model.layers[0].self_attn
    assert isinstance(dec.target.backend._forwards[attention].__self__, PackedExpansion)
    assert "expand_kv" not in vars(attention), "it is the model's own outside of passes"


@pytest.mark.parametrize("method", ["tokenswift", "auto", "magicdec", "suffix"])
def test_every_method_equals_ar(dec, method):
    prompts = [random_tokens(40, 3), [5], random_tokens(7, 4)]
    single = [dec.generate(prompt, 16, "ar", SAMPLED).token_ids for prompt in prompts]
    found = [dec.generate(prompt, 16, method, SAMPLED, NARROW).token_ids for prompt in prompts]
    assert found == single
    assert [output.token_ids for output in dec.generate_batch(prompts, 16, method, SAMPLED, NARROW)] == single


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantised_cache_keeps_the_rule(dec, kv_dtype):
    plain, narrow = (TokenSwiftOptions(**one, kv_dtype=kv_dtype) for one in ({}, dict(tree=(1, 2, 1))))
    prompt = random_tokens(30, 5)
    expected = dec.generate(prompt, 16, "ar", SAMPLED, plain).token_ids
    assert dec.generate(prompt, 16, "tokenswift-fused", SAMPLED, narrow).token_ids == expected


@torch.no_grad()
def test_logits_are_those_of_transformers_over_several_splits(dec):
    """Keys are read where they are kept, without a copy, also when the cache has grown."""
    ids, cache = random_tokens(600, 6), FullCache(64, growable=True)
    found, seen = [], []
    entries = PackedExpansion.entries

    def spied(packed, key, value):
        rows, parts = entries(packed, key, value)
        seen.append(rows.data_ptr() == key.data_ptr() == parts.data_ptr())
        return rows, parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedExpansion, "entries", spied)
        for start, end in ((0, 300), (300, 301), (301, 600)):
            found.append(dec.target.backend.run(PassBatch([Chain(ids[start:end], start, cache)], True)).logits.clone())
            cache.keep(range(end - start))
    assert all(seen) and len(seen) == 3 * len(dec.model.model.layers)
    expected = deepcopy(dec.model).double()(torch.tensor([ids])).logits[0]
    worst = (torch.cat(found) - expected).abs().amax(-1) / expected.std()
    # In bf16 rounding can make a router choose another expert.
    assert worst.median() < (0.15 if dec.target.dtype == torch.bfloat16 else 1e-4)


def test_changed_weights_are_taken_in(dec):
    prompt, layer = random_tokens(20, 7), dec.model.model.layers[0].self_attn.kv_b_proj
    before, weight = dec.generate(prompt, 12, "ar", SAMPLED).token_ids, layer.weight.data.clone()
    try:
        layer.weight.data.mul_(-1)
        changed = dec.generate(prompt, 12, "ar", SAMPLED).token_ids
        assert changed == Decoder(deepcopy(dec.model)).generate(prompt, 12, "ar", SAMPLED).token_ids != before
    finally:
        layer.weight.data.copy_(weight)
    assert dec.generate(prompt, 12, "ar", SAMPLED).token_ids == before


def test_a_matrix_that_the_library_does_not_take_is_left_to_the_model():
    """Keys and values are made as the model makes them."""

    class Own(nn.Linear):
        pass

    model = made("glm4_moe_lite, 32")
    expected = transformers_text(model, random_tokens(30, 8), 12)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Own
    dec, seen = Decoder(model), []
    assert not dec.bitwise and "kv_b_proj (Own)" in dec.report()
    greedy = SamplingParams(temperature=0)
    assert dec.generate(random_tokens(30, 8), 12, "ar", greedy).token_ids == expected
    hooked = made("glm4_moe_lite, 32")
    hooked.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *given: seen.append(len(given)))
    dec, before = Decoder(hooked), len(seen)
    assert dec.generate(random_tokens(30, 8), 12, "ar", greedy).token_ids == expected and len(seen) > before + 11


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_routers_of_deepseek_v2(method):
    """One that chooses groups first is left to the model."""
    model_type, own = LATENTS["deepseek_v2"]
    grouped = dict(n_group=2, topk_group=1) if method != "greedy" else dict(n_group=None, topk_group=None)
    model = tiny(model_type, torch.float32, **{**own, **grouped, "topk_method": method, "routed_scaling_factor": 2.5})
    dec, prompt = Decoder(model), random_tokens(30, 9)
    assert dec.bitwise == (method == "greedy")
    assert dec.generate(prompt, 12, "ar", SamplingParams(temperature=0)).token_ids == transformers_text(
        model, prompt, 12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(1, 3, 5), (5, 24, 70), (16, 128, 512)])
def test_products_by_head(heads, inputs, outputs, dtype):
    """Right, and each row alone."""
    torch.manual_seed(0)
    weights, x = torch.randn(heads, outputs, inputs).to(dtype), torch.randn(heads, 23, inputs).to(dtype)
    product = _ByHead.of(weights)
    found = product(x)
    expected = x.double() @ weights.double().mT
    assert torch.allclose(found.double(), expected, atol=0.2 if found.dtype == torch.bfloat16 else 1e-3)
    for first, last in ((0, 1), (22, 23), (3, 11)):
        assert torch.equal(product(x[:, first:last]), found[:, first:last])
