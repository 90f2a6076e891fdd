"""Attention by one masked softmax, on every device and in every precision."""

from collections.abc import Sequence
from functools import partial

import torch

from decoder.backends.attention import Entries, Scores, one_by_one
from decoder.backends.base import Chain, Tree
from decoder.backends.transfers import upload
from decoder.cache.layout import FULL, LayerKind

# Upper bound of one block of the score matrix; long prefill chunks are cut along their queries to stay below it.
_MAX_SCORES = 64 * 2**20


class Masked:
    """One sequence's new tokens, whose keys and values stand last, behind those of the positions just before its first
    one.

    Args:
        tokens: how many they are, T.
        mask: which of them sees which, bool [T, T]; None is plain causal.
        positions: theirs; needed where a layer does not attend to the whole sequence.
    """

    def __init__(self, tokens: int, mask: torch.Tensor | None = None, positions: Sequence[int] = ()):
        self.tokens, self._mask, self._positions = tokens, mask, positions
        self._blocked: dict[tuple[LayerKind, int], torch.Tensor] = {}

    @classmethod
    def of(cls, sequence: Chain | Tree, device: torch.device) -> "Masked":
        """Those that a pass is given."""
        mask = sequence.mask()
        return cls(len(sequence.tokens), None if mask is None else upload(mask, device), sequence.positions)

    def blocked(self, kind: LayerKind, key: torch.Tensor) -> torch.Tensor | None:
        """Which of the last of a layer's keys [B, G, n, D] the new tokens do not see: bool [T, m]; None sees all."""
        if kind == FULL and self.tokens == 1:
            return None
        keys = self.tokens if kind == FULL else key.shape[2]  # those before them are all seen
        if (kind, keys) not in self._blocked:
            self._blocked[kind, keys] = ~self._seen(kind, keys, key.device)
        return self._blocked[kind, keys]

    def _seen(self, kind: LayerKind, keys: int, device: torch.device) -> torch.Tensor:
        mask = self._mask
        if mask is None:
            mask = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=device).tril()
        if kind == FULL:
            return mask
        first, positions = self._positions[0], upload(self._positions, device)
        cached = torch.arange(first - keys + self.tokens, first, device=device)
        seen = kind.sees(positions[:, None], cached), kind.sees(positions[:, None], positions) & mask
        return torch.cat(seen, 1)

    @staticmethod
    def attend(
        sequences: "Sequence[Masked]", query: torch.Tensor, keys: Entries, values: Entries, scores: Scores
    ) -> torch.Tensor:
        """See `Attending`."""
        return one_by_one(partial(_attend, scores), sequences, query, keys, values)


def _attend(
    scores: Scores, sequence: Masked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    return masked_softmax(query, key, value, sequence.blocked(scores.kind, key), scores)


def masked_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocked: torch.Tensor | None,
    asked: Scores,
) -> torch.Tensor:
    """[B, H, T, Dv]: attention of T new tokens over all keys but those of the last n that are ``blocked``, bool [T, n].

    Query heads are packed per KV head, so no key or value is ever replicated. The kind in ``asked`` is not read.
    """
    batch, heads, new, dim = query.shape
    groups, length = key.shape[1], key.shape[2]
    packed = (query * asked.scaling).reshape(batch, groups, heads // groups, new, dim)
    transposed_key = key.mT
    rows = max(1, _MAX_SCORES // (batch * heads * length))
    outputs = []
    for start in range(0, new, rows):
        part = packed[:, :, :, start : start + rows]
        count = part.shape[3]
        scores = part.reshape(batch, groups, -1, dim) @ transposed_key
        if asked.softcap is not None:
            scores = (scores / asked.softcap).tanh() * asked.softcap
        if blocked is not None:
            block = scores.view(batch, groups, -1, count, length)[..., length - blocked.shape[1] :]
            block.masked_fill_(blocked[start : start + rows], -torch.inf)
        weights = _weights(scores, asked.sinks, count).to(value.dtype)
        outputs.append((weights @ value).reshape(batch, heads, count, value.shape[-1]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """The softmax of scores [B, G, heads x tokens, n], with those of the ``sinks`` [H] beside."""
    # Half precision is too coarse to sum many small weights in.
    wide = torch.promote_types(torch.float32, scores.dtype)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    batch, groups, rows, _ = scores.shape
    beside = sinks.to(scores.dtype).view(1, groups, -1, 1).expand(batch, groups, rows // tokens, tokens)
    return torch.cat((scores, beside.reshape(batch, groups, rows, 1)), -1).softmax(-1, dtype=wide)[..., :-1]
