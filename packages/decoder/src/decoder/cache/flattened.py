"""The caches of several texts as the one cache that a flattened pass is given."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from transformers import Cache

from decoder.cache.base import LayeredCache
from decoder.cache.blocks import Block


class FlattenedCaches(Cache):
    """Hands each text's new pairs to that text's own cache; the tokens of all texts stand behind each other in a pass.

    What attention gets in place of a layer's keys and values are tuples, one entry per text: nothing is padded to the
    longest and no cache is copied. A model that looks at keys between cache and attention cannot run like this, which
    `model.Target` finds out when it is made.

    Args:
        caches: one per text.
        counts: how many tokens of the pass are each text's, in order.
    """

    def __init__(self, caches: Sequence[LayeredCache], counts: Sequence[int]):
        super().__init__(layers=[])
        self.caches, self.counts = caches, list(counts)
        self._writes: list[_BlockWrite] | None = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write a layer's new pairs [1, G, sum of counts, D]; what each text attends to, as `LayeredCache.update`."""
        if self._writes:
            for write in self._writes:
                write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), layer_idx)
            return self._seen(layer_idx)
        parts = list(
            zip(*(states.split_with_sizes(self.counts, 2) for states in (key_states, value_states)), strict=True)
        )
        if any(cache.kv_length is not None or not cache.recordable for cache in self.caches):
            written = [cache.update(*part, layer_idx) for cache, part in zip(self.caches, parts, strict=True)]
            return tuple(zip(*written, strict=True))
        slots = [cache.slots_for(key, value, layer_idx) for cache, (key, value) in zip(self.caches, parts, strict=True)]
        # One call for all texts.
        torch._foreach_copy_([each for pair in slots for each in pair], [each for pair in parts for each in pair])
        if self._writes is None:
            self._writes = self._writes_to_blocks()
        return self._seen(layer_idx)

    def _seen(self, layer_idx: int) -> tuple:
        seen = [cache.seen_by(count, layer_idx) for cache, count in zip(self.caches, self.counts, strict=True)]
        return tuple(zip(*seen, strict=True))

    def _writes_to_blocks(self) -> "list[_BlockWrite]":
        """How the other layers' pairs are written, if all texts' caches are in blocks, for which room has been made."""
        tokens: dict[Block, list[tuple[int, int, int]]] = {}
        for cache, count, end in zip(self.caches, self.counts, accumulate(self.counts), strict=True):
            if cache.block is None:
                return []
            length = cache.get_seq_length()
            own = [(end - count + number, cache.place, length + number) for number in range(count)]
            tokens.setdefault(cache.block, []).extend(own)
        return [_BlockWrite(block, own, len(tokens) > 1) for block, own in tokens.items()]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest text's; positions are given to the model, which asks for this to size masks it does not make."""
        return max(cache.get_seq_length(layer_idx) for cache in self.caches)


class _BlockWrite:
    """Writes the pairs of all tokens whose caches are in one block, in one call each for keys and values.

    Args:
        tokens: of each, its number in the pass, the place of its cache and the slot in it.
        some: whether other tokens of the pass belong elsewhere.
    """

    def __init__(self, block: Block, tokens: list[tuple[int, int, int]], some: bool):
        numbers, *self._index = torch.tensor(tokens).T.contiguous().unbind()
        self._numbers = numbers if some else None
        self._buffers = [buffer.transpose(2, 3).unbind() for buffer in (block.keys, block.values)]

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        """Write a layer's pairs [tokens of the pass, G, D]."""
        for buffers, states in zip(self._buffers, (keys, values), strict=True):
            own = states if self._numbers is None else states.index_select(0, self._numbers)
            buffer = buffers[layer_idx]
            buffer.index_put_(tuple(self._index), own.to(buffer.dtype))
