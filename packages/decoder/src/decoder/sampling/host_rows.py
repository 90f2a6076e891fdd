"""Rows of logits on the host, changed by NumPy.

PyTorch shares an operator on more than 32,768 numbers among threads, which then wait for some milliseconds for the next
one, on the cores that the native library's threads need for the next pass.
"""

import numpy as np
import torch

_MINUS_INFINITY = np.int16(-128)  # the bits of it in bfloat16


def without(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """A copy of logits [V] with -inf for the tokens that are not ``allowed``, bool [V]."""
    if logits.dtype == torch.bfloat16:
        bits = np.where(allowed.numpy(), logits.view(torch.int16).numpy(), _MINUS_INFINITY)
        return torch.from_numpy(bits).view(torch.bfloat16)
    numbers = logits.numpy()
    return torch.from_numpy(np.where(allowed.numpy(), numbers, numbers.dtype.type(-np.inf)))


def in_float32(logits: torch.Tensor) -> torch.Tensor:
    """A copy of logits [V] in float32."""
    if logits.dtype == torch.bfloat16:
        bits = logits.view(torch.int16).numpy().astype(np.uint32) << 16
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(logits.numpy().astype(np.float32))
