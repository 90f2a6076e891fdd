"""Attention that gives a token the same bits whatever else is in its pass.

A sum in floating point depends on its order, so every order here follows from a token's position alone. The keys that a
token at position p sees are cut at T(p) = STRIDE * floor(max(0, p - DEPTH) / STRIDE):

- its prefix, the keys before T(p), is committed text whatever tree the token stands in, since no tree is deeper than
  DEPTH; all tokens of a pass with the same T share one product with it, which gives their outputs and log-sum-exps;
- its tail, the keys from T(p) to p, has its ancestors in the columns where plain decoding has them, COLUMNS in all, and
  the prefix counts in its softmax as one more key, whose score is the log-sum-exp and whose value is the output.

What remains is that a row of a matrix product may depend on the rows beside it. PyTorch's kernels for a CPU were
measured to depend on it only where the number of rows is no multiple of a small one, to which rows are padded. Which
one, and whether that is enough, is found out by `model.bitwise_attention_test` on each machine and for each model.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

DEPTH = 64
"""The engine cuts trees here: no node is deeper below its root."""
STRIDE = 32
COLUMNS = DEPTH + STRIDE
"""The number of keys in a tail. Those behind the token count too, although it does not see them."""

SHORT = 8192
"""Keys up to which one softmax over all scores is used on a CPU, and not blocks and their merging: with transposed keys
it is faster for a few rows, and about as fast for the rows of a prompt or a large tree."""

SPARE = COLUMNS + STRIDE
"""A tail may reach so many slots beyond the last token of a text, so its cache has that many more."""

_CACHE_LINE = 16  # numbers

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Rule(NamedTuple):
    """How products must be shaped on a machine so that their rows do not depend on each other.

    Attributes:
        multiple: the number of rows is padded to a multiple of this one.
        in_order: a product over at most this many columns sums them in their order, so columns of weight zero may stand
            between those of a token's ancestors. For a tree with more columns the values are gathered instead.
        batched: whether texts of different lengths may share products, since zeros behind a shorter one's weights leave
            its sums as they are.
        uneven: numbers of columns, from the first to below the second, whose sums have an order of their own. Products
            over so many are not shared; (0, 0) if there are none.
        transposed: whether scores are the same where each number of a key has the slots of a cache beside each other.
            Products of few rows are faster so: for three KV heads of size 64 and four rows each, in one thread, scores
            over 512 keys took half the time, and over 4,096 two thirds.
    """

    multiple: int
    in_order: int
    batched: bool = False
    uneven: tuple[int, int] = (0, 0)
    transposed: bool = False


class TailGroup(NamedTuple):
    """New tokens whose tails begin at one position.

    Attributes:
        nodes: which of the text's new tokens, M of them.
        count: M.
        start: T, the first column of their tail.
        width: how many columns of the cache from ``start`` on hold all that they may see.
        still: how many of the tail's first columns hold committed keys, which stand in order; all of them for a chain.
        columns: for a tree, in which of the columns behind these each further key of the tail stands, in the order of
            the text, int64 [M, COLUMNS - still]; None for a chain.
        mask: what is added to their scores: 0, or minus infinity for keys that they do not see; for a chain
            [M, COLUMNS], for a tree [M, COLUMNS - still], since all see the others.
    """

    nodes: Sequence[int]
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    start: int
    width: int
    still: int
    columns: torch.Tensor | None
    mask: torch.Tensor

    @property
    def end(self) -> int:
        """Behind the last column."""
        return self.start + self.width

    @property
    def in_order(self) -> torch.Tensor:
        """In which column each key of the tail stands, in the order of the text, int64 [M, COLUMNS]."""
        columns = torch.arange(COLUMNS).repeat(self.count, 1)
        if self.columns is not None:
            columns[:, self.still :] = self.columns + self.still
        return columns


class _Near(NamedTuple):
    """What one softmax covers for a group's rows: all keys of a short text, the tail of a long one.

    Views of all layers are made at once, since a small model's layer is short.

    Attributes:
        group: whose rows they are.
        first: the first of these keys. Those before it are the prefix, which counts as one more key.
        middle: the number of keys between ``first`` and the tail.
        per_head: rows per token: the query heads that share a KV head.
        mask: what is added to the scores of the tail's last columns, as in the group, [1, rows, COLUMNS or fewer],
            or one row for all of a single token's.
        columns: for a tree, those of the group, [G, rows, COLUMNS - still].
        dtype: the dtype of scores, weights and sums.
        keys: per layer, the keys from ``first`` on, [G, D, middle + width].
        values: per layer, the values between ``first`` and the tail, [G, middle, Dv], and the tail's, [G, width, Dv].
        prefix: per layer, keys and values before ``first``, [1, G, first, D]; empty where there are none.
    """

    group: TailGroup
    first: int
    middle: int
    per_head: int
    mask: torch.Tensor
    columns: torch.Tensor | None
    dtype: torch.dtype
    keys: Sequence[torch.Tensor]
    values: Sequence[tuple[torch.Tensor, torch.Tensor]]
    prefix: Sequence[tuple[torch.Tensor, torch.Tensor]]


class Pairs(Protocol):
    """A cache's buffers: keys [layers, 1, G, slots, D] and values [layers, 1, G, slots, Dv].

    Attributes:
        block: buffers of several caches, [layers, caches, G, slots, D] each, of which these are the part ``place``;
            None where they stand alone.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block: Any  # `cache.blocks.Block`
    place: int

    def make_finite(self, end: int) -> None:
        """See that the slots before ``end``, as far as there are any, hold finite numbers."""


