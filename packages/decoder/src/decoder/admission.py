"""Which sequences may be decoded together: as many as memory has room for, up to a number."""

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from decoder.backends.memory import available_memory
from decoder.prefix_reuse import PrefixReuse
from decoder.sequence import Sequence

_CACHE_SHARE = 0.6  # the share of free memory that the caches of a batch may take
_CPU = torch.device("cpu")


class CacheBytes(NamedTuple):
    """Bytes on the model's device, and of host memory beside it, which offloaded caches take."""

    device: int
    host: int = 0


def memory_for_caches(device: torch.device, prefixes: PrefixReuse | None) -> CacheBytes:
    """Bytes that running sequences may take, beside what may yet be kept of ended ones."""
    kept = 0 if prefixes is None else prefixes.max_bytes - prefixes.nbytes
    return CacheBytes(*(max(0, available_memory(one) - kept) for one in (device, _CPU)))


class Admission:
    """The `scheduler.Fits` of an engine that decodes many sequences.

    Args:
        max_batch: how many sequences run together at most.
        memory: bytes that were available before the first of them.
    """

    def __init__(self, max_batch: int, memory: CacheBytes):
        self.max_batch = max_batch
        self.budget = CacheBytes(*(int(_CACHE_SHARE * available) for available in memory))
        self._needed: WeakKeyDictionary[Sequence, Callable[[Sequence], CacheBytes]] = WeakKeyDictionary()

    def check(self, needed: CacheBytes) -> None:
        """Raise ValueError if a cache of ``needed`` bytes could not even run alone."""
        if needed.device > self.budget.device:
            words = f"its cache of {needed.device:,} bytes does not fit the memory"
        elif needed.host > self.budget.host:
            words = f"its cache of {needed.host:,} bytes in host memory does not fit there"
        else:
            return
        raise ValueError(f"{words}: shorten it or max_new_tokens")

    def plan(self, sequence: Sequence, needed: Callable[[Sequence], CacheBytes]) -> None:
        """Count on the bytes that ``needed`` tells for the caches of a sequence, for as long as it exists.

        It is asked again and again, since a sequence of open length needs more as it grows.
        """
        self._needed[sequence] = needed

    def __call__(self, running: list[Sequence], candidate: Sequence) -> bool:
        """Whether ``candidate`` may join those that are running, or grow where nobody else does."""
        if len(running) >= self.max_batch:
            return False
        planned = zip(*(self._needed[one](one) for one in [*running, candidate]), strict=True)
        return all(sum(needed) <= most for needed, most in zip(planned, self.budget, strict=True))
