"""Which texts may be decoded together: as many as memory has room for, up to a number."""

from weakref import WeakKeyDictionary

import torch

from decoder.kernels.memory import available_memory
from decoder.prefix_reuse import PrefixReuse
from decoder.sequence import Sequence

_CACHE_SHARE = 0.6  # the share of free memory that the caches of a batch may take


def memory_for_caches(device: torch.device, prefixes: PrefixReuse | None) -> int:
    """Bytes that running texts may take, beside what may yet be kept of ended ones."""
    memory = available_memory(device)
    if prefixes is None:
        return memory
    return max(0, memory - (prefixes.max_bytes - prefixes.nbytes))


class Admission:
    """The `engine.Fits` of an engine that decodes many texts.

    Args:
        max_batch: how many texts run together at most.
        memory: bytes that were available before the first of them.
    """

    def __init__(self, max_batch: int, memory: int):
        self.max_batch = max_batch
        self.budget = int(_CACHE_SHARE * memory)
        self._planned: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def check(self, needed: int) -> None:
        """Raise ValueError if a cache of ``needed`` bytes could not even run alone."""
        if needed > self.budget:
            raise ValueError(f"its cache of {needed:,} bytes does not fit the memory: shorten it or max_new_tokens")

    def plan(self, sequence: Sequence, needed: int) -> None:
        """Count on ``needed`` bytes for the caches of a sequence, for as long as it exists."""
        self._planned[sequence] = needed

    def __call__(self, running: list[Sequence], candidate: Sequence) -> bool:
        """Whether ``candidate`` may join those that are running."""
        if len(running) >= self.max_batch:
            return False
        return sum(self._planned[one] for one in [*running, candidate]) <= self.budget
