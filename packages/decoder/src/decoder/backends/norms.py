"""Root-mean-square norms in one kernel on CUDA and in four calls on a CPU, where transformers' modules make eight."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional

from decoder.backends.faults import holds

# Relative errors above that of one rounding in each dtype and below those of another function of the weights.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}


class FusedNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 and rounded once.

    On CUDA it is PyTorch's kernel. On a CPU that one consists of eight operators, which in a small model's step are
    called for longer than they compute; here they are four: with n numbers in the axis, sqrt(n) (mean(x^2) + eps)^(1/2)
    is the hypotenuse of the norm of x and sqrt(n eps), and the weight is multiplied by sqrt(n) beforehand.

    Args:
        weight: [n], on a CPU also [..., n] like the last axes of inputs, each row of which is normalised by itself. A
            later change of it takes effect on CUDA alone; on a CPU new norms are made before each generation.
        eps: added to the mean of the squares.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight, self.eps = weight.detach(), eps
        size = weight.shape[-1]
        if weight.device.type == "cpu":
            self._scaled = self.weight.float() * size**0.5
            self._offset = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / norm.hypot_(self._offset)).mul_(self._scaled).to(x.dtype)


def fused_norms(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable]:
    """A `FusedNorm` as the forward of those ``modules`` that are root-mean-square norms over their last axis.

    A class of modules counts as such if its name says so and its first module computes the same from a random input.
    float64 modules are left as they are, since they serve as the reference. Rounding differs: a `FusedNorm` rounds
    once, the modules twice.
    """
    found: dict[nn.Module, Callable] = {}
    same: dict[type, bool] = {}
    for module in modules:
        if not looks_like_rms_norm(module):
            continue
        fused, kind = FusedNorm(module.get_parameter("weight"), float(eps_of(module) or 0)), type(module)
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
        and isinstance(eps_of(module), float)
        and isinstance(weight, nn.Parameter)
        and weight.ndim == 1
        and weight.dtype in TOLERANCE
    )


def eps_of(module: nn.Module) -> float | None:
    """What a norm adds to the mean of the squares."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.inference_mode()
def _equal(module: nn.Module, fused: FusedNorm) -> bool:
    weight = module.get_parameter("weight")
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (1, 4, len(weight))
    x = 3 * torch.randn(shape, device=weight.device, dtype=torch.float32, generator=generator).to(weight.dtype)

    def same() -> bool:
        # The class's forward and not the module, since the user's hooks must not see the trial input.
        expected = type(module).forward(module, x)
        rtol = TOLERANCE[weight.dtype]
        return expected.dtype == x.dtype and torch.allclose(fused(x).double(), expected.double(), rtol, 1e-6)

    return holds(same)
