"""Weights of four bits: what is rounded, that products are those of the rounded weights, and that texts are `ar`'s."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import decoder
from decoder import Decoder, SamplingParams
from decoder.auditing import rounding
from decoder.backends.native import library as native
from decoder.backends.native.int4 import GROUP, Int4Linear, NativeInt4Weight, rounded
from decoder.backends.native.mxint8 import mxint8_holds, rounded_to_mxint8
from decoder.model.short_weights import INT4, dtype_name, make_short

from .conftest import VOCAB, random_heads, tiny_llama
from .test_using_it import byte_tokenizer

gguf = pytest.importorskip("gguf")
SHAPE = dict(hidden_size=64, intermediate_size=128)
SAMPLINGS = [
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20),
    SamplingParams(temperature=0),
]


def restored(codes, scales):
    """The weights [out, in] in float64."""
    step, centre = scales.double().view(len(scales), -1, 2).permute(2, 1, 0).repeat_interleave(GROUP, 2)
    return codes.double() * step + centre


def linear(inputs, outputs, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias)


def short(seed=0, around=torch.float32, **overrides):
    model = tiny_llama(torch.float32, seed, **SHAPE | overrides)
    make_short(model, INT4, around)
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (64, 48), (576, 64), (1536, 576)])
def test_a_product_is_that_of_the_rounded_weights(inputs, outputs, bias):
    layer = linear(inputs, outputs, bias)
    x = torch.randn(9, inputs)
    expected = x.double() @ restored(*rounded(layer.weight.detach())).T
    short = Int4Linear.of(layer)
    if bias:
        expected += layer.bias.double()
    assert ((short(x) - expected).abs() <= 1e-5 * expected.abs().max()).all()
    assert short(x.bfloat16()).dtype == torch.bfloat16
    if native.available():
        faster = NativeInt4Weight([short])
        assert torch.equal(faster(x.to(faster.dtype))[:2], faster(x[:2].to(faster.dtype)))
        exact = 2**-8 if faster.dtype == torch.bfloat16 else 1e-5
        assert ((faster(x.to(faster.dtype)) - expected).abs() <= exact * expected.abs().max()).all()


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (96, 40), (576, 70), (2048, 33)])
def test_the_native_product_of_a_row_is_the_same_beside_any_others(inputs, outputs):
    torch.manual_seed(3)
    layers = [
        Int4Linear(
            torch.randint(256, (count, inputs // 2), dtype=torch.uint8),
            torch.randn(inputs // GROUP, 2 * count).bfloat16(),
            torch.randn(count),
        )
        for count in (outputs, 17)
    ]
    product = NativeInt4Weight(layers)
    x = torch.randn(131, inputs).to(product.dtype)
    whole = product(x)
    codes = torch.cat([torch.stack((one.weight & 15, one.weight >> 4), -1).flatten(1) for one in layers]).int() - 8
    weights = restored(codes, torch.cat([one.scales for one in layers], 1))
    expected = x.double() @ weights.T + torch.cat([one.bias for one in layers]).double()
    exact = 2**-8 if product.dtype == torch.bfloat16 else 1e-5
    assert ((whole - expected).abs() <= exact * expected.abs().max()).all()
    for rows in (*range(1, 31), 56, 57, 113):
        assert torch.equal(product(x[:rows]), whole[:rows]), rows
        assert torch.equal(product(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0"])
def test_weights_that_are_on_a_grid_of_four_bits_keep_their_codes(kind):
    torch.manual_seed(1)
    kind = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quantize(torch.randn(48, 96).numpy(), kind)
    stored = torch.from_numpy(gguf.dequantize(blocks, kind))
    # A block: the step, in Q4_1 the least weight, then the codes 0 to 15 of 16 weights and of the other 16.
    raw = torch.from_numpy(blocks).view(48 * 3, -1)
    steps = raw[:, :2].contiguous().view(torch.half)
    raw = raw[:, -GROUP // 2 :]
    # Where Q4_0 has a negative step, its codes come in the other order.
    own = torch.where(steps > 0, 1, -1) * (torch.cat((raw & 15, raw >> 4), 1).int() - 8)
    codes, scales = rounded(stored)
    shift = codes.view(-1, GROUP) - own
    assert (shift == shift[:, :1]).all() and set(shift[:, 0].tolist()) <= {-1, 0}
    # Only step and centre are rounded, to the eight bits of bfloat16.
    assert (restored(codes, scales) - stored).norm() < 2**-7 * stored.norm()


def test_the_error_of_a_group_is_at_most_that_of_its_whole_range():
    torch.manual_seed(2)
    weight = torch.randn(64, 320)
    weight[:, 3] *= 6  # a weight that is far from the others in its group
    codes, scales = rounded(weight)
    error = (restored(codes, scales) - weight).view(-1, GROUP).square().sum(1)
    groups = weight.view(-1, GROUP).double()
    low, high = groups.aminmax(dim=1, keepdim=True)
    whole = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low - groups
    assert codes.min() == -8 and codes.max() == 7
    # The whole range is tried with step and centre in bfloat16, which adds a little.
    assert (error <= 1.1 * whole.square().sum(1)).all()
    assert error.sum() < 0.95 * whole.square().sum()


@pytest.mark.parametrize("value", [0.0, -0.375])
def test_a_group_of_equal_weights_is_exact(value):
    weight = torch.full((16, 64), value)
    weight[3, :GROUP] = torch.linspace(-1, 1, GROUP)
    codes, scales = rounded(weight)
    same = torch.ones(16, 64, dtype=torch.bool)
    same[3, :GROUP] = False
    assert torch.equal(restored(codes, scales)[same], weight.double()[same])


def test_a_rounded_model_is_small_and_all_but_its_layers_is_as_it_was():
    plain, model = tiny_llama(torch.bfloat16, **SHAPE), tiny_llama(torch.bfloat16, **SHAPE)
    make_short(model, INT4, torch.float32)
    assert dtype_name(model) == "int4" and dtype_name(plain) == "bfloat16"
    assert model.dtype == model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, rounded_to_mxint8(plain.lm_head.weight, torch.float32))
    assert mxint8_holds(model.lm_head.weight) and not mxint8_holds(plain.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight.float())
    layers = [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert len(layers) == 14 and not any(isinstance(module, nn.Linear) for module in model.model.modules())
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    assert sum(one.nbytes for layer in layers for one in layer.parameters()) == numbers * 5 // 8
    for short, layer in zip(layers, [one for one in plain.model.modules() if isinstance(one, nn.Linear)], strict=True):
        x = torch.randn(3, layer.in_features)
        wide = layer.float()(x)
        assert (short(x) - wide).norm() < 0.12 * wide.norm()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(4)).tolist()


def test_a_model_that_is_cast_keeps_its_scales(prompt):
    model = short(num_key_value_heads=4)
    given = dict(sampling=SAMPLINGS[0], ignore_eos=True)
    before = Decoder(model).generate(prompt, 20, "ar", **given).token_ids
    scales = model.model.layers[0].mlp.up_proj.scales.clone()
    model.double().float()
    assert Decoder(model).generate(prompt, 20, "ar", **given).token_ids == before
    assert torch.equal(model.model.layers[0].mlp.up_proj.scales, scales.float())


def test_other_weights_are_packed_anew(prompt):
    model = short(num_key_value_heads=4)
    given = dict(sampling=SamplingParams(temperature=0), ignore_eos=True)
    dec = Decoder(model)
    before = dec.generate(prompt, 20, "ar", **given).token_ids
    model.load_state_dict(short(seed=9, num_key_value_heads=4).state_dict())
    assert dec.generate(prompt, 20, "ar", **given).token_ids != before
    assert (
        dec.generate(prompt, 20, "ar", **given).token_ids
        == Decoder(model).generate(prompt, 20, "ar", **given).token_ids
    )


def test_loading(tmp_path):
    model = tiny_llama(torch.bfloat16, **SHAPE)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    random_heads(model).to(torch.float32).save_pretrained(tmp_path / "heads")
    small = tiny_llama(torch.bfloat16, num_hidden_layers=1, hidden_size=32)
    small.save_pretrained(tmp_path / "small")
    dec = decoder.load(tmp_path / "model", tmp_path / "heads", draft_model=tmp_path / "small", dtype="int4")
    assert "in int4" in dec.report() and dec.bitwise == native.available()
    around = torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32
    assert dec.model.dtype == dec.draft_model.dtype == around and type(dec.draft_model) is LlamaForCausalLM
    make_short(model, INT4, dec.model.dtype)
    for name, one in model.state_dict().items():
        assert torch.equal(one, dec.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="one process on a CPU"):
        decoder.load(tmp_path / "model", dtype="int4", tensor_parallel=True)
    with pytest.raises(ValueError, match=r"use one of .*int4, int8"):
        decoder.load(tmp_path / "model", dtype="int5")


def test_what_four_bits_cannot_hold_is_named_and_left_as_it_was():
    narrow = tiny_llama(torch.float32, intermediate_size=48)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj\.weight \(Linear, 32x48\) cannot be held"):
        make_short(narrow, INT4, torch.float32)
    assert all(one.dtype == torch.float32 for one in narrow.parameters())
    older = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn\.weight \(Conv1D, 32x96\) cannot be held"):
        make_short(older, INT4, torch.float32)
    with pytest.raises(ValueError, match="int4 already"):
        make_short(short(), INT4, torch.float32)


def test_what_four_bits_cannot_hold_is_refused_before_weights_are_read(tmp_path):
    tiny_llama(torch.float32, intermediate_size=48).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"down_proj\.weight \(Linear, 32x48\) cannot be held in four bits"):
        decoder.load(tmp_path, dtype="int4")


def test_a_model_with_an_adapter_is_refused():
    peft = pytest.importorskip("peft")
    model = tiny_llama(torch.float32, **SHAPE)
    peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj has an adapter.*merge it"):
        make_short(model, INT4, torch.float32)


def test_an_audit_allows_for_products_that_are_rounded_to_bfloat16(prompt):
    model = short()
    dec = Decoder(model)
    logits = model(torch.tensor([prompt])).logits[0, -16:].detach()
    assert rounding(model, prompt) >= 4 * 2**-7 * float(logits.abs().max()) * 0.99
    for seed in range(12):
        out = dec.generate(prompt, 60, "ar", SamplingParams(temperature=1.5, seed=seed), ignore_eos=True)
        assert dec.audit(out).fault is None


def test_weights_that_change_during_a_stream_are_those_of_the_next_text(prompt):
    given = dict(sampling=SAMPLINGS[0], ignore_eos=True)
    model = short(num_key_value_heads=4)
    dec = Decoder(model)
    before = dec.generate(prompt, 20, "ar", **given).token_ids
    found = []
    for chunk in dec.stream(prompt, 20, "ar", **given):
        found += chunk.token_ids
        if len(found) == 4:
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.data.copy_(layer.mlp.down_proj.weight.flip(0))
    assert found == before
    assert dec.generate(prompt, 20, "ar", **given).token_ids != before


def test_inputs_of_any_layout():
    layer = Int4Linear.of(linear(64, 48))
    x = torch.randn(64, 5).T
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert layer(x[None]).shape == (1, 5, 48)
