"""StreamingLLM's memory (arXiv 2309.17453): attention sinks and a window of the newest pairs; SnapKV's beside it."""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from decoder.cache.base import LayeredCache
from decoder.cache.draft import DraftCache
from decoder.cache.full import FullCache
from decoder.kernels.transfers import upload

_NEIGHBOURS = 7


class RecentCache(DraftCache):
    """The first ``sink`` positions and the newest ``budget - sink`` ones, which go round in a ring.

    Keys keep their original rotary positions, as in the partial cache, so a pair is copied once and never touched.

    Args:
        budget: slots in all.
        sink: sink positions among them.
        room: drafted tokens behind them.
    """

    def __init__(self, budget: int, sink: int, room: int):
        super().__init__(budget, room)
        self.sink = sink
        self.seen = 0

    def append(self, full: FullCache) -> None:
        """Take in what ``full`` committed since the last call."""
        self._commit(full, start=self.seen, count=full.length - self.seen)

    def observe(self, full: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        """Put the pairs that the end of the text attends to most in the place of the sink (SnapKV, arXiv 2404.14469).

        Called once, after the prompt was appended; a text that the cache holds whole stays as it is. Each KV head
        chooses its own among the pairs outside the window: the attention of the last queries of its group, summed,
        smoothed over neighbours by a maximum of 7, so that what stands around an important pair comes along.

        Args:
            queries: per layer, [B, H, T, D], those of the T newest tokens.
        """
        if full.length <= self.budget:
            return
        outside = full.length - (self.budget - self.sink)
        for layer, query in queries.items():
            key, value = full.keys[layer][:, :, :outside], full.values[layer][:, :, :outside]
            batch, groups, _, dim = key.shape
            packed = query.reshape(batch, groups, -1, dim)
            weights = (packed @ key.transpose(-1, -2) * dim**-0.5).softmax(-1).sum(2)
            smoothed = F.max_pool1d(weights, _NEIGHBOURS, stride=1, padding=_NEIGHBOURS // 2)
            index = smoothed.topk(self.sink, dim=-1).indices[..., None]
            for mine, theirs in ((self.keys[layer], key), (self.values[layer], value)):
                mine[:, :, : self.sink] = theirs.gather(2, index.expand(-1, -1, -1, theirs.shape[3]))

    def commit(self, count: int) -> None:
        """Commit the first ``count`` drafted tokens: they were no guesses but the text itself."""
        self._commit(self, start=self._filled, count=count)

    def _commit(self, source: LayeredCache, start: int, count: int) -> None:
        """Copy ``count`` pairs from slot ``start`` on in ``source``, the positions from ``seen`` on."""
        end = self.seen + count
        window = self.budget - self.sink
        first = max(self.seen, end - window)
        positions = [*range(self.seen, min(self.sink, first)), *range(first, end)]
        if positions:
            self.allocate_as(source)
            slots = [p if p < self.sink else self.sink + (p - self.sink) % window for p in positions]
            taken, slots = upload([[p - self.seen + start for p in positions], slots], self.keys.device)
            for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
                mine.index_copy_(3, slots, theirs.index_select(3, taken))
        self.seen = end
        self._filled = min(self.budget, end)
        self._held = 0
