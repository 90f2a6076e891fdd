"""Rows of logits on the host, changed by NumPy.

PyTorch shares an operator on more than 32,768 numbers among threads, which then wait for some milliseconds for the next
one, on the cores that the native library's threads need for the next pass.
"""

import numpy as np
import torch

from decoder.backends.transfers import on_host

_MINUS_INFINITY = np.int16(-128)  # the bits of it in bfloat16


def without(logits: torch.Tensor, allowed: torch.Tensor | None, suppressed: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of logits [V] with -inf for tokens that are not ``allowed``, bool [V], and for the ids ``suppressed``."""
    is_bf16 = logits.dtype == torch.bfloat16
    numbers = (logits.view(torch.int16) if is_bf16 else logits).numpy(force=True)
    least = _MINUS_INFINITY if is_bf16 else numbers.dtype.type(-np.inf)
    left = numbers.copy() if allowed is None else np.where(allowed.numpy(force=True), numbers, least)
    if suppressed is not None:
        ids = suppressed.numpy()
        left[ids[ids < len(left)]] = least
    return torch.from_numpy(left).view(logits.dtype)


def copied(numbers: torch.Tensor) -> torch.Tensor:
    """A copy of numbers [V], on any device."""
    return torch.from_numpy(numbers.numpy().copy()) if on_host(numbers) else numbers.clone()


def above_zero(counts: torch.Tensor) -> torch.Tensor:
    """Which of some counts [V] are, bool [V], on any device."""
    return torch.from_numpy(counts.numpy() > 0) if on_host(counts) else counts > 0


def in_float32(logits: torch.Tensor) -> torch.Tensor:
    """A copy of logits [V] in float32."""
    if logits.dtype == torch.bfloat16:
        bits = logits.view(torch.int16).numpy(force=True).astype(np.uint32) << 16
        return torch.from_numpy(bits.view(np.float32))
    return torch.from_numpy(logits.numpy(force=True).astype(np.float32))
