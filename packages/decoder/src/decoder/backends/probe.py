"""Properties of a model that are found by running it on a few tokens."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.backends.base import AttentionShape, PassBatch, Tree
from decoder.backends.check import Expected, trial_tree
from decoder.backends.forwards import replaced
from decoder.backends.reference.backend import Reference
from decoder.cache.full import FullCache

if TYPE_CHECKING:
    from decoder.model.target import Target

# A relative error of logits above that of half precision and below that of another function of them.
_LOGITS_TOLERANCE = 0.02


class ProbedCache(FullCache):
    """Records which layers write to it."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.written: set[int] = set()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.written.add(layer_idx)
        return super().update(key_states, value_states, layer_idx)


class Probed(NamedTuple):
    """The properties found.

    Attributes:
        logit_scale: the factor from the language-model head's output to the model's logits.
        attention_shape: the shape of the attention layers.
        kv_bytes: how many bytes the keys and values of a token take in all layers.
        expected: what the reference gives, for comparing.
    """

    logit_scale: float
    attention_shape: AttentionShape
    kv_bytes: int
    expected: Expected


@torch.inference_mode()
def probe(target: "Target", reference: Reference) -> Probed:
    """Run a small tree by the reference.

    Raises:
        ValueError: the model cannot be decoded exactly, for a reason that its configuration does not show.
    """
    experts = getattr(target.model.config, "_experts_implementation", None)
    if target.dtype == torch.float64 and experts == "grouped_mm":
        raise ValueError(f"{target.name} runs in float64 only with experts_implementation='eager': load it with that")
    tree = trial_tree(target.vocab_size)
    cache = ProbedCache(len(tree))
    try:
        seen = reference.run(PassBatch([Tree(tree, cache)], True, len(tree)))
        assert seen.logits is not None
        with replaced(reference.called):
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
    return Probed(scale, shape, cache.nbytes // cache.capacity, Expected(seen, (key, value)))
