"""The target's memory: one preallocated buffer per layer for prompt, output and the tree under verification."""

from collections.abc import Sequence

import torch
from transformers import Cache

from decoder.transfers import upload

_SMALLEST_GROWTH = 1024


class FullCache(Cache):
    """Keys and values of all committed tokens, [batch, KV heads, capacity, head size] per layer.

    A forward pass writes its T tokens behind the committed ones (transformers calls `update`); `keep` then commits
    the accepted nodes and forgets the rest. Nothing is ever concatenated.

    Args:
        capacity: positions to hold: prompt + output + the widest tree.
        growable: the length is open-ended: a full buffer is replaced by one half as long again, so that a text of any
            length copies each pair twice on average. Otherwise more positions are an error.
    """

    def __init__(self, capacity: int, growable: bool = False):
        super().__init__(layers=[])
        self.capacity, self.growable = capacity, growable
        self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write [B, G, T, D] behind the committed tokens of a layer; the views [B, G, length + T, D] to attend to."""
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            self._grow(end)
        if layer_idx == len(self.keys):
            batch, groups, _, dim = key_states.shape
            self.keys.append(key_states.new_empty(batch, groups, self.capacity, dim))
            self.values.append(value_states.new_empty(batch, groups, self.capacity, value_states.shape[3]))
        key, value = self.keys[layer_idx], self.values[layer_idx]
        key[:, :, self.length : end] = key_states
        value[:, :, self.length : end] = value_states
        return key[:, :, :end], value[:, :, :end]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: 2 x layers x batch x KV heads x capacity x head size x bytes per number."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def _grow(self, end: int) -> None:
        if not self.growable:
            raise ValueError(f"the cache holds {self.capacity} positions; {end} were asked for")
        self.capacity = max(end, self.capacity + max(_SMALLEST_GROWTH, self.capacity // 2))
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                batch, groups, _, dim = old.shape
                buffers[layer] = old.new_empty(batch, groups, self.capacity, dim)
                buffers[layer][:, :, : self.length] = old[:, :, : self.length]

    def keep(self, path: Sequence[int]) -> None:
        """Commit the nodes ``path`` (ascending) of the tokens written last; their pairs close up in place."""
        if list(path) != list(range(len(path))):
            index = upload(path, self.keys[0].device) + self.length
            for buffer in (*self.keys, *self.values):
                buffer[:, :, self.length : self.length + len(path)] = buffer.index_select(2, index)
        self.length += len(path)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length
