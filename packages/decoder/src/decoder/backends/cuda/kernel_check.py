"""The test of split-KV attention on a device: against one softmax, at the model's own shapes. Inputs are random."""

from collections.abc import Callable

import torch

from decoder.backends.attention import Scores
from decoder.backends.base import AttentionShape
from decoder.backends.check import ALLOWED, difference
from decoder.backends.cuda import split_kv
from decoder.backends.reference.attention import masked_softmax

# New tokens of a pass, and whether they are a tree: a draft, a tree, a wide tree, a chunk of a prompt. Each has its own
# tile sizes and is compiled when it first runs.
_PASSES = ((1, False), (8, True), (64, True), (300, False))
_LENGTHS = (0, 77, 1500)  # cached tokens: none, less than a block, many blocks
_SPARE = 33  # slots behind them, which hold NaN


@torch.inference_mode()
def split_kv_fault(shape: AttentionShape, device: torch.device) -> str | None:
    """Test the split-KV kernel against one softmax in float64, for several widths and lengths."""
    random = _random(shape.dtype, device)
    slots = max(_LENGTHS) + max(new for new, _ in _PASSES) + _SPARE
    whole = [random(1, shape.kv_heads, slots, size) for size in (shape.dim, shape.value_dim)]
    scaling = shape.dim**-0.5
    for new, tree in _PASSES:
        query = random(1, new, shape.heads, shape.dim).transpose(1, 2)
        mask = _tree_mask(new, device) if tree else None
        for length in _LENGTHS:
            end = length + new
            key, value = (buffer.clone() for buffer in whole)
            key[:, :, end:] = value[:, :, end:] = torch.nan
            on_device = torch.tensor([length], device=device)
            actual = split_kv.split_kv_attention(query, key, value, on_device, mask, scaling)
            blocked = torch.ones(new, new, dtype=torch.bool, device=device).triu(1) if mask is None else ~mask
            seen = key[:, :, :end].double(), value[:, :, :end].double()
            expected = masked_softmax(query.double(), *seen, blocked, Scores(scaling))
            fault = difference(actual, expected, ALLOWED[shape.dtype])
            if fault:
                return f"{fault} at {new} tokens behind {length}"
    return None


def _random(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

    return random


def _tree_mask(new: int, device: torch.device) -> torch.Tensor:
    """The mask of a binary tree, in which each token sees itself and its ancestors."""
    mask = torch.eye(new, dtype=torch.bool)
    for node in range(1, new):
        mask[node] |= mask[(node - 1) // 2]
    return mask.to(device)
