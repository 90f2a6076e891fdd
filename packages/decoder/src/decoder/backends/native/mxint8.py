"""Weights of eight bits: MXINT8, the format of that name in the OCP Microscaling specification 1.0.

In a block of 32 weights each is a whole number from -127 to 127 times a power of two that they share. bfloat16 holds
such numbers exactly, so a matrix of them is an ordinary one, for whatever reads it: `pack` sees that bytes hold it, and
the native library then reads half as much.
"""

import torch
from torch import nn

BLOCK = 32
"""Weights of a row that share a power of two."""

_MOST = 127
_FEW = 64
_AT_ONCE = 2**22  # numbers, so that a check or a rounding takes little memory


def mxint8_steps(blocks: torch.Tensor) -> torch.Tensor:
    """By which power of two ``blocks`` [..., 32] are divided, float32 [..., 1]: the largest weight is then 64 to 128.

    Where all are zero it is 1.
    """
    largest = blocks.float().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 7
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


def rounded_to_mxint8(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix [out, in], whose inputs are a multiple of 32, rounded to such weights, in bfloat16 or a wider dtype."""
    whole = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    parts = (one.reshape(-1, BLOCK).split(_AT_ONCE // BLOCK) for one in (weight.detach(), whole))
    for given, made in zip(*parts, strict=True):
        steps = mxint8_steps(given)
        made.copy_((given.float() / steps).round_().clamp_(-_MOST, _MOST).mul_(steps))
    return whole


def mxint8_holds(weight: torch.Tensor) -> bool:
    """Whether all numbers of a matrix [out, in] are such weights."""
    if weight.shape[1] % BLOCK or not weight.numel():
        return False
    blocks = weight.detach().reshape(-1, BLOCK)
    # Those of most matrices are not, which a few blocks show.
    for part in (blocks[:_FEW], *blocks.split(_AT_ONCE // BLOCK)):
        codes = part.float() / mxint8_steps(part)
        if not torch.equal(codes, codes.round()):
            return False
    return True


def mxint8_bytes(weights: int) -> int:
    """What passes read for so many weights: a byte each, and a word per block."""
    return weights + weights // BLOCK * 4


def fits_mxint8(module: nn.Module) -> bool:
    """Whether a module is a layer whose weights can be rounded so."""
    return type(module) is nn.Linear and not module.in_features % BLOCK
