"""Attention by position of all texts of a pass: which rows each product takes, and which texts share products.

Most of a small model's step is calls, and attention text by text makes the same ones for each text. So short texts
whose caches stand beside each other share them; `bitwise_batch` says how.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from decoder.kernels.bitwise_attention import BitwiseText, in_one_softmax
from decoder.kernels.bitwise_batch import BatchedTexts, Product

# What the calls for one text and layer take, some 130 us on two cores, counted in multiplications of a number of a
# query with one of a key or value. Reading such a number takes as long as a few of them.
_CALLS = 1_300_000
_READING = 4


class _Part(Protocol):
    """Some rows of a pass that are computed together.

    Attributes:
        sources: its products.
    """

    sources: list[Product]

    def attend(
        self, texts: Sequence[BitwiseText], rows: torch.Tensor, per_head: int, layer: int, scaling: float
    ) -> torch.Tensor:
        """[n x G, rows, Dv] of queries [n x G, rows, D]; ``texts`` are those of the pass."""


class _OneGroup:
    """A group of tokens of one text alone."""

    def __init__(self, number: int, text: BitwiseText, group_index: int, per_head: int):
        # No reference to the text, which keeps the plan of a pass: its cache is to go as soon as it ends.
        self._number, self._index = number, group_index
        group, multiple = text.groups[group_index], text.rule.multiple
        rows = per_head * group.count
        self.sources: list[Product] = [(number, group.nodes, rows + -rows % multiple)]

    def attend(
        self, texts: Sequence[BitwiseText], rows: torch.Tensor, per_head: int, layer: int, scaling: float
    ) -> torch.Tensor:
        return texts[self._number].attend_rows(self._index, rows, per_head, layer, scaling)


class _Layout(NamedTuple):
    """Where the query rows of all products of a pass come from, and where their outputs go.

    The rows of a product are those of its query heads one after the other, each with all its tokens, and then padding.

    Attributes:
        sources: for each row, which one of the pass's heads it is, token by token, int64 [rows of all products].
        places: for each query head, token by token, which row it is, int64 [T x H].
    """

    sources: torch.Tensor
    places: torch.Tensor


@lru_cache(maxsize=128)  # a chunk of a prompt takes a few hundred kilobytes
def _layout(products: tuple[Product, ...], tokens: int, all_heads: int, heads: int, kv_heads: int) -> _Layout:
    """The layout of a pass.

    Args:
        products: of each, in place of the text's number, the place of the text's first token in the pass.
        tokens: T of the pass; those behind the texts' own are padding, which gets the outputs of the first one.
        all_heads: how many heads a token has, of which the first ``heads``, H, are its queries.
    """
    per_head = heads // kv_heads
    of_heads = torch.arange(heads).view(kv_heads, per_head, 1)
    places = torch.full((tokens, heads), -1)
    sources: list[torch.Tensor] = []
    count = 0
    for first, nodes, rows in products:
        own = torch.tensor([0] if first is None else nodes) + (first or 0)
        source = (own * all_heads + of_heads).view(kv_heads, -1)
        sources.append(source[:, torch.arange(rows) % source.shape[1]].flatten())
        if first is not None:
            of_text = torch.arange(kv_heads * rows).view(kv_heads, -1)[:, : per_head * len(own)] + count
            places[own] = of_text.view(heads, len(own)).T
        count += kv_heads * rows
    places = torch.where(places < 0, places[0], places)
    return _Layout(torch.cat(sources), places.flatten())


class AttentionPlan:
    """What all layers of a pass share, made by the first of them.

    Args:
        texts: of the pass, whose new tokens stand behind each other.
        tokens, all_heads, heads, kv_heads: as for `_layout`.
        dtype: of queries.
        all_together: whether texts share products wherever they can, and not only where it is faster.
    """

    def __init__(
        self,
        texts: Sequence[BitwiseText],
        tokens: int,
        all_heads: int,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        all_together: bool,
    ):
        self.per_head, self.kv_heads = heads // kv_heads, kv_heads
        firsts, first = [], 0
        for text in texts:
            firsts.append(first)
            first += text.count
        batches = _batches(texts, dtype) if len(texts) > 1 else []
        if not all_together:
            batches = [_worth_sharing(batch, self.per_head) for batch in batches]
        self.parts: list[_Part] = [BatchedTexts(batch, self.per_head) for batch in batches if batch]
        batched = {number for part in self.parts for number, _, _ in part.sources}
        self.parts += [
            _OneGroup(number, text, index, self.per_head)
            for number, text in enumerate(texts)
            if number not in batched
            for index in range(len(text.groups))
        ]
        self.counts = [kv_heads * sum(rows for _, _, rows in part.sources) for part in self.parts]
        products = tuple(
            (None if number is None else firsts[number], nodes, rows)
            for part in self.parts
            for number, nodes, rows in part.sources
        )
        self.layout = _layout(products, tokens, all_heads, heads, kv_heads)

    def attend(
        self, part: _Part, texts: Sequence[BitwiseText], rows: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """[rows, Dv] of a part's rows of queries [rows, D]."""
        rows = rows.view(len(part.sources) * self.kv_heads, -1, rows.shape[1])
        output = part.attend(texts, rows, self.per_head, layer, scaling)
        return output.view(-1, output.shape[-1])


