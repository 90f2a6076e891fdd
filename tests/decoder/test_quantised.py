"""Weights in the formats of GGUF files: unpacked, and multiplied in integers by the native library."""

import numpy as np
import pytest
import torch

from decoder.backends.native import library as native

gguf = pytest.importorskip("gguf")
if not native.available():
    pytest.skip("needs the native library", allow_module_level=True)

from decoder.backends.native.quantised import (  # noqa: E402
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedMatrix,
    QuantisedWeight,
    weight_formats,
)

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
INPUTS = 512


def kind_of(name):
    return next(kind for kind in weight_formats().values() if kind.name == name)


def blocks_of(name, outputs, inputs=INPUTS, seed=0):
    """Random blocks [outputs, bytes] of a format, with scales of both signs and every code."""
    random, kind = np.random.default_rng(seed), kind_of(name)
    blocks = random.integers(0, 256, (outputs, inputs // kind.inputs, kind.bytes_of_block), dtype=np.uint8)

    def halves():
        sizes = random.uniform(0.001, 0.02, blocks.shape[:2]) * random.choice((-1, 1), blocks.shape[:2])
        sizes /= {"Q4_K": 32, "Q5_K": 32, "Q6_K": 64}.get(name, 1)  # whole numbers multiply them
        return sizes.astype(np.float16)[..., None].view(np.uint8)

    if name == "MXFP4":
        blocks[..., 0] = random.integers(118, 125, blocks.shape[:2])
    elif name == "Q6_K":
        blocks[..., -2:] = halves()
    else:
        blocks[..., :2] = halves()
        if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            blocks[..., 2:4] = halves()
    return torch.from_numpy(blocks.reshape(outputs, -1))


def dequantised(name, blocks):
    """What the gguf package makes of blocks, float64."""
    number = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), number)).double()


def layer_of(name, outputs=48, dtype=torch.float32, seed=0, inputs=INPUTS, bias=None):
    return QuantisedLinear(QuantisedMatrix(kind_of(name), blocks_of(name, outputs, inputs, seed)), bias, dtype)


def test_the_formats_are_those_of_gguf_files():
    assert sorted(kind.name for kind in weight_formats().values()) == sorted(NAMES)
    for number, kind in weight_formats().items():
        stored = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.inputs, kind.bytes_of_block)) == (stored.name, gguf.GGML_QUANT_SIZES[stored])


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_gguf_package(name):
    blocks = blocks_of(name, 37)
    matrix = QuantisedMatrix(kind_of(name), blocks)
    assert matrix.shape == (37, INPUTS)
    assert torch.equal(matrix.rows(torch.arange(37)).double(), dequantised(name, blocks))
    ids = torch.tensor([[36, 0], [5, 5]])
    expected = dequantised(name, blocks)[ids]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(QuantisedEmbedding(matrix, dtype)(ids), expected.to(dtype))
    with pytest.raises(IndexError, match="rows from 37 to 37 of 37"):
        matrix.rows(torch.tensor([37]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_off_by_no_more_than_the_rounding_of_inputs(name, dtype):
    blocks, bias = blocks_of(name, 45), torch.randn(45)
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, :32] = 0  # a part without a step
    x[2, 40] = 50  # one with a long one
    layer = QuantisedLinear(QuantisedMatrix(kind_of(name), blocks), bias, torch.float32)
    weights = dequantised(name, blocks)
    # An input is off by half a step at most.
    parts = x.double().view(3, -1, 32)
    off = (parts.abs().amax(-1, keepdim=True) / 254).expand_as(parts).reshape(3, -1) @ weights.abs().T
    error = (layer(x.float()).double() - x.double() @ weights.T - layer.bias.double()).abs()
    assert bool((error <= off * 1.001 + 1e-4).all())
    # Roundings are to either side, so that few errors come near.
    assert float((error / off.clamp_min(1e-9)).mean()) < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_the_row_alone(name, monkeypatch):
    layer = layer_of(name, 80)
    x = torch.randn(37, INPUTS, generator=torch.Generator().manual_seed(2))
    of_sets = []
    for instructions in {*native._instruction_sets(None), "generic"}:
        monkeypatch.setenv("TOKENSWIFT_INSTRUCTIONS", instructions)
        product = QuantisedWeight([layer])
        whole = product(x)
        of_sets.append(whole)
        for rows in (1, 2, 3, 5, 8, 15, 16, 17, 33):
            assert torch.equal(product(x[:rows]), whole[:rows]), (instructions, rows)
            assert torch.equal(product(x[-rows:]), whole[-rows:]), (instructions, rows)
    assert len(of_sets) > 1
    assert all(torch.equal(one, of_sets[0]) for one in of_sets)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_threads(threads):
    layer, x = layer_of("Q4_K", 112), torch.randn(19, INPUTS)
    expected, before = layer(x), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layer(x), expected)
        again = layer_of("Q4_K", 112)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again.weight, layer.weight)


def test_layers_of_several_formats_are_one_product():
    biases = torch.randn(32), None, torch.randn(21)
    layers = [
        layer_of(name, outputs, bias=bias)
        for name, outputs, bias in zip(("Q5_0", "Q4_K", "Q8_0"), (32, 16, 21), biases, strict=True)
    ]
    x = torch.randn(18, INPUTS)
    assert torch.equal(QuantisedWeight(layers)(x), torch.cat([layer(x) for layer in layers], -1))


def test_inputs_of_bfloat16_give_the_bits_of_the_same_numbers():
    x = torch.randn(4, INPUTS).bfloat16()
    narrow, wide = layer_of("Q6_K", dtype=torch.bfloat16), layer_of("Q6_K")
    assert narrow(x).dtype == torch.bfloat16
    assert torch.equal(narrow(x), wide(x.float()).bfloat16())


def test_inputs_that_are_no_numbers_are_not_hidden():
    x = torch.randn(3, INPUTS)
    x[1, 7], x[2, 40] = torch.nan, torch.inf
    out = layer_of("Q4_0")(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    assert layer_of("Q4_0")(torch.full((1, INPUTS), 1e-38)).isfinite().all()


def test_a_module_follows_the_dtype_of_its_model():
    model = torch.nn.Sequential(layer_of("Q5_1", 16), torch.nn.LayerNorm(16))
    assert model.bfloat16()[0].dtype == torch.bfloat16
    assert model[0].weight.dtype == torch.uint8
    assert model(torch.randn(2, INPUTS).bfloat16()).dtype == torch.bfloat16


def test_steps_of_mxfp4_reach_from_the_smallest_numbers_to_large_ones():
    blocks = blocks_of("MXFP4", 40, 192)
    blocks.view(-1, 17)[:, 0] = torch.arange(240)
    rows = QuantisedMatrix(kind_of("MXFP4"), blocks).rows(torch.arange(40))
    assert torch.equal(rows.double(), dequantised("MXFP4", blocks))


def test_rows_of_half_a_block_are_refused():
    with pytest.raises(ValueError, match="rows of 143 bytes are no whole blocks of Q4_K"):
        QuantisedMatrix(kind_of("Q4_K"), torch.zeros(2, 143, dtype=torch.uint8))
