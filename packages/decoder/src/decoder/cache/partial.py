"""TokenSwift's partial KV cache: attention sinks and the most important entries of the full one (paper section 3.4)."""

from collections.abc import Mapping

import torch

from decoder.cache.draft import DraftCache
from decoder.cache.full import FullCache

_PIECE = 4096  # keys of one product


class PartialCache(DraftCache):
    """At most ``budget`` entries per KV head, chosen by importance.

    The first ``sink`` positions stay. The other slots hold the most important entries in decreasing order; accepted
    tokens replace them from the end towards the sink, and when they would pass it the selection is made anew. As long
    as the whole sequence fits, the cache simply holds all of it.

    Args:
        budget: slots for committed tokens, |B| in the paper.
        sink: how many of them are for sink positions, |S|.
        dynamic: whether to select again when accepted tokens have replaced all entries but the sink's. If False,
            replacement starts again from the end instead.
        room: slots for drafted tokens; a single draft pass needs one.

    Attributes:
        rebuilds: how often entries were selected.
    """

    def __init__(self, budget: int, sink: int, dynamic: bool = True, room: int = 1):
        super().__init__(budget, room)
        self.sink, self.dynamic = sink, dynamic
        self.rebuilds = 0
        self._seen = 0
        self._cursor = 0

    def append(self, full: FullCache, queries: Mapping[int, torch.Tensor], newest: int = -1) -> None:
        """Add the tokens that ``full`` has committed since the last call.

        Args:
            queries: by layer, queries [B, H, T, D] of some tokens; they are read only when a rebuild is due.
            newest: index, among these tokens, of the newest committed one.
        """
        self.follow(full)
        new = full.length - self._seen
        if not new:
            return
        if self._filled == self._seen and full.length <= self.budget:
            self._copy(full, slot=self._filled, count=new)
            self._filled += new
        elif self._filled == self._seen or (self.dynamic and self._cursor - new < self.sink):
            self.rebuild(full, queries, newest)
        else:
            if self._cursor - new < self.sink:
                self._cursor = self.budget
            count = min(new, self._cursor - self.sink)
            self._cursor -= count
            self._copy(full, slot=self._cursor, count=count)
        self._seen = full.length
        self._held = 0

    def rebuild(self, full: FullCache, queries: Mapping[int, torch.Tensor], newest: int = -1) -> None:
        """Select anew: the sink, then the entries of highest importance in decreasing order.

        The importance of key i for a KV head is q . K_i, summed over the query heads q of its group. Since the product
        is linear, the queries are summed first: one product with the keys suffices, and no key is replicated.
        """
        wanted = self.budget - self.sink
        self.allocate_as(full)
        for place, layer in enumerate(full.layout.full):
            key, value = full.layer(layer)
            query = queries[layer][:, :, newest]
            batch, groups = key.shape[:2]
            summed = query.view(batch, groups, -1, query.shape[-1]).sum(2, keepdim=True)
            importance = products(summed, ranked(key, value, query)[:, :, self.sink :])
            chosen = importance.topk(wanted, dim=-1).indices + self.sink
            for mine, theirs in ((self.keys[place], key), (self.values[place], value)):
                mine[:, :, : self.sink] = theirs[:, :, : self.sink]
                index = chosen[..., None].expand(-1, -1, -1, theirs.shape[3])
                mine[:, :, self.sink : self.budget] = theirs.gather(2, index)
        self._filled = self._cursor = self.budget
        self.rebuilds += 1

    def _copy(self, full: FullCache, slot: int, count: int) -> None:
        """Copy the newest ``count`` entries of ``full`` to the slots from ``slot`` on."""
        self.allocate_as(full)
        if not len(self.keys):
            return  # no layer attends to the whole sequence
        newest = full.span(full.length - count, full.length)
        for mine, theirs in zip((self.keys, self.values), newest, strict=True):
            mine[:, :, :, slot : slot + count] = theirs


def ranked(key: torch.Tensor, value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What queries [..., Dq] are multiplied with to rank entries: keys [..., D], or all that is kept if it is both."""
    return key if key.shape[-1] == query.shape[-1] else torch.cat((key, value), -1)


def products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The products [B, G, n] of ``query`` [B, G, 1, D] with n ``keys`` [B, G, n, D].

    They are made in pieces of one size. A product with all keys copies them in bf16, and as the sequence grows no copy
    fits where an earlier one was: behind 100,000 tokens a process held 250 MB of such holes.
    """
    count = keys.shape[2]
    size = min(count, _PIECE)
    found = keys.new_empty(*keys.shape[:2], count)
    for start in range(0, count, size):
        start = min(start, count - size)  # the last piece ends with the last key
        piece = slice(start, start + size)
        found[:, :, piece] = (query @ keys[:, :, piece].transpose(-1, -2)).squeeze(2)
    return found
