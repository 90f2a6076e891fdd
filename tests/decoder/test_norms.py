"""Fused norms, which CUDA runs: the same function as transformers' modules, or left alone."""

import pytest
import torch

from decoder.backends.norms import fused_norms

from .conftest import random_heads, tiny_llama
from .test_families import FAMILIES, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_norm_is_the_modules_own_function(family, dtype):
    """Whatever its class does besides (a shifted weight, a mean): then it stays as it is."""
    model_type, overrides = FAMILIES[family]
    model = tiny(model_type, dtype, **overrides)
    fused = fused_norms(model.modules())
    for module, forward in fused.items():
        x = torch.randn(2, 5, len(module.weight), generator=torch.Generator().manual_seed(1)).to(dtype)
        torch.testing.assert_close(forward(x), module(x), rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    named = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    # Gemma's weights are added to one.
    assert len(fused) == (0 if model_type.startswith("gemma") else len(named))


def test_norms_of_heads_and_of_qwens_queries_are_fused_and_those_in_float64_are_not():
    heads = random_heads(tiny_llama())
    assert len(fused_norms(heads.modules())) == 6
    assert len(fused_norms(tiny("qwen3", torch.float32, head_dim=16).modules())) == 2 * 4 + 1
    assert not fused_norms(tiny_llama().modules())


def test_a_trial_is_nothing_that_hooks_see_and_a_norm_that_needs_more_is_left_alone():
    class GatedRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x, gate):
            return x * gate

    model, seen = tiny("llama", torch.float32), []
    model.model.norm.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert len(fused_norms([*model.modules(), GatedRMSNorm()])) == 2 * 2 + 1
    assert not seen
