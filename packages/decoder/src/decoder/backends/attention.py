"""The attention function that transformers' layers call while a pass runs: a backend's own, over its caches.

Registered with transformers' `AttentionInterface`, so every model that uses that interface runs it unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from decoder.backends.latent import Compressed, for_latents, is_latent
from decoder.cache.layout import FULL, LayerKind

NAME = "tokenswift"
ASKING = "tokenswift-asking"
"""The same, where models make `AskedMask`s, which are compared with what is known of their layers."""

# What models hand to every attention function and what means nothing to this one: positions are in the keys already,
# and the others choose what to return.
_HARMLESS = frozenset(
    ("cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache")
)

Entries = Sequence[torch.Tensor]
"""Keys or values of a layer, of each sequence of a pass: [B, G, slots, D], each D numbers next to each other."""


class Scores(NamedTuple):
    """How a layer makes weights of the products of queries and keys.

    Attributes:
        scaling: the factor of the products.
        kind: which tokens see which.
        sinks: by query head a score that takes part in the softmax and has no value, [H].
        softcap: c, where a score s becomes c tanh(s / c).
    """

    scaling: float
    kind: LayerKind = FULL
    sinks: torch.Tensor | None = None
    softcap: float | None = None

    @property
    def beside(self) -> dict[str, Any]:
        """What is asked for beside scaling and kind, by the names of the fields."""
        return {name: value for name, value in self._asdict().items() if name in _BESIDE and value is not None}

    @property
    def more_than_causal(self) -> str | None:
        """In words, what is asked for besides the softmax of scaled products over all earlier tokens."""
        return str(self.kind) if self.kind != FULL else next(map(_BESIDE.__getitem__, self.beside), None)


# By the names of fields of `Scores`, what a layer asks for in words, and what models call it that hand it to attention.
_BESIDE = {"sinks": "attention sinks", "softcap": "soft-capped scores"}
_HANDED = {"s_aux": "sinks", "softcap": "softcap"}


class Temperature(NamedTuple):
    """Llama 4's factor of the queries at position p: 1 + scale log(1 + floor((p + 1) / step))."""

    step: float
    scale: float

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.step)) * self.scale + 1.0


