"""Properties of a model that are found by running it on a few tokens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.backends.attention import Scores
from decoder.backends.base import AttentionShape, PassBatch, PassOutput, Tree
from decoder.backends.check import Expected, trial_tree
from decoder.backends.forwards import replaced
from decoder.backends.latent import is_latent
from decoder.backends.reference.backend import Reference
from decoder.cache.full import FullCache
from decoder.cache.layout import FULL, RECURRENT, LayerKind, Layout
from decoder.cache.recurrent import RecurrentStates
from decoder.sampling.token_tree import TokenTree

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

    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        """Of a mask that is not made: how many keys there are, and the position of the first."""
        return self.capacity, 0

    def get_query_offset(self, *args, **kwargs) -> int:
        """The position of the first query."""
        return 0


class Probed(NamedTuple):
    """The properties found.

    Attributes:
        logit_scale: the factor from the language-model head's output to the model's logits.
        shapes: by kind the shape of attention layers.
        layout: the layers, of which some may keep nothing of their own.
        asked: by layer what it asks its attention for.
        expected: what the reference gives, for comparing.
        state_bytes: of what recurrent layers keep behind a token.
        latent: whether what layers keep is expanded before it is attended to.
    """

    logit_scale: float
    shapes: dict[LayerKind, AttentionShape]
    layout: Layout
    asked: dict[int, Scores]
    expected: Expected
    state_bytes: int
    latent: bool


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
    asked: dict[int, Scores] = {}
    try:
        cache, seen = _run(reference, tree, asked)
        with replaced(reference.called):
            raw = target.lm_head(target.norm(seen.hidden))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{target.name} cannot be run with another attention and cache: {reason}") from error
    attending = target.layout.attending
    layout = Layout(target.layout.kinds, sorted(cache.written), len(target.mixers))
    sharing = {target.layout.kinds[layer] for layer in attending if layer not in cache.written}
    if sorted(seen.queries) != attending or (sharing and not _shares(target, sharing, layout)):
        raise ValueError(
            f"{target.name} does not use transformers' attention interface and cache in all {len(attending)} layers"
        )
    shapes = {
        kind: _shape(cache, kind, seen.queries[layers[0]].shape[1])
        for kind, layers in layout.members.items()
        if kind != RECURRENT
    }
    expected = Expected(seen, cache.beginning(len(tree), cache.written))
    states = 0 if cache.recurrent is None else cache.recurrent.nbytes // len(tree)
    latent = any(map(is_latent, target.modules))
    return Probed(_logit_scale(target, raw, seen.logits), shapes, layout, asked, expected, states, latent)


def _run(reference: Reference, tree: TokenTree, asked: dict[int, Scores]) -> tuple[ProbedCache, PassOutput]:
    """Run the tree, and compare the model's masks with what is known of its layers if it only hands them on."""
    for compares_masks in (True, False):
        cache = ProbedCache(len(tree))
        try:
            return cache, reference.run_asking(asked, PassBatch([Tree(tree, cache)], True, len(tree)), compares_masks)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError):
            if not compares_masks:
                raise
    raise AssertionError


def _shares(target: "Target", kinds: set[LayerKind], layout: Layout) -> bool:
    """Whether layers of these kinds may use what an earlier one keeps, as the configuration says."""
    return bool(getattr(target.model.config, "num_kv_shared_layers", 0)) and kinds <= layout.members.keys()


def _shape(cache: FullCache, kind: LayerKind, heads: int) -> AttentionShape:
    held = cache if kind == FULL else cache.states[kind]
    assert not isinstance(held, RecurrentStates)
    return AttentionShape(heads, held.keys.shape[2], held.keys.shape[4], held.values.shape[4], held.keys.dtype)


def _logit_scale(target: "Target", raw: torch.Tensor, logits: torch.Tensor) -> float:
    """What the model multiplies its head's outputs by, before it caps them."""
    # A row at a time: in double precision those of a large vocabulary take much memory.
    cap, scale, errors, size = target.logit_cap, 1.0, 0.0, 0.0
    if cap is None and raw.any():
        products = [(float(own @ made), float(own @ own)) for own, made in _in_double(raw, logits)]
        scale = sum(product for product, _ in products) / sum(square for _, square in products)
    for own, made in _in_double(raw, logits):
        expected = own * scale if cap is None else (own / cap).tanh() * cap
        errors, size = errors + float((expected - made).square().sum()), size + float(made.square().sum())
    if errors > _LOGITS_TOLERANCE**2 * size:
        raise ValueError(f"{target.name} changes its logits behind its language-model head; that cannot be drafted for")
    return scale if abs(scale - 1) > _LOGITS_TOLERANCE else 1.0


def _in_double(raw: torch.Tensor, logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((own.double(), made.double()) for own, made in zip(raw, logits, strict=True))
