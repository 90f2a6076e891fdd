"""New tokens as the attention kernels of a device take them: behind a length in its memory, or by position."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from decoder.backends.attention import Entries, Scores, one_by_one
from decoder.backends.cuda import bitwise_split_kv, split_kv
from decoder.cache.base import LayeredCache


class Measured(NamedTuple):
    """New tokens behind as many cached ones as stands in device memory; keys and values are whole buffers.

    Entries from there on are the new ones, and what lies behind them means nothing.

    Attributes:
        tokens: how many they are, T.
        kv_length: the number of cached tokens, int64 [1].
        mask: which of them sees which, bool [T, T]; None is plain causal.
    """

    tokens: int
    kv_length: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def behind(cls, cache: LayeredCache, tokens: int, mask: torch.Tensor | None) -> "Measured":
        """New tokens behind what a cache holds, whose passes have fixed shapes."""
        assert cache.kv_length is not None
        return cls(tokens, cache.kv_length, mask)

    @staticmethod
    def attend(
        sequences: "Sequence[Measured]", query: torch.Tensor, keys: Entries, values: Entries, scores: Scores
    ) -> torch.Tensor:
        """See `Attending`."""
        return one_by_one(partial(_measured, scores.scaling), sequences, query, keys, values)


class ByPosition(NamedTuple):
    """New tokens for which the order of all sums follows from positions alone; keys and values may be whole buffers.

    Attributes:
        tokens: how many they are.
        tails: `tails.tail_slots` of them, in device memory.
    """

    tokens: int
    tails: torch.Tensor

    @staticmethod
    def attend(
        sequences: "Sequence[ByPosition]", query: torch.Tensor, keys: Entries, values: Entries, scores: Scores
    ) -> torch.Tensor:
        """See `Attending`."""
        return one_by_one(partial(_by_position, scores.scaling), sequences, query, keys, values)


def _measured(
    scaling: float, sequence: Measured, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    output = split_kv.split_kv_attention(query.to(key.dtype), key, value, sequence.kv_length, sequence.mask, scaling)
    return output.to(query.dtype)


def _by_position(
    scaling: float, sequence: ByPosition, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    output = bitwise_split_kv.bitwise_split_kv_attention(query.to(key.dtype), key, value, sequence.tails, scaling)
    return output.to(query.dtype)
