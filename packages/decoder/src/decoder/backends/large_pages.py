"""Memory for weights and for keys and values, in large pages where the system has them.

Reading weights once per step walks through more pages of 4 KiB than a processor has addresses at hand for: in pages of
2 MiB two cores were measured to read them a third faster. Linux gives these where a program asks for them before it
writes, and only where all of a page belongs to one mapping. Matrices of layers are smaller than that, so they share
mappings.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

_PAGE = 1 << 21
_MAPPED = 1 << 25  # bytes at once
_LINE = 64  # of the cache

_lock = threading.Lock()
_last: tuple[weakref.ref[mmap.mmap], int] | None = None  # the mapping that is being filled, and how far it is


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU. Their memory is given back when no tensor of the same mapping is left."""
    count = math.prod(shape)
    if not count or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device="cpu")
    buffer, offset = _room(count * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(*shape)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of any value, in a mapping of their own on the CPU where they are many: sequences come and go."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < 2 * _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    buffer, offset = _mapping(size)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset).view(*shape)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _room(size: int) -> tuple[mmap.mmap, int]:
    """Where there is room for so many bytes: a mapping and the place in it."""
    global _last
    with _lock:
        buffer, offset = (None, 0) if _last is None else (_last[0](), _last[1])
        if buffer is None or offset + size > len(buffer):
            buffer, offset = _mapping(max(_MAPPED, size))
        _last = weakref.ref(buffer), -(-(offset + size) // _LINE) * _LINE
        return buffer, offset


def _mapping(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where its first large page begins, from which on there is room for so many bytes."""
    buffer = mmap.mmap(-1, -(-size // _PAGE) * _PAGE + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the system has none
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer, -torch.frombuffer(buffer, dtype=torch.uint8, count=1).data_ptr() % _PAGE
