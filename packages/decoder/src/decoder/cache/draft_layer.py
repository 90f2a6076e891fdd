"""The keys and values that a draft layer has of a sequence, and behind it of the drafts of one step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from decoder.backends.transfers import upload
from decoder.draft_layer import DraftLayer

_ROOM = 256  # slots beyond the window, or by which the cache of a whole sequence grows at least


class KeptEntries(NamedTuple):
    """What a draft layer had of the beginning of a sequence.

    Attributes:
        layer: the draft layer.
        pairs: keys and values [kv_heads, n, D] of the sequence's first n entries.
    """

    layer: DraftLayer
    pairs: tuple[torch.Tensor, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.pairs)

    @property
    def entries(self) -> int:
        return self.pairs[0].shape[1]


class DraftLayerCache:
    """What a draft layer knows of one sequence: keys and values [kv_heads, length, D] of its entries.

    The entry of position t + 1 is made of the token there and the target's features of position t. New ones wait until
    they are taken. With a sliding window only the entries within it are kept, since one layer's keys and values depend
    on nothing but their own entry.

    Args:
        layer: the draft layer.
        device: where its weights are.
    """

    def __init__(self, layer: DraftLayer, device: torch.device):
        self.layer, self.device, self.window = layer, device, layer.sliding_window
        (kv_heads, *sizes), slots = layer.entry_shape, (self.window or 0) + _ROOM
        self._pairs = [layer.fc.weight.new_empty(kv_heads, slots, size) for size in sizes]
        self.length = 0  # slots that hold entries
        self.entries = 0  # of the sequence, those included that have left the window
        self._features: list[torch.Tensor] = []
        self._tokens: list[int] = []

    @staticmethod
    def planned_bytes(layer: DraftLayer, tokens: int) -> int:
        """What the keys and values of a sequence of so many tokens take, but for what a growing cache has to spare."""
        slots = max(tokens, _ROOM) if layer.sliding_window is None else layer.sliding_window + _ROOM
        return slots * DraftLayerCache.entry_bytes(layer)

    @staticmethod
    def entry_bytes(layer: DraftLayer) -> int:
        """What an entry takes."""
        kv_heads, *sizes = layer.entry_shape
        return kv_heads * sum(sizes) * layer.fc.weight.itemsize

    @property
    def pending(self) -> int:
        """How many entries wait to be computed."""
        return len(self._tokens)

    def add(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Add entries: ``tokens`` n, and the target's ``features`` [n, c] of the positions before them."""
        self._features.append(features)
        self._tokens += tokens

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The entries that wait, which the caller must `write`: features [n, c], tokens [n] and positions [n]."""
        features, tokens = torch.cat(self._features), upload(self._tokens, self.device)
        self._features, self._tokens = [], []
        first = self.entries + 1
        return features, tokens, torch.arange(first, first + len(tokens), device=self.device)

    def take_all_but_newest(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`take`, but the newest entry goes on to wait, and what has left the window already is passed over."""
        newest = self._tokens[-1]
        features, tokens, positions = self.take()
        count = len(tokens) - 1
        self.add(features[count:], [newest])
        gone = 0 if self.window is None else max(0, count - self.window)
        self.entries += gone
        return features[gone:count], tokens[gone:count], positions[gone:count]

    def kept(self, count: int) -> KeptEntries | None:
        """A copy of the sequence's first entries, ``count`` at most; None if there are none, or not any more."""
        count = min(count, self.entries)
        if not count or self.length != self.entries:
            return None
        keys, values = (one[:, :count].clone() for one in self._pairs)
        return KeptEntries(self.layer, (keys, values))

    def begin_with(self, kept: KeptEntries, count: int) -> None:
        """Take over the first ``count`` entries of an earlier sequence that begins likewise; the cache is empty."""
        keys, values = (one[:, :count].transpose(0, 1) for one in kept.pairs)
        self.write(keys, values)

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append the keys and values [n, kv_heads, D] of the sequence's next entries."""
        self._put(keys, values, self.length)
        self.length += len(keys)
        self.entries += len(keys)

    def write_drafts(self, keys: torch.Tensor, values: torch.Tensor, drafts: int) -> None:
        """Write those of a level of drafts, [n, kv_heads, D], behind the ``drafts`` drafts of this step so far."""
        self._put(keys, values, self.length + drafts)

    def read(self, drafts: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, D] of the window, with so many ``drafts`` behind it."""
        first = 0 if self.window is None else max(0, self.length - self.window)
        keys, values = (one[:, first : self.length + drafts] for one in self._pairs)
        return keys, values

    def _put(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        if start + len(keys) > self._pairs[0].shape[1]:
            start -= self._make_room(start + len(keys) - self.length)
        for pairs, new in zip(self._pairs, (keys, values), strict=True):
            pairs[:, start : start + len(new)] = new.transpose(0, 1)

    def _make_room(self, new: int) -> int:
        """Make room for ``new`` slots behind the sequence; returns by how many slots it has moved to the front."""
        kept = self.length if self.window is None else min(self.length, self.window)
        moved, slots, capacity = self.length - kept, kept + new, self._pairs[0].shape[1]
        if slots > capacity:
            capacity = max(slots + _ROOM, 2 * capacity if self.window is None else 0)
        for place, pairs in enumerate(self._pairs):
            # Drafts of this step stand behind the sequence and move with it.
            old = pairs[:, moved:]
            self._pairs[place] = made = pairs.new_empty(pairs.shape[0], capacity, pairs.shape[2])
            made[:, : old.shape[1]] = old[:, :capacity]
        self.length = kept
        return moved
