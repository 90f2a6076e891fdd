"""Root-mean-square norms in one call, where transformers' modules make eight, on CUDA as many kernels."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional

Forward = Callable[[torch.Tensor], torch.Tensor]

# Relative errors above that of one rounding in each dtype and below those of another function of the weights.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}


def fused_norms(modules: Iterable[nn.Module]) -> dict[nn.Module, Forward]:
    """PyTorch's own kernel as the forward of those ``modules`` that are root-mean-square norms over their last axis.

    A class of modules counts as such if its name says so and its first module computes the same from a random input.
    float64 modules are left as they are, since they serve as the reference. Rounding differs: the kernel rounds once,
    the modules twice.
    """
    found: dict[nn.Module, Forward] = {}
    same: dict[type, bool] = {}
    for module in modules:
        fused = _fused(module)
        if fused is not None:
            kind = type(module)
            if kind not in same:
                same[kind] = _equal(module, fused)
            if same[kind]:
                found[module] = fused
    return found


def looks_like_rms_norm(module: nn.Module) -> bool:
    """Whether a module has the name and the parts of a root-mean-square norm; what it computes must be tested."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(_eps(module), float)
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 1
        and weight.dtype in TOLERANCE
    )


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _fused(module: nn.Module) -> Forward | None:
    if not looks_like_rms_norm(module):
        return None
    weight, eps = module.get_parameter("weight"), float(_eps(module) or 0)

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, weight, eps)

    return forward


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """PyTorch's kernel: ``x`` divided by the root mean square over its last axis, times ``weight``."""
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@torch.inference_mode()
def _equal(module: nn.Module, fused: Forward) -> bool:
    weight = module.get_parameter("weight")
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (1, 4, len(weight))
    x = 3 * torch.randn(shape, device=weight.device, dtype=torch.float32, generator=generator).to(weight.dtype)
    try:
        # The class's forward and not the module, since the user's hooks must not see the trial input.
        expected = type(module).forward(module, x)
        return expected.dtype == x.dtype and torch.allclose(
            fused(x).double(), expected.double(), rtol=TOLERANCE[weight.dtype], atol=1e-6
        )
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # A function that takes or returns something else may fail in any way.
        return False
