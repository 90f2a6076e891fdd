"""Attention by one masked softmax, on every device and in every precision."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from decoder.backends.attention import Pairs, one_by_one

# Upper bound of one block of the score matrix; long prefill chunks are cut along their queries to stay below it.
_MAX_SCORES = 64 * 2**20


class Masked(NamedTuple):
    """One text's new tokens, whose keys and values stand last.

    Attributes:
        tokens: how many they are, T.
        mask: which of them sees which, bool [T, T]; None is plain causal.
    """

    tokens: int
    mask: torch.Tensor | None = None

    @staticmethod
    def attend(
        texts: "Sequence[Masked]", query: torch.Tensor, keys: Pairs, values: Pairs, scaling: float
    ) -> torch.Tensor:
        """See `Attending`."""
        return one_by_one(partial(_attend, scaling), texts, query, keys, values)


def _attend(scaling: float, text: Masked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    blocked = None
    if text.tokens > 1:
        blocked = (
            query.new_ones(text.tokens, text.tokens, dtype=torch.bool).triu(1) if text.mask is None else ~text.mask
        )
    return masked_softmax(query, key, value, blocked, scaling)


def masked_softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocked: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """[B, H, T, Dv]: attention of T new tokens over all keys but those of new ones that are ``blocked``, bool [T, T].

    Query heads are packed per KV head, so no key or value is ever replicated.
    """
    batch, heads, new, dim = query.shape
    groups, length = key.shape[1], key.shape[2]
    packed = (query * scaling).reshape(batch, groups, heads // groups, new, dim)
    transposed_key = key.mT
    rows = max(1, _MAX_SCORES // (batch * heads * length))
    outputs = []
    for start in range(0, new, rows):
        part = packed[:, :, :, start : start + rows]
        count = part.shape[3]
        scores = part.reshape(batch, groups, -1, dim) @ transposed_key
        if blocked is not None:
            block = scores.view(batch, groups, -1, count, length)[..., length - new :]
            block.masked_fill_(blocked[start : start + rows], -torch.inf)
        # Half precision is too coarse to sum many small weights in.
        weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(value.dtype)
        outputs.append((weights @ value).reshape(batch, heads, count, value.shape[-1]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
