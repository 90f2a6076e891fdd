"""Attention of a few new tokens over a cache, in plain PyTorch.

Registered with transformers' `AttentionInterface`, so every model that uses that interface runs it unchanged. It is
also the referee for faster kernels.
"""

import torch
from transformers import AttentionInterface

NAME = "tokenswift"

# Upper bound of one block of the score matrix; long prefill chunks are cut along their queries to stay below it.
_MAX_SCORES = 64 * 2**20

# What models hand to every attention function and what means nothing to this one: positions are in the keys already,
# and the others choose what to return.
_HARMLESS = frozenset(
    ("cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache")
)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    tree_mask: torch.Tensor | None = None,
    queries: dict[int, torch.Tensor] | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of T new tokens over L cached ones and themselves.

    The cached prefix is seen by all and needs no mask; among the new tokens the mask is ``tree_mask`` [T, T] bool, or
    causal without one. Query heads are packed per KV head, so no key or value is ever replicated.

    Args:
        query: [B, H, T, D]. key, value: [B, G, L + T, D], the T new entries last.
        queries: where given, the layer's queries are left there under its index.

    Returns:
        [B, T, H, D], and None for the weights.

    Raises:
        ValueError: the model asks for more than causal attention: a mask of its own, a window that binds, attention
            sinks, a soft cap, a position bias, or anything else that is not known to change nothing.
    """
    _refuse_more_than_causal(module, attention_mask, kwargs)
    batch, heads, new, dim = query.shape
    groups, length = key.shape[1], key.shape[2]
    if queries is not None:
        queries[module.layer_idx] = query
    scaling = dim**-0.5 if scaling is None else scaling
    blocked = None
    if new > 1:
        visible = torch.ones(new, new, dtype=torch.bool, device=query.device).tril() if tree_mask is None else tree_mask
        blocked = ~visible
    packed = (query * scaling).reshape(batch, groups, heads // groups, new, dim)
    transposed_key = key.transpose(-1, -2)
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
        outputs.append((weights @ value).reshape(batch, heads, count, dim))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    # Some models take a view of this, as they may of what transformers' own functions return.
    return output.transpose(1, 2).contiguous(), None


def _refuse_more_than_causal(module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict) -> None:
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
    if asked:
        raise ValueError(f"{module.config.model_type} uses {asked}; only plain causal attention can be accelerated")


AttentionInterface.register(NAME, tree_attention)
