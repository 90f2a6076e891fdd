"""Whole models with weights of four or eight bits: every text is plain decoding's, and little else has changed."""

from itertools import product

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.backends.native import library as native
from decoder.backends.native.quantised import QuantisedLinear, QuantisedMatrix
from decoder.model.quantising import INT4, INT8, QUANTISED_DTYPES, dtype_name, quantise
from decoder.model.rounding import rounded

from ..tiny import byte_tokenizer
from .conftest import VOCAB, all_heads, random_heads, random_tokens, some, tiny_llama

if not native.available():
    pytest.skip("needs the native library", allow_module_level=True)

SHAPE = dict(hidden_size=64, intermediate_size=128)
SAMPLINGS = [
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20),
    SamplingParams(temperature=0),
]
AROUND = [torch.float32, torch.bfloat16]


def short(dtype, around, seed=0, **overrides):
    model = tiny_llama(torch.float32, seed, **SHAPE | overrides)
    quantise(model, dtype, around)
    return model


@pytest.fixture(scope="module", params=[(INT4, torch.float32), (INT8, torch.bfloat16)], ids=str)
def exact(request):
    dtype, around = request.param
    if around == torch.bfloat16 and not native.multiplies(torch.bfloat16):
        pytest.skip("the processor does not multiply bfloat16")
    model = short(dtype, around)
    small = tiny_llama(around, seed=2, num_hidden_layers=1)
    dec = Decoder(model, heads=all_heads(model), draft_model=small, bitwise=True)
    assert "passes in one call" in dec.report()
    return dec


@pytest.fixture(scope="module")
def prompt():
    return random_tokens(50, 4)


@pytest.mark.parametrize(
    "method, params",
    some(
        product([method for method in methods() if method != "ar"], SAMPLINGS),
        [*product(methods(), SAMPLINGS[:1]), ("tokenswift", SAMPLINGS[1]), ("auto", SAMPLINGS[1])],
    ),
)
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
    # Roundings to bfloat16 turn more of those of inputs.
    most, equal = (2**-4, 0.75) if exact.model.dtype == torch.bfloat16 else (2**-6, 0.9)
    assert (behind <= most * logits.abs().max()).all()
    assert (behind == 0).float().mean() > equal


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
def test_no_rounding_moves_a_position(dtype, around):
    """The rotary embedding's frequencies keep their digits, without which far positions run together."""
    model = short(dtype, around)
    expected = tiny_llama(torch.float32, **SHAPE).model.rotary_emb.inv_freq
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_layers_and_head_are_rounded_and_nothing_else(dtype, tied):
    plain, model = (tiny_llama(torch.bfloat16, **SHAPE, tie_word_embeddings=tied) for _ in range(2))
    quantise(model, dtype, torch.float32)
    assert dtype_name(model) == dtype and dtype_name(plain) == "bfloat16" and model.dtype == torch.float32
    layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert len(layers) == 15 and not any(isinstance(module, nn.Linear) for module in model.modules())
    for path, layer in layers.items():
        weight = plain.get_submodule(path).weight
        kind = "Q8_0" if dtype == INT8 or path == "lm_head" else "Q4_1"
        assert layer.kind.name == kind
        expected = QuantisedMatrix(layer.kind, rounded(weight, kind)).rows(torch.arange(layer.out_features))
        assert torch.equal(layer.rows(torch.arange(layer.out_features)), expected)
        assert (expected - weight).norm() < (0.01 if kind == "Q8_0" else 0.12) * weight.float().norm()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            assert torch.equal(parameter, plain.get_parameter(name).float()), name


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
def test_without_the_library_the_same_numbers_are_weights_of_ordinary_layers(dtype, monkeypatch, prompt):
    quantised = short(dtype, torch.float32)
    monkeypatch.setattr("decoder.model.quantising.weight_formats", dict)
    model = short(dtype, torch.float32)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(module.weight, quantised.get_submodule(path).rows(torch.arange(module.out_features)))
    assert dtype_name(model) == dtype
    one, other = (each(torch.tensor([prompt])).logits for each in (model, quantised))
    assert 0 < (one - other).norm() < 0.05 * other.norm()  # of rounded inputs


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
def test_a_model_that_is_cast_or_given_other_weights(prompt, dtype):
    model, given = short(dtype, torch.float32), dict(sampling=SAMPLINGS[0], ignore_eos=True)
    dec = Decoder(model)
    before = dec.generate(prompt, 20, "ar", **given).token_ids
    model.double().float()
    assert Decoder(model).generate(prompt, 20, "ar", **given).token_ids == before
    model.load_state_dict(short(dtype, torch.float32, seed=9).state_dict())
    after = dec.generate(prompt, 20, "ar", **given).token_ids
    assert after != before and after == Decoder(model).generate(prompt, 20, "ar", **given).token_ids


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES)
def test_loading(tmp_path, dtype):
    model = tiny_llama(torch.bfloat16, **SHAPE)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    random_heads(model).to(torch.float32).save_pretrained(tmp_path / "heads")
    tiny_llama(torch.bfloat16, num_hidden_layers=1, hidden_size=32).save_pretrained(tmp_path / "small")
    dec = decoder.load(tmp_path / "model", tmp_path / "heads", draft_model=tmp_path / "small", dtype=dtype)
    assert f"in {dtype}" in dec.report() and dec.bitwise
    around = torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32
    assert dec.model.dtype == dec.draft_model.dtype == around and type(dec.draft_model) is LlamaForCausalLM
    quantise(model, dtype, dec.model.dtype)
    for name, one in model.state_dict().items():
        assert torch.equal(one, dec.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="one process on a CPU"):
        decoder.load(tmp_path / "model", dtype=dtype, tensor_parallel=True)
    with pytest.raises(ValueError, match=r"use one of .*int4, int8"):
        decoder.load(tmp_path / "model", dtype="int5")
    with pytest.raises(ValueError, match=f"{dtype} already"):
        quantise(dec.model, INT8, torch.float32)


def test_what_four_bits_cannot_hold_is_named_and_left_as_it_was(tmp_path):
    narrow = tiny_llama(torch.float32, intermediate_size=48)
    refused = r"model\.layers\.0\.mlp\.down_proj\.weight \(Linear, 32x48\) cannot be held in four bits"
    with pytest.raises(ValueError, match=refused):
        quantise(narrow, INT4, torch.float32)
    assert all(one.dtype == torch.float32 for one in narrow.parameters())
    quantise(narrow, INT8, torch.float32)  # which leaves such a layer as it is
    assert {type(one.mlp.down_proj) for one in narrow.model.layers} == {nn.Linear}
    older = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn\.weight \(Conv1D, 32x96\) cannot be held"):
        quantise(older, INT4, torch.float32)
    # It is refused before weights are read.
    tiny_llama(torch.float32, intermediate_size=48).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=refused):
        decoder.load(tmp_path, dtype="int4")


def test_a_model_with_an_adapter_is_refused():
    peft = pytest.importorskip("peft")
    model = tiny_llama(torch.float32, **SHAPE)
    peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj has an adapter.*merge it"):
        quantise(model, INT4, torch.float32)


def test_an_audit_allows_for_inputs_that_are_rounded(prompt):
    dec = Decoder(short(INT4, torch.float32))
    for seed in range(12):
        out = dec.generate(prompt, 60, "ar", SamplingParams(temperature=1.5, seed=seed), ignore_eos=True)
        assert dec.audit(out).fault is None
