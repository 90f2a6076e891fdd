"""Linear layers with weights of four bits, for a CPU, a third of bfloat16's.

The native library multiplies the codes of 32 weights by inputs of bfloat16, in single precision, and their sum by what
these weights share; where the processor does not multiply bfloat16 it restores the weights. Elsewhere the kernel is
PyTorch's, which rounds inputs and outputs to bfloat16, and so does transformers' own pass over the layers.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import nn

from decoder.backends.native import library as native
from decoder.backends.native.packed_weight import NativeWeight

GROUP = 32
"""Weights of a row that share a step and a centre, as in llama.cpp's formats."""

OUTPUTS = 16
"""Layers have multiples of this number of outputs."""

_CODES = 16
_WORDS = 4  # of eight codes in a group
# What either end of a group is multiplied by. A step that is too small for a few weights suits the others better.
_SHRUNK = (1.0, 0.9, 0.8)
_SAME = 0.01  # an error, as a share of the weights' norm, with which they have been on such a grid before
_AT_ONCE = 2**19  # numbers, so that a search stays in the processor's cache: a third of the time of 2**22


class Int4Linear(nn.Module):
    """A linear layer whose weights are ``step * (code - 8) + centre``, with codes from 0 to 15.

    Attributes:
        weight: the codes, two in a byte, that of the even input in its lower half, uint8 [out, in / 2].
        scales: steps and centres in turn, bfloat16 [in / 32, 2 out].
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape[0], 2 * weight.shape[1]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, layer: nn.Linear) -> "Int4Linear":
        """The layer with rounded weights."""
        codes, scales = rounded(layer.weight.detach())
        even, odd = (codes + _CODES // 2).to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
        return cls(even | odd << 4, scales, None if layer.bias is None else layer.bias.detach().clone())

    def unpacked(self) -> torch.Tensor:
        """The weights, float32 [out, in]."""
        codes = torch.stack((self.weight & 15, self.weight >> 4), -1).view(self.out_features, -1, GROUP)
        step, centre = _shared(self.scales).float().transpose(0, 1)[..., None].unbind(2)
        return ((codes.float() - _CODES // 2) * step + centre).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [..., out] for inputs [..., in] of any floating dtype, in single precision."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.unpacked(), bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class NativeInt4Weight(NativeWeight):
    """The native library's product of one `Int4Linear`, or of several with the same input.

    Raises:
        NativeUnavailable: there is no library.
    """

    _kind = native.NIBBLES

    def __init__(self, layers: Sequence[Int4Linear]):
        codes, scales, bias = _joined(layers)
        outputs, inputs = len(codes), 2 * codes.shape[1]
        dtype = torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32
        self._hold((outputs, inputs), dtype, self._words(codes, _shared(scales)), bias)

    def _words(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """In panels of outputs and blocks of inputs, [panels, blocks x 5 words, outputs, 4 bytes], as in library.h.

        Args:
            codes: [out, in / 2].
            scales: [in / 32, out, 2].
        """
        first, second = codes.view(len(codes), -1, _WORDS, 2, 2).unbind(-1)  # of two pairs of codes that share bytes
        lower, upper = first & 15 | second << 4, first >> 4 | second & 0xF0
        shared = scales.transpose(0, 1).contiguous().view(torch.uint8)
        words = torch.cat((shared[:, :, None], torch.cat((lower, upper), -1)), 2)
        panels = self._in_panels(words.flatten(1), torch.uint8)
        return panels.unflatten(2, (-1, 4)).transpose(1, 2).contiguous()


def _joined(layers: Sequence[Int4Linear]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and biases of layers with the same input, one behind the other."""
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    codes, scales = (
        torch.cat([layer.weight.data for layer in layers]),
        torch.cat([one.scales.data for one in layers], 1),
    )
    return codes, scales, torch.cat(biases) if biases else None


def _shared(scales: torch.Tensor) -> torch.Tensor:
    """Steps and centres of a layer as [in / 32, out, 2], in bfloat16 whatever the user has cast the model to."""
    return scales.to(torch.bfloat16).view(len(scales), -1, 2)


def int4_bytes(weights: int) -> int:
    """What so many weights take: half a byte each, and a step and a centre per group."""
    return weights // 2 + weights // GROUP * 2 * torch.bfloat16.itemsize


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes from -8 to 7, int32 [out, in], and the bfloat16 steps and centres [in / 32, 2 out] of weights [out, in].

    A group's ends become codes -8 and 7, or lie outside of them if the squared error is smaller so. Weights that have
    been rounded so before, such as those of llama.cpp's formats with four bits, keep their codes.
    """
    outputs, inputs = weight.shape
    parts = [_rounded(part.float()) for part in weight.reshape(-1, GROUP).split(_AT_ONCE // GROUP)]
    codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes.view(outputs, inputs), scales.view(outputs, -1, 2).transpose(0, 1).flatten(1)


def _rounded(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rounded` for groups [n, 32] -> codes [n, 32], scales [n, 2]."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    # From the weight that is largest in magnitude to seven eighths of it on the other side of zero, as Q4_0 has it.
    from_zero = torch.minimum(low, -7 / 8 * high), torch.maximum(high, -7 / 8 * low)
    shrunk = [(low * below, high * above) for below, above in product(_SHRUNK, _SHRUNK)]
    small = _SAME * torch.linalg.vector_norm(groups, dim=1, keepdim=True)
    step, centre = _grid(low, high)
    error = _error(groups, step, centre)
    for ends in (from_zero, *shrunk):
        if bool((error <= small).all()):
            break
        others = _grid(*ends)
        other = _error(groups, *others)
        better = other < error
        error = torch.where(better, other, error)
        step, centre = (torch.where(better, *pair) for pair in zip(others, (step, centre), strict=True))
    return _codes(groups - centre, step).int(), torch.cat((step, centre), 1).bfloat16()


def _grid(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and centres [n, 1] of groups whose codes reach from ``low`` to ``high`` [n, 1], as bfloat16 holds them."""
    step = ((high - low) / (_CODES - 1)).bfloat16().float()
    return step, (low + _CODES // 2 * step).bfloat16().float()


def _codes(from_centre: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Codes [n, 32] of weights less their centre."""
    # Equal weights have no step, and are their centre.
    return (from_centre / step.where(step > 0, 1.0)).round_().clamp_(-_CODES // 2, _CODES // 2 - 1)


def _error(groups: torch.Tensor, step: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """How far groups [n, 32] are from such a grid: the norms [n, 1] of the differences."""
    from_centre = groups - centre
    from_centre.addcmul_(_codes(from_centre, step), step, value=-1)
    return torch.linalg.vector_norm(from_centre, dim=1, keepdim=True)


def fits_int4(module: nn.Module) -> bool:
    """Whether a module is a layer that four bits can hold."""
    return type(module) is nn.Linear and not module.in_features % GROUP and not module.out_features % OUTPUTS
