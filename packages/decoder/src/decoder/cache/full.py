"""The full KV cache: keys and values of prompt, output and the tree under verification."""

from collections.abc import Sequence

import torch

from decoder.cache.base import LayeredCache
from decoder.kernels.transfers import upload

_SMALLEST_GROWTH = 1024


class FullCache(LayeredCache):
    """Keys and values of all committed tokens.

    A forward pass writes the pairs of its T tokens behind the committed ones (transformers calls
    `LayeredCache.update`). `keep` then commits those of the accepted nodes, and the next pass writes over the rest.
    Nothing is ever concatenated.

    Args:
        capacity: how many positions it holds: those of prompt, output and the widest tree.
        growable: whether a full buffer is replaced by one half as long again, for texts whose length is open. A text
            of any length then copies each pair twice on average. Otherwise more positions are an error.

    Attributes:
        length: how many tokens are committed.
    """

    def __init__(self, capacity: int, growable: bool = False):
        super().__init__(capacity)
        self.growable = growable
        self.length = 0

    def _make_room(self, count: int) -> None:
        end = self.length + count
        if end <= self.capacity:
            return
        if not self.growable:
            raise ValueError(f"the cache holds {self.capacity} positions; {end} were asked for")
        self.enlarge(max(end, self.capacity + max(_SMALLEST_GROWTH, self.capacity // 2)), self.length)

    def begin_with(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Commit copies of the pairs [layers, B, G, n, D] of the text's first n tokens to the empty cache."""
        count = keys.shape[3]
        self._make_room(count)
        self._allocate(keys[0], values[0])
        self.keys[:, :, :, :count] = keys
        self.values[:, :, :, :count] = values
        self._finite = max(self._finite, count)
        self.length = count

    def keep(self, path: Sequence[int]) -> None:
        """Commit the nodes ``path`` (ascending) of the last pass: their pairs move up behind the committed ones."""
        # The first nodes of the path may be where they belong already, and need not move.
        still = next((index for index, node in enumerate(path) if node != index), len(path))
        if still < len(path):
            index = upload(path[still:], self.keys.device) + self.length
            start, end = self.length + still, self.length + len(path)
            for buffer in (self.keys, self.values):
                buffer[:, :, :, start:end] = buffer.index_select(3, index)
        self.length += len(path)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length
