"""What is found out about a model by running it, on a few tokens."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.cache.full import FullCache
from decoder.kernels.self_test import AttentionShape
from decoder.sampling.token_tree import TokenTree

if TYPE_CHECKING:
    from decoder.model.target import Target

# More than half precision leaves in logits as relative error, less than another function of them would.
_LOGITS_TOLERANCE = 0.02


class ProbedCache(FullCache):
    """Tells which layers use it."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.written: set[int] = set()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.written.add(layer_idx)
        return super().update(key_states, value_states, layer_idx)


class Probed(NamedTuple):
    """What a pass over a tree has shown.

    Attributes:
        logit_scale: the factor from the LM head's output to the model's logits.
        attention_shape: of the layers.
        kv_bytes: of a token's keys and values in all layers.
    """

    logit_scale: float
    attention_shape: AttentionShape
    kv_bytes: int


@torch.inference_mode()
def probe(target: "Target") -> Probed:
    """Run a tree of three tokens.

    Raises:
        ValueError: what the configuration does not tell and could not be decoded exactly.
    """
    experts = getattr(target.model.config, "_experts_implementation", None)
    if target.lm_head.weight.dtype == torch.float64 and experts == "grouped_mm":
        raise ValueError(f"{target.name} runs in float64 only with experts_implementation='eager': load it with that")
    tree = TokenTree(0)
    for token in (0, 1 % target.vocab_size):
        tree.add(0, token, "probe")
    cache = ProbedCache(target.width(len(tree)))
    target.replacements()
    try:
        with target.patched():
            [seen] = target.forward([tree], [cache], observe=True)
            raw, logits = target.lm_head(target.norm(seen.hidden)).double(), seen.logits.double()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{target.name} cannot be run with another attention and cache: {reason}") from error
    if not len(seen.queries) == len(cache.written) == target.layers:
        raise ValueError(
            f"{target.name} does not use transformers' attention interface and cache in all {target.layers} layers"
        )
    heads, (key, value) = seen.queries[0].shape[1], (cache.keys, cache.values)
    shape = AttentionShape(heads, key.shape[2], key.shape[4], value.shape[4], key.dtype)
    scale = float((raw * logits).sum() / raw.square().sum()) if raw.any() else 1.0
    if (raw * scale - logits).norm() > _LOGITS_TOLERANCE * logits.norm():
        raise ValueError(f"{target.name} changes its logits behind its language-model head; that cannot be drafted for")
    scale = scale if abs(scale - 1) > _LOGITS_TOLERANCE else 1.0
    return Probed(scale, shape, cache.nbytes // cache.capacity)


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
            return all((a - b).norm() <= _LOGITS_TOLERANCE * b.norm() for a, b in pairs)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError):
        # Some models look at keys on their way from the cache to attention.
        return False
