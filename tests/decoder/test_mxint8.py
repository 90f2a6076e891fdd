"""Weights of eight bits: the format, that bytes hold them without changing a bit of a product, and whole models."""

import math

import pytest
import torch

import decoder
from decoder import SamplingParams
from decoder.backends.native import library as native
from decoder.backends.native.mxint8 import BLOCK, mxint8_holds, rounded_to_mxint8
from decoder.backends.native.packed_weight import MXInt8Weight, NativeWeight, pack
from decoder.model.short_weights import INT8, dtype_name, make_short

from .conftest import tiny_llama
from .test_using_it import byte_tokenizer

needs_library = pytest.mark.skipif(not native.available(), reason="no native library")
AROUND = [torch.float32, torch.bfloat16]
SHAPE = dict(hidden_size=64, intermediate_size=128)
SAMPLINGS = [
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20),
    SamplingParams(temperature=0),
]


def slowly(block):
    """The specification's conversion of one block (OCP MX 1.0), number by number, as Python has them.

    An element is a whole number of 64ths, at most 127 of them, and the scale the power of two of the largest number.
    """
    largest = max(map(abs, block))
    if not largest:
        return [0.0] * len(block)
    scale = 2.0 ** math.floor(math.log2(largest))
    return [max(-127, min(127, round(number / scale * 64))) * scale / 64 for number in block]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_is_that_of_the_specification(dtype):
    torch.manual_seed(0)
    weight = torch.randn(9, 3 * BLOCK) * torch.logspace(-6, 3, 9)[:, None]
    weight[2, :BLOCK], weight[3, 0], weight[4, 5] = 0, 2.0, -127.9 / 8
    weight = weight.to(dtype)
    expected = torch.tensor([slowly(block) for block in weight.double().view(-1, BLOCK).tolist()]).view(9, -1)
    rounded = rounded_to_mxint8(weight, torch.float32)
    assert torch.equal(rounded.double(), expected.double())
    # bfloat16 holds them, and rounding again changes nothing.
    assert torch.equal(rounded_to_mxint8(weight, torch.bfloat16).float(), rounded)
    assert torch.equal(rounded_to_mxint8(rounded, torch.float32), rounded)
    assert mxint8_holds(rounded) and mxint8_holds(rounded.bfloat16()) and not mxint8_holds(weight)


def test_one_number_that_is_no_whole_step_shows():
    torch.manual_seed(1)
    weight = rounded_to_mxint8(torch.randn(300, 2 * BLOCK), torch.float32)
    weight[299, 40] += weight[299, 32:].abs().max() / 256
    assert not mxint8_holds(weight)
    assert not mxint8_holds(torch.zeros(4, 48)) and mxint8_holds(torch.zeros(4, 64))


@needs_library
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (64, 48), (96, 33), (576, 70), (1536, 31)])
def test_a_product_has_the_bits_of_that_of_the_same_numbers_in_bfloat16(inputs, outputs, bias):
    torch.manual_seed(2)
    dtype = torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32
    weight = rounded_to_mxint8(torch.randn(outputs, inputs) * torch.rand(outputs, 1), dtype)
    weight[0, :BLOCK] = 0
    given = torch.randn(outputs) if bias else None
    packed, whole = pack([weight], [given]), NativeWeight(weight, given)
    assert type(packed) is MXInt8Weight and packed.dtype == whole.dtype == dtype
    assert packed._packed.nbytes * 16 == whole._packed.nbytes * 9
    x = torch.randn(131, inputs).to(dtype)
    expected = whole(x)
    for rows in (*range(1, 31), 56, 57, 131):
        assert torch.equal(packed(x[:rows]), expected[:rows]), rows


def eight_bits(around, seed=0, **overrides):
    model = tiny_llama(torch.float32, seed, **SHAPE | overrides)
    make_short(model, INT8, around)
    return model


def test_layers_and_head_are_rounded_and_nothing_else():
    plain, model = tiny_llama(torch.float32, **SHAPE), eight_bits(torch.float32)
    assert dtype_name(model) == "int8"
    for (name, before), (other, after) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        changed = before.ndim > 1 and "embed" not in name
        assert torch.equal(before, after) is not changed
        if changed:
            assert torch.equal(after, rounded_to_mxint8(before, torch.float32))
            assert (after - before).norm() < 0.01 * before.norm()


def test_loading(tmp_path):
    tiny_llama(torch.bfloat16, **SHAPE).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    dec = decoder.load(tmp_path / "model", dtype="int8")
    assert "in int8" in dec.report() and dec.bitwise == native.available()
    # What transformers saves of it is an ordinary model, which has the same text.
    dec.model.save_pretrained(tmp_path / "rounded")
    byte_tokenizer().save_pretrained(tmp_path / "rounded")
    again = decoder.load(tmp_path / "rounded")
    assert dtype_name(again.model) == str(dec.model.dtype).removeprefix("torch.")
    texts = [one.generate(list(range(40)), 40, "ar", ignore_eos=True).token_ids for one in (dec, again)]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match=r"dtype 'int8' is for one process on a CPU"):
        decoder.load(tmp_path / "model", dtype="int8", tensor_parallel=True)
    with pytest.raises(ValueError, match="int8 already"):
        make_short(dec.model, INT8, torch.float32)