def _batches(texts: Sequence[BitwiseText], dtype: torch.dtype) -> list[dict[int, BitwiseText]]:
    """The texts that can share products, by their numbers: those whose caches stand beside each other."""
    beside: dict[int, dict[int, BitwiseText]] = {}
    for number, text in enumerate(texts):
        if text.pairs.block is None or not text.rule.batched or len(text.groups) > 1:
            continue
        [group], (uneven, even) = text.groups, text.rule.uneven
        if group.width <= text.rule.in_order and in_one_softmax(group, dtype) and not uneven <= group.start < even:
            beside.setdefault(id(text.pairs.block), {})[number] = text
    return list(beside.values())


def _worth_sharing(texts: dict[int, BitwiseText], per_head: int) -> dict[int, BitwiseText]:
    """Those of the texts of a block that are faster together than alone.

    A product for several takes all caches from the first to the last one, for each as many columns and rows as for the
    largest. So long texts, or those with many nodes, are left out where that would cost more than their own calls.
    """
    pairs = next(iter(texts.values())).pairs
    numbers = pairs.keys.shape[2] * (pairs.keys.shape[4] + pairs.values.shape[4])

    def cost(columns: int, rows: int) -> int:
        return _CALLS + numbers * columns * (_READING + rows)

    sizes = {number: (each.groups[0].end, per_head * each.count) for number, each in texts.items()}
    by_size = sorted(texts, key=lambda number: cost(*sizes[number]))
    costs = [sum(cost(*size) for size in sizes.values())]
    for count in range(1, len(by_size) + 1):
        taken, rest = by_size[:count], by_size[count:]
        places = [texts[number].pairs.place for number in taken]
        columns, rows = (max(each) for each in zip(*(sizes[number] for number in taken), strict=True))
        # Twice the calls of one text, and wider.
        together = _CALLS + cost((max(places) - min(places) + 1) * columns, rows)
        costs.append(together + sum(cost(*sizes[number]) for number in rest))
    return {number: texts[number] for number in by_size[: costs.index(min(costs))]}


def attend_texts(
    texts: Sequence[BitwiseText],
    heads: torch.Tensor,
    query_heads: int,
    layer: int,
    scaling: float,
    all_together: bool = False,
) -> torch.Tensor:
    """The attention of all texts of a pass, whose new tokens stand behind each other: [T, H x Dv].

    Args:
        texts: the same in all layers of a pass.
        heads: [T, H or more, D], the first H of each token its queries. Tokens behind those of the texts are padding,
            and get the outputs of the first one.
        query_heads: H.
        all_together: as for `AttentionPlan`.
    """
    tokens, all_heads, dim = heads.shape
    kind = tokens, all_heads, query_heads, texts[0].pairs.keys.shape[2], heads.dtype, all_together
    first = texts[0]
    if first.plan is None or first.plan[0] != kind:
        first.plan = kind, AttentionPlan(texts, *kind)
    plan = first.plan[1]
    # A call for all parts, since most of a small model's step is calls.
    rows = heads.reshape(-1, dim).index_select(0, plan.layout.sources)
    if len(plan.parts) == 1:
        outputs = plan.attend(plan.parts[0], texts, rows, layer, scaling)
    else:
        parts = zip(plan.parts, rows.split(plan.counts), strict=True)
        outputs = torch.cat([plan.attend(part, texts, own, layer, scaling) for part, own in parts])
    return outputs.index_select(0, plan.layout.places).view(tokens, -1).to(heads.dtype)


def attend_text(text: BitwiseText, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
    """`attend_texts` for one text: [1, H, T, Dv] of a layer's queries [1, H, T, D]."""
    heads, tokens = query.shape[1:3]
    output = attend_texts([text], query[0].transpose(0, 1), heads, layer, scaling)
    return output.view(1, tokens, heads, -1).transpose(1, 2)