class AskedMask:
    """What a model makes in place of a mask: a function that tells of a query's and a key's position what is seen."""

    def __init__(self, sees: Callable[..., Any]):
        self._sees = sees

    def unlike(self, kind: LayerKind, longest: int) -> bool:
        """Whether it is another mask than that of a layer of a kind, in sequences of at most ``longest`` tokens."""
        size = min(sum(kind.reach) or longest, longest)
        queries = {0, 1, size - 1, size, size + 1, 2 * size, 3 * size + 1, longest - 1}
        compared = {
            (query, key)
            for query in queries
            for key in (0, query - size - 1, query - size, query - size + 1, query // size * size, query - 1, query)
            if 0 <= key <= query < longest
        }
        zero = torch.tensor(0)
        return any(
            bool(self._sees(zero, zero, *map(torch.tensor, pair))) != bool(kind.sees(*map(torch.tensor, pair)))
            for pair in compared
        )


def _asked_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> AskedMask:
    return AskedMask(mask_function)


class Attending(Protocol):
    """One sequence's new tokens, as one kind of attention takes them."""

    @property
    def tokens(self) -> int: ...

    @staticmethod
    def attend(
        sequences: Sequence[Any], query: torch.Tensor, keys: Entries, values: Entries, scores: Scores
    ) -> torch.Tensor:
        """[B, T, H, Dv], contiguous: attention of the new tokens of all sequences, queries [B, H, T, D], in a row."""


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | tuple[torch.Tensor, ...],
    value: torch.Tensor | tuple[torch.Tensor, ...],
    attention_mask: AskedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sequences: Sequence[Attending] = (),
    kinds: Sequence[LayerKind] = (),
    positions: torch.Tensor | None = None,
    temperature: Temperature | None = None,
    compressed: Compressed | None = None,
    queries: dict[int, torch.Tensor] | None = None,
    observed: int = 0,
    asked: dict[int, Scores] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of T new tokens over the cached ones and themselves; of several sequences, of each over its own.

    Args:
        module: the model's attention layer, with its ``layer_idx`` and ``config``.
        query: [B, H, T, D]. key, value: as the cache has returned them, usually views of it. Of several sequences,
            whose tokens stand behind each other in the queries [1, H, T, D], they are tuples with an entry per
            sequence.
        sequences: the sequences of the pass, all of one kind of attention.
        kinds: by layer, which tokens see which; without them all layers attend to the whole sequence.
        positions: of the new tokens, int64 [T].
        temperature: what the layer multiplies its queries by beside.
        compressed: how to attend to what the layer keeps without making keys and values of it; None makes them.
        queries: where given, the layer's last ``observed`` queries are left there under its index.
        asked: where given, what the layer asks for is left there under its index.
        kwargs: what else models hand over, `Scores` among it.

    Returns:
        [B, T, H, D], and None for the weights.

    Raises:
        ValueError: the model asks for what is not known: a mask of its own, another window than its configuration
            says, a position bias, or anything else that is not known to change nothing.
        LookupError: the layer has not handed on what the pass was given.
    """
    kind = kinds[module.layer_idx] if kinds else FULL
    beside = {field: kwargs.pop(name, None) for name, field in _HANDED.items()}
    if isinstance(attention_mask, AskedMask):
        if attention_mask.unlike(kind, module.config.max_position_embeddings):
            raise ValueError(f"{module.config.model_type} has another mask in a layer than its configuration says")
        attention_mask = None
    unknown = not_known(module, attention_mask, kwargs, kind)
    if unknown:
        raise ValueError(f"{module.config.model_type} uses {unknown}, which cannot be accelerated")
    if not sequences:
        raise LookupError("its layers hand nothing on to attention")
    if temperature is not None:
        assert positions is not None
        query = (query * temperature.at(positions)[None, None, :, None]).to(query.dtype)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, kind, **beside)
    if compressed is not None:
        query = compressed.queries(query)
    if queries is not None:
        last = query[:, :, -observed:]
        # A view would keep a long chunk's queries alive.
        last = last if last.shape[2] == query.shape[2] else last.clone()
        made = compressed is not None or not is_latent(module)
        queries[module.layer_idx] = last if made else for_latents(module, last)
    if asked is not None:
        asked[module.layer_idx] = scores
    keys, values = (one if isinstance(one, tuple) else (one,) for one in (key, value))
    if compressed is None:
        return sequences[0].attend(sequences, query, keys, values, scores), None
    entries = [compressed.entries(*pair) for pair in zip(keys, values, strict=True)]
    rows, parts = ([pair[place] for pair in entries] for place in (0, 1))
    return compressed.values(sequences[0].attend(sequences, query, rows, parts, scores)), None


def one_by_one(
    attend: Any, sequences: Sequence[Attending], query: torch.Tensor, keys: Entries, values: Entries
) -> torch.Tensor:
    """`Attending.attend` by a function of one sequence: of it, its queries, keys and values, to [B, H, T, Dv]."""
    own = query.split([sequence.tokens for sequence in sequences], 2)
    outputs = [attend(*parts).transpose(1, 2) for parts in zip(sequences, own, keys, values, strict=True)]
    # Some models take a view of this, as they may of what transformers' own functions return.
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0].contiguous()


def not_known(module: Any, attention_mask: torch.Tensor | None, kwargs: dict, kind: LayerKind = FULL) -> str | None:
    """In words, what a layer of a kind asks its attention function for that this one does not do."""
    asked = None if attention_mask is None else "an attention mask of its own"
    if not getattr(module, "is_causal", True):
        asked = "attention in both directions"
    for name, value in kwargs.items():
        if name == "is_causal" and value is False:
            asked = "attention in both directions"
        elif name == "sliding_window" and value is not None:
            # Some hand on a window that is longer than any sequence.
            if kind != LayerKind("window", value) and value < module.config.max_position_embeddings:
                asked = f"a sliding window of {value} tokens in a layer of {kind}"
        elif name not in _HARMLESS and name != "is_causal" and value is not None:
            asked = f"{name!r} in its attention"
    return asked


for name in (NAME, ASKING):
    AttentionInterface.register(name, tree_attention)
AttentionMaskInterface.register(ASKING, _asked_mask)
