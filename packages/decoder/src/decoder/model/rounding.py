"""Rounding weights to blocks of two of the formats of GGUF files: Q4_1 and Q8_0, as `formats.unpacked` reads them.

A block has 32 weights of a row. In Q8_0 each is a whole number from -127 to 127 times the block's scale; in Q4_1 a code
from 0 to 15 times its scale, plus its minimum. Scales and minima are half precision numbers.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

BLOCK = 32
"""Weights of a block."""

_MOST = 127
_CODES = 16
# What either end of a block is multiplied by. A scale that is too small for a few weights suits the others better.
_SHRUNK = (1.0, 0.9, 0.8)
_SAME = 0.01  # an error, as a share of the weights' norm, with which they have been on such a grid before
_AT_ONCE = 2**19  # numbers, so that a search stays in the processor's cache: a third of the time of 2**22


def rounded(weight: torch.Tensor, name: str, search: bool = True) -> torch.Tensor:
    """Weights [out, in] in blocks of the format of this ``name``, uint8 [out, bytes].

    Without a ``search`` a block of four bits takes its ends as they are, in a fifth of the time.
    """
    parts = weight.detach().reshape(-1, BLOCK).split(_AT_ONCE // BLOCK)
    formats: dict[str, Callable] = {"Q4_1": partial(_four_bits, search=search), "Q8_0": _eight_bits}
    return torch.cat([formats[name](part.float()) for part in parts]).view(len(weight), -1)


def _eight_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [n, 32] -> uint8 [n, 34]."""
    scale = (blocks.abs().amax(1, keepdim=True) / _MOST).half()
    codes = _whole(blocks, scale.float(), -_MOST, _MOST).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), 1)


def _four_bits(blocks: torch.Tensor, search: bool) -> torch.Tensor:
    """Blocks [n, 32] -> uint8 [n, 20].

    A block's ends become the codes 0 and 15, or lie outside of them if the squared error is smaller so. Weights that
    have been rounded so before, such as those of llama.cpp's formats with four bits, keep their codes.
    """
    low, high = blocks.aminmax(dim=1, keepdim=True)
    # From the weight that is largest in magnitude to seven eighths of it on the other side of zero, as Q4_0 has it.
    from_zero = torch.minimum(low, -7 / 8 * high), torch.maximum(high, -7 / 8 * low)
    shrunk = [(low * below, high * above) for below, above in product(_SHRUNK, _SHRUNK)]
    small = _SAME * torch.linalg.vector_norm(blocks, dim=1, keepdim=True)
    scale, minimum = _grid(low, high)
    error = _error(blocks, scale, minimum) if search else small
    for ends in (from_zero, *shrunk):
        if bool((error <= small).all()):
            break
        others = _grid(*ends)
        other = _error(blocks, *others)
        better = other < error
        error = torch.where(better, other, error)
        scale, minimum = (torch.where(better, *pair) for pair in zip(others, (scale, minimum), strict=True))
    codes = _whole(blocks - minimum, scale, 0, _CODES - 1).to(torch.uint8)
    halves = torch.cat((scale, minimum), 1).half()
    return torch.cat((halves.view(torch.uint8), codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4), 1)


def _grid(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima [n, 1] of blocks whose codes reach from ``low`` to ``high`` [n, 1], in half precision."""
    return ((high - low) / (_CODES - 1)).half().float(), low.half().float()


def _whole(numbers: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """The whole numbers [n, 32] of scales [n, 1] that are nearest."""
    # Where all weights of a block are equal, there is no scale.
    return (numbers / scale.where(scale > 0, 1.0)).round_().clamp_(least, most)


def _error(blocks: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """How far blocks [n, 32] are from such a grid: the norms [n, 1] of the differences."""
    above = blocks - minimum
    above.addcmul_(_whole(above, scale, 0, _CODES - 1), scale, value=-1)
    return torch.linalg.vector_norm(above, dim=1, keepdim=True)
