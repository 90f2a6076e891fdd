"""Buffers of finished texts, kept with the passes that were recorded over them, for the texts that follow."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.kernels.cuda_graphs import FixedPass

if TYPE_CHECKING:
    from decoder.cache.base import LayeredCache

_SMALLEST_STEP = 256
_STEPS = 16  # from one power of two to the next
_MOST_TIMES_LARGER = 2


class Buffers(NamedTuple):
    """What recorded passes know of a cache."""

    capacity: int
    keys: torch.Tensor
    values: torch.Tensor
    kv_length: torch.Tensor
    passes: dict[tuple, FixedPass]


class BufferPool:
    """Lends caches the buffers of one that has gone, so that a text replays what an earlier one has recorded.

    To record the passes of all widths takes seconds, as long as some hundred tokens. Recorded passes read a text's
    length from device memory and nothing of the buffers behind it, so larger buffers serve as well, and what earlier
    texts have left in them means nothing. At most one text's buffers wait, those of the text that has ended last, and
    one draft cache's. Buffers that are more than twice as
    large as the next text needs are freed before it begins.

    Args:
        device: where the buffers are.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._waiting: dict[str, Buffers] = {}
        self._state: object = None
        self._generation = 0

    def lend(self, cache: "LayeredCache") -> None:
        """Give a cache that has no buffers yet those that wait, or round its capacity so that others may have them."""
        waiting = self._waiting.pop(cache.purpose, None)
        cache.pool, cache.pool_generation = self, self._generation
        if waiting is not None and cache.capacity <= waiting.capacity <= _MOST_TIMES_LARGER * rounded(cache.capacity):
            cache.take_over(waiting)
        else:
            cache.capacity = rounded(cache.capacity)

    def give_back(self, cache: "LayeredCache") -> None:
        """Keep the buffers of a cache that nobody needs any more, unless the model has changed since it got them."""
        if len(cache.keys) and cache.pool_generation == self._generation:
            self._waiting[cache.purpose] = cache.buffers()

    def renew(self, state: object) -> None:
        """Forget all buffers if ``state``, all that recorded passes have taken from the model, is another than before.

        What is still lent will not come back, either.
        """
        if state != self._state:
            self._state = state
            self._generation += 1
            self.clear()

    def clear(self) -> None:
        """Free the buffers that wait."""
        self._waiting.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that wait."""
        return sum(waiting.keys.nbytes + waiting.values.nbytes for waiting in self._waiting.values())


def rounded(capacity: int) -> int:
    """The next of a few capacities, at most a sixteenth (or 256 slots) larger, that texts of like length share."""
    step = max(_SMALLEST_STEP, (1 << capacity.bit_length()) // (2 * _STEPS))
    return -(-capacity // step) * step