def tail_start(position: int) -> int:
    """T(p)."""
    return STRIDE * (max(0, position - DEPTH) // STRIDE)


def tail_slots(length: int, depths: Sequence[int], mask: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Where the new tokens of a pass find their keys, for the kernels of a device: int64 [rows, 1 + COLUMNS].

    A row has T(p), below which its token sees every slot of the cache, and then the slots of its tail in the order of
    the text; -1 stands for keys that it does not see. Rows behind those of the tokens are padding, which sees itself.

    Args:
        length, depths, mask: as for `BitwiseText`; the new tokens' pairs stand in the slots from ``length`` on.
        rows: how many rows the pass has, at least as many as there are new tokens.
    """
    slots = torch.full((rows, 1 + COLUMNS), -1)
    slots[:, 0] = 0
    slots[:, 1] = torch.arange(length, length + rows)
    new = slots[: len(depths)]
    for group in _groups(length, depths, mask):
        columns, nodes = group.in_order + group.start, list(group.nodes)
        columns[:, COLUMNS - group.mask.shape[1] :].masked_fill_(group.mask < 0, -1)
        new[nodes, 0] = group.start
        new[nodes, 1:] = columns
    return slots


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and sums: half precision is too coarse for sums of many small weights."""
    return torch.promote_types(torch.float32, dtype)


def in_one_softmax(group: TailGroup, dtype: torch.dtype) -> bool:
    """Whether one softmax covers the scores of a group's prefix, too."""
    return group.start <= SHORT and dtype == wide_dtype(dtype)


def empty_transposed(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    """A buffer for keys [..., slots, D] of these sizes, with the slots of each number of a key beside each other."""
    *several, slots, dim = sizes
    # Rows whose distance is a power of two would share few lines of a processor's caches.
    return like.new_empty(*several, dim, slots + _CACHE_LINE).mT[..., :slots, :]


def ends_in_one_softmax(capacity: int, dtype: torch.dtype) -> bool:
    """Whether one softmax covers all keys of every token of a text with so many positions."""
    return tail_start(capacity) <= SHORT and dtype == wide_dtype(dtype)


def _groups(length: int, depths: Sequence[int], mask: torch.Tensor | None) -> list[TailGroup]:
    """The new tokens by the beginnings of their tails; arguments as for `BitwiseText`."""
    return _chain(length, len(depths)) if mask is None else _tree(length, depths, mask)


def _chain(length: int, count: int) -> list[TailGroup]:
    groups, first = [], 0
    while first < count:
        start = tail_start(length + first)
        end = min(count, start + COLUMNS - length)
        mask = _causal_mask(length + first - start, end - first)
        groups.append(TailGroup(range(first, end), end - first, start, COLUMNS, COLUMNS, None, mask))
        first = end
    return groups


def _tree(length: int, depths: Sequence[int], mask: torch.Tensor) -> list[TailGroup]:
    starts = [tail_start(length + depth) for depth in depths]
    column, groups, distinct = torch.arange(COLUMNS), [], sorted(set(starts))
    for start in distinct:
        where: Sequence[int] = range(len(depths))
        if len(distinct) > 1:
            where = tuple(node for node, own in enumerate(starts) if own == start)
        committed = length - start
        # One column more than can be seen, of which no row has any weight.
        width = max(COLUMNS, committed + len(depths) + 1)
        width += -width % STRIDE
        # Behind the end of the committed text each sees its ancestors and itself.
        seen = mask if len(distinct) == 1 else mask[list(where)]
        ancestors = seen.cumsum(1)
        unseen = column[: COLUMNS - committed] >= ancestors[:, -1:]
        columns = torch.full(unseen.shape, width - 1 - committed)
        rows, nodes = seen.nonzero(as_tuple=True)
        columns[rows, ancestors[rows, nodes] - 1] = nodes
        additive = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
        groups.append(TailGroup(where, len(seen), start, width, committed, columns, additive))
    return groups


class BitwiseText:
    """One text's new tokens, and where each of them looks; made once per pass and used by all its layers.

    Attributes:
        groups: the new tokens, by the beginnings of their tails.
        plan: what the attention of a pass has prepared, kept with the first of the pass's texts.

    Args:
        pairs: the text's cache. When a layer attends, the new tokens' pairs are in it, and slots behind the text hold
            finite numbers.
        length: L, cached tokens.
        depths: how deep each new token stands below the first, [T]; at most DEPTH, unless there is no mask.
        mask: which new token sees which, bool [T, T]; None is plain causal.
        rule: of this machine.
    """

    def __init__(self, pairs: Pairs, length: int, depths: Sequence[int], mask: torch.Tensor | None, rule: Rule):
        self.pairs = pairs
        self.length, self.count, self.rule = length, len(depths), rule
        self.groups = _groups(length, depths, mask)
        self.plan: Any = None  # `bitwise_pass.AttentionPlan`
        self._made: dict[tuple, _Near] = {}

    def attend_rows(
        self, group_index: int, rows: torch.Tensor, per_head: int, layer: int, scaling: float
    ) -> torch.Tensor:
        """[G, rows, Dv], in the dtype of sums, of the padded queries [G, rows, D] of one group of tokens."""
        near = self._near(group_index, rows, per_head)
        wide_rows, near_key, near_value = rows, near.keys[layer], near.values[layer]
        if near.dtype != rows.dtype:
            wide_rows, near_key = rows.to(near.dtype), near_key.to(near.dtype)
            near_value = near_value[0].to(near.dtype), near_value[1].to(near.dtype)
        # Scaled in the product itself: scaled queries would round otherwise. With beta of 0 the numbers
        # of the first argument are not read.
        scores = torch.baddbmm(near.mask.narrow(2, 0, 1), wide_rows, near_key, beta=0, alpha=scaling)
        if near.columns is None:
            scores.narrow(2, near.middle, COLUMNS).add_(near.mask)
        else:
            # The new tokens' scores, each row's own where plain decoding has them.
            still, end = near.middle + near.group.still, near.middle + COLUMNS
            own = scores.narrow(2, still, scores.shape[2] - still).gather(2, near.columns)
            torch.add(own, near.mask, out=scores.narrow(2, still, end - still))
            scores = scores.narrow(2, 0, end)
        if near.first:
            prefix, log_sum = _flash(rows[None], *near.prefix[layer], scale=scaling)
            scores = torch.cat((scores, log_sum[0, :, :, None]), 2)
        weights = scores.softmax(-1)
        between, in_tail, of_prefix = weights.split_with_sizes(
            (near.middle, COLUMNS, weights.shape[2] - near.middle - COLUMNS), 2
        )
        output = self._of_tail(near, in_tail, near_value[1])
        # Multiplied and added one after the other: both at once may be another number in another loop.
        if near.middle:
            output.add_(torch.bmm(between, near_value[0]))
        if near.first:
            output.add_(prefix[0].to(near.dtype) * of_prefix)
        return output

    def _of_tail(self, near: _Near, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[G, rows, Dv]: the tail's values by their weights [G, rows, COLUMNS], summed in order."""
        group = near.group
        if near.columns is None:
            return torch.bmm(weights, value)
        if group.width > self.rule.in_order:
            return self._gathered(group, near.per_head, weights, value)
        # Back to where the tokens' values stand.
        spread = functional.pad(weights, (0, group.width - COLUMNS)) if group.width > COLUMNS else weights
        own = weights.narrow(2, group.still, COLUMNS - group.still).clone()
        spread.narrow(2, group.still, group.width - group.still).zero_().scatter_(2, near.columns, own)
        return torch.bmm(spread, value)

    def _gathered(self, group: TailGroup, per_head: int, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Each node's tail values in order, then its own product of as many rows as a single token's."""
        kv_heads, dim = len(weights), value.shape[-1]
        values = value.index_select(1, group.in_order.flatten()).view(-1, COLUMNS, dim)
        own = weights[:, : per_head * group.count].view(kv_heads, per_head, group.count, COLUMNS).transpose(1, 2)
        own = padded(own.reshape(-1, per_head, COLUMNS), self.rule.multiple)
        output = torch.bmm(own, values)[:, :per_head].view(kv_heads, group.count, per_head, dim)
        return padded(output.transpose(1, 2).reshape(kv_heads, -1, dim), self.rule.multiple)

    def _near(self, group_index: int, rows: torch.Tensor, per_head: int) -> _Near:
        """What all layers of a kind share, made by the first of them."""
        kind = group_index, rows.shape[:2], rows.dtype
        if kind not in self._made:
            group = self.groups[group_index]
            wide, first = wide_dtype(rows.dtype), 0 if in_one_softmax(group, rows.dtype) else group.start
            middle = group.start - first
            mask, columns = group.mask.to(wide)[None], group.columns
            # All rows of a single token see the same.
            if group.count > 1:
                mask = padded(mask.repeat(1, per_head, 1), self.rule.multiple)
            if columns is not None:
                columns = padded(columns.repeat(per_head, 1)[None], self.rule.multiple).expand(len(rows), -1, -1)
            self._made[kind] = _Near(group, first, middle, per_head, mask, columns, wide, *self._views(group, first))
        return self._made[kind]

    def _views(self, group: TailGroup, first: int) -> tuple[Sequence, Sequence, Sequence]:
        """The last three parts of a `_Near`."""
        keys, values, middle = self.pairs.keys, self.pairs.values, group.start - first
        near = keys[:, 0].narrow(2, first, middle + group.width).mT.unbind()
        between, tail = (
            values[:, 0].narrow(2, start, count).unbind()
            for start, count in ((first, middle), (group.start, group.width))
        )
        prefix = [pairs.narrow(3, 0, first).unbind() for pairs in (keys, values)] if first else []
        return near, list(zip(between, tail, strict=True)), list(zip(*prefix, strict=True))


def padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """[B, rows, n], the first rows repeated behind them until their number is a multiple."""
    count = rows.shape[1]
    missing = -count % multiple
    if not missing:
        return rows
    more = rows.narrow(1, 0, missing) if missing <= count else rows.narrow(1, 0, 1).expand(-1, missing, -1)
    return torch.cat((rows, more), 1)


@lru_cache(maxsize=4 * COLUMNS)
def _causal_mask(first: int, count: int) -> torch.Tensor:
    """What tokens in the columns from ``first`` on see of the tail: 0 or minus infinity [count, COLUMNS]."""
    own = torch.arange(first, first + count)[:, None]
    return torch.zeros(count, COLUMNS).masked_fill_(torch.arange(COLUMNS) > own, -torch.inf)
