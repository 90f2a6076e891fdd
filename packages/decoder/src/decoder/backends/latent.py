"""Multi-head latent attention: layers that keep a compressed key and value, from which those of all heads follow."""

from typing import Any, Protocol

import torch


class Compressed(Protocol):
    """Attention to compressed keys as they are kept: queries are compressed, too, and what they give is restored."""

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [1, H, T, D] for what is kept, [1, H, T, rank + rotary size], as `for_latents` gives them."""

    def entries(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys [B, 1, n, rank + rotary size] and values [B, 1, n, rank] of what a layer keeps in their place."""

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """The values [B, T, H, Dv] of what was attended to, [B, T, H, rank]."""


def is_latent(module: Any) -> bool:
    """Whether an attention layer keeps what its keys and values are expanded from."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")


def for_latents(layer: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries [B, H, T, D] of a layer for what it keeps: [B, H, T, rank + rotary size].

    Their products with the compressed keys, followed by the rotary parts, are those with the keys of each head.
    """
    rank, nope = layer.kv_lora_rank, layer.qk_nope_head_dim
    # Expanding is linear: its matrix is what it makes of a unit matrix, however the weights are held.
    unit = torch.eye(rank, dtype=query.dtype, device=query.device)
    expansion = layer.kv_b_proj(unit).view(rank, query.shape[1], -1)[..., :nope]
    return torch.cat((torch.einsum("bhtn,rhn->bhtr", query[..., :nope], expansion), query[..., nope:]), -1)
