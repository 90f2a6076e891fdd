"""Reuse of cache buffers: a finished sequence's serve the next one, with the passes that were recorded over them."""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from decoder.backends.cuda.cuda_graphs import FixedPass
    from decoder.cache.base import LayeredCache

# Capacities are rounded to multiples of 256 slots, or to 16 steps from one power of two to the next.
_SMALLEST_STEP = 256
_STEPS = 16
_MOST_TIMES_LARGER = 2


class Buffers(NamedTuple):
    """The part of a cache that recorded passes refer to, so that it can be handed on to another cache."""

    capacity: int
    keys: torch.Tensor
    values: torch.Tensor
    kv_length: torch.Tensor
    passes: "dict[tuple, FixedPass]"


class BufferPool:
    """Lends a new cache the buffers of one that is gone, so that a sequence replays what an earlier one has recorded.

    Recording the passes of all widths takes seconds, as long as generating some hundred tokens. A recorded pass reads
    the sequence's length from device memory and ignores what lies behind it in the buffers, so buffers may be larger
    than needed and may hold remains of earlier sequences. The pool keeps one set of buffers for full caches, of the
    sequence that ended last, and one for draft caches. Buffers more than twice as large as the next sequence needs are
    freed before it begins.

    Args:
        device: the device of the buffers.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._waiting: dict[str, Buffers] = {}
        self._state: object = None
        self._generation = 0

    def lend(self, cache: "LayeredCache") -> None:
        """Give a cache that has no buffers the waiting ones if they fit, else round its capacity so that others fit."""
        waiting = self._waiting.pop(cache.purpose, None)
        cache.pool, cache.pool_generation = self, self._generation
        if waiting is not None and cache.capacity <= waiting.capacity <= _MOST_TIMES_LARGER * rounded(cache.capacity):
            cache.take_over(waiting)
        else:
            cache.capacity = rounded(cache.capacity)

    def give_back(self, cache: "LayeredCache") -> None:
        """Take the buffers of a cache that is no longer needed, unless the model has changed since they were lent."""
        if len(cache.keys) and cache.pool_generation == self._generation:
            self._waiting[cache.purpose] = cache.buffers()

    def renew(self, state: object) -> None:
        """Free all buffers if ``state``, what recorded passes have taken from the model, differs from the last one.

        Buffers that are still lent are then not taken back, either.
        """
        if state != self._state:
            self._state = state
            self._generation += 1
            self.clear()

    def clear(self) -> None:
        """Free the buffers that are not lent."""
        self._waiting.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are not lent."""
        return sum(waiting.keys.nbytes + waiting.values.nbytes for waiting in self._waiting.values())


def rounded(capacity: int) -> int:
    """``capacity`` rounded up by at most a sixteenth (or 256 slots), so that sequences of like length share buffers."""
    step = max(_SMALLEST_STEP, (1 << capacity.bit_length()) // (2 * _STEPS))
    return -(-capacity // step) * step
