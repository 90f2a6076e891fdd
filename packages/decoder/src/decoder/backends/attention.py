"""Attention of a few new tokens over a cache.

Registered with transformers' `AttentionInterface`, so every model that uses that interface runs it unchanged.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from decoder.backends.cuda import bitwise_split_kv, split_kv
from decoder.backends.native.native_attention import NewTokens, native_attention

NAME = "tokenswift"

# Upper bound of one block of the score matrix; long prefill chunks are cut along their queries to stay below it.
_MAX_SCORES = 64 * 2**20

# What models hand to every attention function and what means nothing to this one: positions are in the keys already,
# and the others choose what to return.
_HARMLESS = frozenset(
    ("cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache")
)


class AttentionShape(NamedTuple):
    """How many query and KV heads a layer of the model has, their sizes and dtype."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype


class TextInPass(NamedTuple):
    """One text's share of a pass.

    Attributes:
        tokens: T, its new tokens.
        mask: which new token sees which, bool [T, T]; None is plain causal.
        kv_length: where given, the cached tokens' number L in device memory, int64 [1]; key and value are then whole
            buffers, whose entries from L on are the new ones, and what lies behind them means nothing.
        tails: where given, the order of all sums follows from positions alone: `tails.tail_slots` of the new tokens, in
            device memory; key and value may be whole buffers.
        native: where given, the native library attends, for all texts of a pass: the cached tokens' number L.
    """

    tokens: int
    mask: torch.Tensor | None = None
    kv_length: torch.Tensor | None = None
    tails: torch.Tensor | None = None
    native: int | None = None


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | tuple[torch.Tensor, ...],
    value: torch.Tensor | tuple[torch.Tensor, ...],
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    texts: Sequence[TextInPass] | None = None,
    queries: dict[int, torch.Tensor] | None = None,
    observed: int = 0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of T new tokens over L cached ones and themselves; of several texts in one pass each over its own.

    The cached prefix is seen by all and needs no mask; among a text's new tokens the mask is its own, or causal
    without one. Query heads are packed per KV head, so no key or value is ever replicated.

    Args:
        module: the model's attention layer, with its ``layer_idx`` and ``config``.
        query: [B, H, T, D]. key, value: [B, G, L + T, D], the T new entries last; usually views of a cache, each D
            numbers next to each other. Of several texts, whose tokens stand behind each other in the queries [1, H, T,
            D], they are tuples with an entry per text.
        texts: the texts of the pass; None stands for one text without a mask.
        queries: where given, the layer's last ``observed`` queries are left there under its index.

    Returns:
        [B, T, H, D], and None for the weights.

    Raises:
        ValueError: the model asks for more than causal attention: a mask of its own, a window that binds, attention
            sinks, a soft cap, a position bias, or anything else that is not known to change nothing.
    """
    asked = more_than_causal(module, attention_mask, kwargs)
    if asked:
        raise ValueError(f"{module.config.model_type} uses {asked}; only plain causal attention can be accelerated")
    if queries is not None:
        last = query[:, :, -observed:]
        # A view would keep a long chunk's queries alive.
        queries[module.layer_idx] = last if last.shape[2] == query.shape[2] else last.clone()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if texts and texts[0].native is not None:
        rows = query[0].transpose(0, 1)
        output = attend_natively(texts, rows, query.shape[1], key, value, scaling)
        return output.view(1, *rows.shape[:2], -1), None
    if isinstance(key, tuple):
        assert texts is not None
        own = query.split([text.tokens for text in texts], 2)
        outputs = [_attend(*parts, scaling).transpose(1, 2) for parts in zip(own, key, value, texts, strict=True)]
        return torch.cat(outputs, 1), None
    text = texts[0] if texts else TextInPass(query.shape[2])
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    output = _attend(query, key, value, text, scaling)
    # Some models take a view of this, as they may of what transformers' own functions return.
    return output.transpose(1, 2).contiguous(), None


def attend_natively(
    texts: Sequence[TextInPass],
    heads: torch.Tensor,
    query_heads: int,
    key: torch.Tensor | tuple[torch.Tensor, ...],
    value: torch.Tensor | tuple[torch.Tensor, ...],
    scaling: float,
) -> torch.Tensor:
    """`native_attention` of all texts of a pass; key and value as for `tree_attention`, queries [T, H or more, D]."""
    keys, values = (one if isinstance(one, tuple) else (one,) for one in (key, value))
    if heads.stride()[1:] != (heads.shape[2], 1):
        heads = heads.contiguous()
    new = [NewTokens(text.native or 0, text.tokens, text.mask) for text in texts]
    return native_attention(heads, query_heads, keys, values, new, scaling)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, text: TextInPass, scaling: float
) -> torch.Tensor:
    """[B, H, T, D]: attention of one text's new tokens."""
    if text.tails is not None:
        output = bitwise_split_kv.bitwise_split_kv_attention(query.to(key.dtype), key, value, text.tails, scaling)
        return output.to(query.dtype)
    if text.kv_length is not None:
        output = split_kv.split_kv_attention(query.to(key.dtype), key, value, text.kv_length, text.mask, scaling)
        return output.to(query.dtype)
    new, blocked = query.shape[2], None
    if new > 1:
        blocked = query.new_ones(new, new, dtype=torch.bool).triu(1) if text.mask is None else ~text.mask
    return _one_softmax(query, key, value, blocked, scaling)


def _one_softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocked: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """[B, H, T, D]: one softmax over all scores, on every device and in every precision."""
    batch, heads, new, dim = query.shape
    groups, length = key.shape[1], key.shape[2]
    packed = (query * scaling).reshape(batch, groups, heads // groups, new, dim)
    transposed_key = key.mT
    rows = max(1, _MAX_SCORES // (batch * heads * length))
    outputs = []
    for start in range(0, new, rows):
        part = packed[:, :, :, start : start + rows]
        count = part.shape[3]
        scores = part.reshape(batch, groups, -1, dim) @ transposed_key
        if blocked is not None:
            block = scores.view(batch, groups, -1, count, length)[..., length - new :]
            block.masked_fill_(blocked[start : start + rows], -torch.inf)
        # Half precision is too coarse to sum many small weights in.
        weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(value.dtype)
        outputs.append((weights @ value).reshape(batch, heads, count, value.shape[-1]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def more_than_causal(module: Any, attention_mask: torch.Tensor | None, kwargs: dict) -> str | None:
    """In words, what a layer asks for besides plain causal attention, with what it hands to its attention function."""
    asked = None if attention_mask is None else "an attention mask of its own"
    if not getattr(module, "is_causal", True):
        asked = "attention in both directions"
    for name, value in kwargs.items():
        if name == "is_causal" and value is False:
            asked = "attention in both directions"
        elif name == "sliding_window" and value is not None:
            if value < module.config.max_position_embeddings:
                asked = f"a sliding window of {value} tokens"
        elif name not in _HARMLESS and name != "is_causal" and value is not None:
            asked = f"{name!r} in its attention"
    return asked


AttentionInterface.register(NAME, tree_attention)
