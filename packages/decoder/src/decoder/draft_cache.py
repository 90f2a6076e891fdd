"""What the caches of draft passes share: a fixed number of slots, and room behind them for drafted tokens."""

import torch
from transformers import Cache


class DraftCache(Cache):
    """At most ``budget`` pairs of committed tokens per KV head, [batch, KV heads, budget + room, head size] per layer.

    Subclasses say which pairs these are. A draft pass writes its tokens behind them; the next pass writes over them,
    but for the first ones that `hold` was told to hold. Keys carry their own rotary positions, so the order of the
    slots means nothing to attention.

    Args:
        budget: slots for committed tokens.
        room: drafted tokens behind them, held ones included.
    """

    def __init__(self, budget: int, room: int):
        super().__init__(layers=[])
        self.budget, self.room = budget, room
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._filled = 0
        self._held = 0

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Put the T tokens [B, G, T, D] of a draft pass behind a layer's pairs; views of all [B, G, pairs + T, D]."""
        start = self._filled + self._held
        end = start + key_states.shape[2]
        if end > self._filled + self.room:
            raise ValueError(f"the draft cache has room for {self.room} drafted tokens; {end - self._filled} came")
        self._allocate(layer_idx, key_states, value_states)
        key, value = self.keys[layer_idx], self.values[layer_idx]
        key[:, :, start:end] = key_states
        value[:, :, start:end] = value_states
        return key[:, :, :end], value[:, :, :end]

    def hold(self, count: int) -> None:
        """Of the drafted tokens, the first ``count`` stay for the passes to come; commits let go of all."""
        self._held = count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._filled + self._held

    def _allocate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer == len(self.keys):
            for buffers, like in ((self.keys, key), (self.values, value)):
                shape = (like.shape[0], like.shape[1], self.budget + self.room, like.shape[3])
                buffers.append(like.new_empty(shape))
