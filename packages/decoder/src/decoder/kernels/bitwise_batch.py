"""Attention by position of several short texts, whose caches stand beside each other, in one product for all of them.

Every text's scores take as many columns as the longest one's and as many rows as the one with the most. What a text
does not have of these has no weight, and does not change its bits: a sum keeps its order when zeros are added to it. So
each token has the bits that `bitwise_attention` gives it alone, which is tested when a model is loaded.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch.nn import functional

from decoder.kernels.bitwise_attention import COLUMNS, BitwiseText, TailGroup, wide_dtype

Product = tuple[int | None, Sequence[int], int]
"""Whose rows a product takes for each KV head: the text's number in the pass (None: nobody's), which of the text's new
tokens, and how many rows that makes with their padding."""

# Of a chain, and of a cache whose text takes no part: where keys stand, and that all are seen.
_COLUMNS = torch.arange(COLUMNS)
_ALL_SEEN = torch.zeros(1, COLUMNS)


class BatchedTexts:
    """Texts of one pass that share products: one group of tokens each, whose caches are in one block of buffers.

    The products cover all caches of the block from the first to the last one of these texts, n of them. Those of other
    texts take part with queries of somebody else, and nobody reads what comes out.

    Attributes:
        sources: its products, by the caches' places.

    Args:
        texts: by their numbers in the pass; each has one group, whose keys one softmax covers.
        per_head: rows per token: the query heads that share a KV head.
    """

    def __init__(self, texts: Mapping[int, BitwiseText], per_head: int):
        by_place = {text.pairs.place: (number, text) for number, text in texts.items()}
        first, end = min(by_place), max(by_place) + 1
        rule = next(iter(texts.values())).rule
        rows = max(per_head * text.count for text in texts.values())
        self._rows = rows + -rows % rule.multiple
        self.sources: list[Product] = []
        groups: list[TailGroup | None] = []
        for place in range(first, end):
            number, text = by_place.get(place, (None, None))
            groups.append(None if text is None else text.groups[0])
            self.sources.append((number, () if text is None else text.groups[0].nodes, self._rows))
        self._make(list(texts.values()), groups, slice(first, end), per_head)

    def _make(self, texts: list[BitwiseText], groups: list[TailGroup | None], places: slice, per_head: int) -> None:
        """Make what all layers share."""
        block = texts[0].pairs.block
        kv_heads, slots = block.keys.shape[2:4]
        starts = torch.tensor([0 if group is None else group.start for group in groups])
        # Behind the tail's own columns one more for each wide tree: all have the same number.
        width = max(group.width for group in groups if group is not None)
        self._before = int(starts.max())
        columns = self._before + width
        for text in texts:
            text.pairs.make_finite(columns)
        in_order = torch.stack([self._by_row(group, per_head) for group in groups])  # [n, rows, COLUMNS]

        def per_kv_head(each: torch.Tensor) -> torch.Tensor:
            return each[:, None].expand(-1, kv_heads, -1, -1).flatten(0, 1)

        self._tail = per_kv_head(in_order + starts[:, None, None])
        self._spread = per_kv_head(in_order) if any(group and group.columns is not None for group in groups) else None
        wide = wide_dtype(block.keys.dtype)
        self._seen_in_tail = per_kv_head(torch.stack([self._mask(group, per_head) for group in groups])).to(wide)
        before = torch.zeros(len(groups), 1, self._before, dtype=wide)
        before.masked_fill_(torch.arange(self._before) >= starts[:, None, None], -torch.inf)
        self._seen_before = per_kv_head(before)
        self._width = width
        self._no_scores = torch.zeros(1, 1, 1, dtype=wide)
        # The tails' values, in all rows of the block's slots.
        of_head = torch.arange(places.start * kv_heads, places.stop * kv_heads).view(-1, kv_heads, 1) * slots
        self._tail_values = (of_head + (starts[:, None] + torch.arange(width))[:, None]).flatten()
        keys = block.keys[:, places].flatten(1, 2)
        self._keys = keys.narrow(2, 0, columns).mT.unbind()
        self._values = block.values.flatten(1, 3).unbind()
        self._values_before = block.values[:, places].flatten(1, 2).narrow(2, 0, self._before).unbind()

    def _by_row(self, group: TailGroup | None, per_head: int) -> torch.Tensor:
        """For each row, in which of the tail's columns its keys stand, in the order of the text: [rows, COLUMNS]."""
        if group is None or group.columns is None:
            return _COLUMNS.expand(self._rows, -1)
        return group.in_order[_nodes_of_rows(group.count, per_head, self._rows)]

    def _mask(self, group: TailGroup | None, per_head: int) -> torch.Tensor:
        """What is added to the scores of these keys: [rows, COLUMNS]."""
        if group is None:
            return _ALL_SEEN.expand(self._rows, -1)
        mask = group.mask[_nodes_of_rows(group.count, per_head, self._rows)]
        committed = COLUMNS - mask.shape[1]
        return functional.pad(mask, (committed, 0)) if committed else mask

    def attend(
        self, texts: Sequence[BitwiseText], rows: torch.Tensor, per_head: int, layer: int, scaling: float
    ) -> torch.Tensor:
        """[n x G, rows, Dv] of the queries [n x G, rows, D] of a layer; ``texts`` are those of the pass."""
        # Scaled as for a text alone: a product that scales its own operands rounds otherwise.
        scores = torch.baddbmm(self._no_scores, rows, self._keys[layer], beta=0, alpha=scaling)
        tail = scores.gather(2, self._tail).add_(self._seen_in_tail)
        if self._before:
            tail = torch.cat((scores.narrow(2, 0, self._before) + self._seen_before, tail), 2)
        before, weights = tail.softmax(-1).split_with_sizes((self._before, COLUMNS), 2)
        if self._spread is not None:
            # Back to where the tokens' values stand.
            weights = weights.new_zeros(*weights.shape[:2], self._width).scatter_(2, self._spread, weights)
        value = self._values[layer].index_select(0, self._tail_values).view(len(rows), -1, self._values[0].shape[-1])
        output = torch.bmm(weights, value)
        if self._before:
            # Multiplied and added one after the other: both at once may be another number in another loop.
            output.add_(torch.bmm(before, self._values_before[layer]))
        return output


@lru_cache(maxsize=512)
def _nodes_of_rows(count: int, per_head: int, rows: int) -> torch.Tensor:
    """Which of a group's nodes each row belongs to, int64 [rows]; padding comes again from the first row."""
    return torch.arange(count).repeat(per_head)[torch.arange(rows) % (per_head * count)]
