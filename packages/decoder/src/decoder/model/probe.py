"""What is found out about a model by running it, on a few tokens."""

from typing import TYPE_CHECKING

import torch

from decoder.cache.full import FullCache
from decoder.sampling.token_tree import TokenTree

if TYPE_CHECKING:
    from decoder.model.target import Target

# More than half precision leaves in logits as relative error, less than another function of them would.
LOGITS_TOLERANCE = 0.02


class ProbedCache(FullCache):
    """Tells which layers use it."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.written: set[int] = set()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.written.add(layer_idx)
        return super().update(key_states, value_states, layer_idx)


@torch.inference_mode()
def runs_flattened(target: "Target") -> bool:
    """Whether the model runs several texts in one pass, each over its own cache, and gives what it gives alone."""
    trees = [TokenTree(0), TokenTree(1 % target.vocab_size)]
    trees[0].add(0, 0, "probe")
    texts = [[0, 0, 0], [0]]

    def verified(together: bool) -> list[torch.Tensor]:
        caches = [ProbedCache(len(text) + target.width(2)) for text in texts]
        for text, cache in zip(texts, caches, strict=True):
            target.prefill(text, cache)
        size = len(trees) if together else 1
        groups = (slice(start, start + size) for start in range(0, len(trees), size))
        seen = (one for group in groups for one in target._verify(trees[group], caches[group], observe=False))
        return [verification.logits.double() for verification in seen]

    try:
        with target.patched():
            pairs = zip(verified(together=True), verified(together=False), strict=True)
            return all((a - b).norm() <= LOGITS_TOLERANCE * b.norm() for a, b in pairs)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError):
        # Some models look at keys on their way from the cache to attention.
        return False
