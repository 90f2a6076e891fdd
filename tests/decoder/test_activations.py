"""Activations give a number the same bits among any others, on any number of threads."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from decoder import Decoder
from decoder.backends.native.activations import Activation, activations
from decoder.cache.full import FullCache

from .conftest import random_tokens, tiny_llama

FUNCTIONS = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu tanh": partial(functional.gelu, approximate="tanh"),
}


@pytest.fixture(params=[1, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [33, 1000, 1024, 40_000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_bits_that_they_have_alone(name, width, dtype, threads):
    function = Activation(FUNCTIONS[name])
    both = torch.randn(1, 84, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = both[..., :width]  # as the gate stands beside up
    found = function(x)
    assert found.shape == x.shape
    torch.testing.assert_close(found, FUNCTIONS[name](x))
    for first, last in ((0, 1), (7, 8), (50, 83), (83, 84)):
        assert torch.equal(function(x[:, first:last].contiguous()), found[:, first:last])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu_new"])
def test_a_prompt_in_pieces_has_the_same_bits(activation, threads, with_native):
    """In layers that are fused (SiLU) and in transformers' own."""
    dec = Decoder(tiny_llama(torch.float32, intermediate_size=1024, hidden_act=activation), bitwise=True)
    ids = random_tokens(200, 1)
    caches = []
    for size in (200, 7):
        cache = FullCache(len(ids) + 8)
        with dec.target.patched(), torch.inference_mode():
            for start in range(0, len(ids), size):
                dec.target.prefill(ids[start : start + size], cache)
        caches.append([pairs[:, :, :, : len(ids)].clone() for pairs in (cache.keys, cache.values)])
    assert all(map(torch.equal, *caches))


def test_activations_with_parameters_keep_their_forward():
    found = activations([torch.nn.SiLU(), torch.nn.PReLU(), torch.nn.Linear(2, 2)])
    assert [type(module) for module in found] == [torch.nn.SiLU]
