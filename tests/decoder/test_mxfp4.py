"""Folders of gpt-oss with MXFP4 weights: the native library multiplies their blocks, which are never unpacked."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations import mxfp4 as theirs

import decoder
from decoder import SamplingParams, TokenSwiftOptions
from decoder.backends.native.quantised_experts import PARTS, QuantisedExperts
from decoder.model.quantising import dtype_name
from tests.decoder.conftest import all_heads
from tests.decoder.test_families import EXPERTS, tiny
from tests.decoder.test_using_it import byte_tokenizer

SHAPE = dict(
    EXPERTS,
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    head_dim=16,
    num_hidden_layers=3,
    sliding_window=12,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
ROUNDED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def with_blocks(folder, change=lambda tensors: tensors):
    """Give the experts of a saved model random blocks in place of their weights."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(file)
    for name in [
        name for name in tensors if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")
    ]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
    save_file(change(tensors), file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": ROUNDED}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "gpt-oss"
    tiny("gpt_oss", torch.bfloat16, **SHAPE).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return with_blocks(path)


@pytest.fixture
def dec(with_native, monkeypatch, folder):
    """Nothing is unpacked on the way."""
    with monkeypatch.context() as patch:
        patch.delattr(theirs, "convert_moe_packed_tensors")
        return decoder.load(folder)


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


def in_bytes(x):
    """Inputs as the library rounds them, in parts of 32."""
    parts = x.unflatten(-1, (-1, 32))
    step = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / step).round() * step).flatten(-2)


def of_rounded_inputs(own, expert, x):
    """What an expert of transformers' gives of inputs [d] in bytes."""
    both = in_bytes(x) @ own.gate_up_proj[expert] + own.gate_up_proj_bias[expert]
    return in_bytes(own._apply_gate(both)) @ own.down_proj[expert] + own.down_proj_bias[expert]


def test_the_experts_are_the_folders_and_rounded_inputs_are_all_that_differs(folder, dec):
    unpacked = decoder.load(folder, dtype="float32", bitwise=False).model
    assert dtype_name(dec.model) == "mxfp4"
    for ours, own in zip(experts_of(dec.model), experts_of(unpacked), strict=True):
        assert isinstance(ours, QuantisedExperts) and "MXFP4" in repr(ours)
        held = sum(ours.get_parameter(part).nbytes for part in PARTS)
        assert held == (own.gate_up_proj.numel() + own.down_proj.numel()) // 32 * 18  # scales take two bytes
        x, ids = torch.randn(8, 64), torch.arange(8)[:, None] % 4
        ours.like = ours.like.float()
        with torch.inference_mode():
            given = ours(x, ids, torch.ones(8, 1))
            expected = torch.stack([of_rounded_inputs(own, number % 4, row) for number, row in enumerate(x)])
            # A number halfway between two bytes may be rounded to either.
            assert (given - expected).norm() < 2e-3 * expected.norm()
            assert (given - own(x, ids, torch.ones(8, 1))).norm() < 0.02 * expected.norm()


def test_logits_are_nearly_those_of_the_unpacked_model(folder, dec):
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = dec.model.float()(ids).logits
        theirs_ = decoder.load(folder, dtype="float32", bitwise=False).model(ids).logits
    off = (ours - theirs_).norm(dim=-1) / theirs_.norm(dim=-1)
    # Where rounding makes a router choose another expert, a token's logits are far off.
    assert off.median() < 0.05


def test_every_method_gives_the_text_of_plain_decoding_bit_for_bit(dec):
    assert dec.bitwise and dec.target.backend.whole is not None, dec.report()
    drafting = decoder.Decoder(dec.model, dec.tokenizer, all_heads(dec.model), dec.model)
    prompt, options = list(range(5, 45)), TokenSwiftOptions(tree=(2, 2, 1), ngrams=2, budget=24, sink=4)
    given = dict(max_new_tokens=50, sampling=SamplingParams(seed=2), ignore_eos=True, return_logprobs=True)
    plain = drafting.generate(prompt, method="ar", **given)
    for method in decoder.methods():
        out = drafting.generate(prompt, method=method, options=options, **given)
        assert (method, out.token_ids, out.logprobs) == (method, plain.token_ids, plain.logprobs)
    batch = drafting.generate_batch([prompt[:9], prompt], method="tokenswift", **given)
    assert (batch[1].token_ids, batch[1].logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.usefixtures("without_native")
def test_without_the_library_the_weights_are_unpacked(folder):
    dec = decoder.load(folder)
    assert not any(isinstance(experts, QuantisedExperts) for experts in experts_of(dec.model))
    assert len(dec.generate("abc", 8, "prompt-lookup", ignore_eos=True).token_ids) == 8


def lacking(tensors):
    return {name: one for name, one in tensors.items() if name != "model.layers.1.mlp.experts.down_proj_scales"}


def shorter(tensors):
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    return tensors | {name: tensors[name][:, :, :1].clone()}


def no_number(tensors):
    tensors["model.layers.2.mlp.experts.gate_up_proj_scales"][3, 5, 1] = 255
    return tensors


FAULTS = {
    lacking: "lacks tensors that its configuration asks for: model.layers.1.mlp.experts.down_proj_scales",
    shorter: "tensors of other shapes than its configuration says: model.layers.1.mlp.experts.down_proj_blocks",
    no_number: "holds values in model.layers.2.mlp.experts.gate_up_proj_scales that are no numbers",
}


@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_damaged_folder_is_refused_in_a_sentence(tmp_path, change):
    tiny("gpt_oss", torch.bfloat16, **SHAPE).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with_blocks(tmp_path, change)
    with pytest.raises(ValueError, match=FAULTS[change]):
        decoder.load(tmp_path)
