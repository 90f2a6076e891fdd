"""The caches of several sequences as the one cache that a flattened pass is given."""

from collections.abc import Sequence

import torch
from transformers import Cache

from decoder.cache.base import LayeredCache


class FlattenedCaches(Cache):
    """Hands each sequence's new entries to its own cache; tokens of all sequences stand behind each other in a pass.

    What attention gets in place of a layer's keys and values are tuples, one entry per sequence: nothing is padded to
    the longest and no cache is copied. A model that looks at keys between cache and attention cannot run like this,
    which `model.Target` finds out when it is made.

    Args:
        caches: one per sequence.
        counts: how many tokens of the pass are each sequence's, in order.
    """

    def __init__(self, caches: Sequence[LayeredCache], counts: Sequence[int]):
        super().__init__(layers=[])
        self.caches, self.counts = caches, list(counts)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write a layer's new entries [1, G, sum of counts, D]; what each sequence sees, as `LayeredCache.update`."""
        parts = list(
            zip(*(states.split_with_sizes(self.counts, 2) for states in (key_states, value_states)), strict=True)
        )
        first = self.caches[0]
        beside = first.states and first.layout.kinds[layer_idx] in first.states
        if beside or any(cache.kv_length is not None or not cache.recordable for cache in self.caches):
            written = [cache.update(*part, layer_idx) for cache, part in zip(self.caches, parts, strict=True)]
            return tuple(zip(*written, strict=True))
        slots = [cache.slots_for(key, value, layer_idx) for cache, (key, value) in zip(self.caches, parts, strict=True)]
        # One call for all sequences.
        torch._foreach_copy_([each for pair in slots for each in pair], [each for pair in parts for each in pair])
        seen = [cache.seen_by(count, layer_idx) for cache, count in zip(self.caches, self.counts, strict=True)]
        return tuple(zip(*seen, strict=True))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest sequence's; models, which are given positions, ask for this to size masks they do not make."""
        return max(cache.get_seq_length(layer_idx) for cache in self.caches)
