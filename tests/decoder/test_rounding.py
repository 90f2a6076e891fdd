"""Rounding weights to blocks of four and eight bits: as near as the gguf package's, and what is rounded stays."""

import pytest
import torch

from decoder.model.gguf.formats import FORMATS, unpacked
from decoder.model.rounding import BLOCK, rounded

gguf = pytest.importorskip("gguf")
NAMES = ("Q4_1", "Q8_0")


def restored(weight, name):
    """What a matrix is after rounding, in float64."""
    format = next(one for one in FORMATS.values() if one.name == name)
    return unpacked(rounded(weight, name).numpy(), format, torch.float64)


def off(weight, name):
    """The squared errors of the blocks."""
    return (restored(weight, name) - weight).view(-1, BLOCK).square().sum(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_no_further_from_the_weights_than_those_of_the_gguf_package(name, dtype):
    torch.manual_seed(2)
    weight = torch.randn(64, 320) * torch.logspace(-3, 2, 64)[:, None]
    weight[:, 3] *= 6  # a weight that is far from the others in its block
    weight = weight.to(dtype)
    stored = gguf.quantize(weight.float().numpy(), kind := gguf.GGMLQuantizationType[name])
    assert rounded(weight, name).shape == stored.shape
    theirs = (torch.from_numpy(gguf.dequantize(stored, kind)) - weight.double()).view(-1, BLOCK).square().sum(1)
    mine = off(weight.double(), name)
    assert (mine <= 1.02 * theirs).all()
    assert mine.sum() < (0.95 if name == "Q4_1" else 1.0) * theirs.sum()


@pytest.mark.parametrize("name, stored_as", [("Q4_1", "Q4_1"), ("Q4_1", "Q4_0"), ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")])
def test_weights_that_are_on_such_a_grid_stay_as_they_are(name, stored_as):
    torch.manual_seed(1)
    kind = gguf.GGMLQuantizationType[stored_as]
    stored = torch.from_numpy(gguf.dequantize(gguf.quantize(torch.randn(48, 96).numpy(), kind), kind))
    # In eight bits it is another grid; otherwise only scales are rounded to half precision.
    near = 2**-7 if (name, stored_as) == ("Q8_0", "Q4_0") else 2**-10
    assert (restored(stored, name) - stored).norm() < near * stored.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, -0.375])
def test_a_block_of_equal_weights_is_exact(name, value):
    weight = torch.full((16, 64), value)
    weight[3, :BLOCK] = torch.linspace(-1, 1, BLOCK)
    same = torch.ones(16, 64, dtype=torch.bool)
    same[3, :BLOCK] = False
    found = restored(weight, name)[same]
    assert torch.allclose(found, weight.double()[same], rtol=0 if name == "Q4_1" else 2**-11, atol=0)
