"""StreamingLLM's KV cache (arXiv 2309.17453), sinks and a window of the newest entries; SnapKV's selection for it."""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from decoder.backends.transfers import upload
from decoder.cache.base import LayeredCache
from decoder.cache.draft import DraftCache
from decoder.cache.full import FullCache
from decoder.cache.partial import ranked

_NEIGHBOURS = 7  # width of the maximum that smooths attention weights (SnapKV)


class RecentCache(DraftCache):
    """The first ``sink`` positions and the newest ``budget - sink`` ones, which go round in a ring.

    Keys keep their original rotary positions, as in the partial cache, so an entry is copied once and never touched.

    Args:
        budget: slots for committed tokens.
        sink: how many of them are for sink positions.
        room: slots for drafted tokens.

    Attributes:
        seen: how many tokens of the sequence were added so far, whether their entries are still here or not.
    """

    def __init__(self, budget: int, sink: int, room: int):
        super().__init__(budget, room)
        self.sink = sink
        self.seen = 0

    def append(self, full: FullCache) -> None:
        """Add the tokens that ``full`` has committed since the last call."""
        self.follow(full)
        self._commit(full, start=self.seen, count=full.length - self.seen)

    def select(self, full: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        """Replace the sink by the entries that the end of the prompt attends to most (SnapKV, arXiv 2404.14469).

        It is called once, after the prompt was appended, and does nothing if the cache holds the whole prompt. Each KV
        head selects among the entries outside the window. The score of an entry is the attention that it gets from the
        given queries of the head's group, summed, and then the maximum over 7 neighbours, so that the entries around an
        important one are selected with it.

        Args:
            queries: by layer, the queries [B, H, T, D] of the T newest tokens.
        """
        if full.length <= self.budget:
            return
        outside = full.length - (self.budget - self.sink)
        for place, layer in enumerate(full.layout.full):
            query = queries[layer]
            key, value = (states[:, :, :outside] for states in full.layer(layer))
            batch, groups, dim = *key.shape[:2], query.shape[-1]
            packed = query.reshape(batch, groups, -1, dim)
            weights = (packed @ ranked(key, value, query).transpose(-1, -2) * dim**-0.5).softmax(-1).sum(2)
            smoothed = F.max_pool1d(weights, _NEIGHBOURS, stride=1, padding=_NEIGHBOURS // 2)
            index = smoothed.topk(self.sink, dim=-1).indices[..., None]
            for mine, theirs in ((self.keys[place], key), (self.values[place], value)):
                mine[:, :, : self.sink] = theirs.gather(2, index.expand(-1, -1, -1, theirs.shape[3]))

    def commit(self, count: int) -> None:
        """Commit the first ``count`` tokens of a draft pass, which was run over the sequence itself, not over guesses.

        Only for a cache that follows no full one.
        """
        for state in self.states.values():
            state.keep(range(count))
        self._commit(self, start=self._filled, count=count)

    def _commit(self, source: LayeredCache, start: int, count: int) -> None:
        """Copy the entries of the sequence's next ``count`` tokens, which are in ``source`` from slot ``start`` on."""
        end = self.seen + count
        window = self.budget - self.sink
        first = max(self.seen, end - window)
        positions = [*range(self.seen, min(self.sink, first)), *range(first, end)]
        self.allocate_as(source)
        if positions and len(self.keys):
            slots = [p if p < self.sink else self.sink + (p - self.sink) % window for p in positions]
            taken, slots = upload([[p - self.seen + start for p in positions], slots], self.keys.device)
            for mine, theirs in zip((self.keys, self.values), source.at(taken), strict=True):
                mine.index_copy_(3, slots, theirs)
        self.seen = end
        self._filled = min(self.budget, end)
        self._held = 0
