"""DFlash's draft model: layers of Qwen3's kind that fill a block of masks in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, Qwen3Config

from decoder.cache.draft_layer import DraftLayerCache
from decoder.draft_heads import RMSNorm
from decoder.draft_layer import Attend, DraftLayer, EntryShape, attend
from decoder.eagle3.draft_model import rotated
from decoder.mtp.module import ATTENTION
from decoder.timings import stage

KIND = "dflash"
BlockAttend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""An `Attend` of the layer whose number is the first argument."""


@dataclass(frozen=True)
class DFlashConfig:
    """What a draft model is.

    Attributes:
        layers: of its layers, whose ``layer_types`` and ``sliding_window`` are not read.
        target_layers: as in `Eagle3Config`.
        block_size: the newest token and the masks behind it.
        mask_token: whose embedding stands in place of tokens that are not known.
        windows: for each layer, how many tokens up to its own a position sees; None sees all.
        causal: for each layer, whether a position in the block does not see those behind it.
        embedding_scale, logit_scale: of the model's embeddings as they are stored, and of its head's products.
        logit_cap: c, where logits x are c tanh(x / c).
    """

    layers: Qwen3Config
    target_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        if list(self.target_layers) != sorted({*self.target_layers}) or min(self.target_layers, default=-1) < 0:
            raise ValueError(f"the layers that it reads must ascend from 0 on, and are {list(self.target_layers)}")
        if type(self.block_size) is not int or not 2 <= self.block_size <= 1024:
            raise ValueError(f"block_size must be an integer from 2 to 1024, got {self.block_size!r}")
        if type(self.mask_token) is not int or not 0 <= self.mask_token < self.layers.vocab_size:
            raise ValueError(f"mask_token_id must be one of {self.layers.vocab_size} tokens, got {self.mask_token!r}")
        if any(window is not None and (type(window) is not int or window < 1) for window in self.windows):
            raise ValueError(f"sliding_window must be an integer of at least 1, got {list(self.windows)}")


class DFlashDraftModel(DraftLayer):
    """Drafts the tokens behind the newest one all at once, in a block [newest token, mask, mask, ...].

    Each position of the block predicts its own token. A layer attends to the block and, beside it, to an entry for each
    position of the text before it: keys and values that the layer makes of the features of `target_layers`, joined and
    normalised. Embeddings and language-model head are the model's, unless the checkpoint has its own.
    """

    kind = KIND
    conditioned = False

    def __init__(self, shape: DFlashConfig):
        super().__init__()
        self.shape, self.config, self.target_layers = shape, shape.layers, shape.target_layers
        # A layer that sees all needs all entries.
        self.sliding_window = None if None in shape.windows else max(filter(None, shape.windows))
        d, model = self.config.hidden_size, AutoModel.from_config(self.config, attn_implementation=ATTENTION)
        self.fc = nn.Linear(len(shape.target_layers) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, self.config.rms_norm_eps)
        self.layers, self.norm = model.layers, model.norm
        self.take_rotary(type(model.rotary_emb), self.config)

    @property
    def num_heads(self) -> int:
        return self.shape.block_size - 1

    @property
    def entry_shape(self) -> EntryShape:
        """Of all layers: the heads of one behind those of the other."""
        heads = self.config.num_hidden_layers * self.config.num_key_value_heads
        return EntryShape(heads, self.config.head_dim, self.config.head_dim)

    def extra_repr(self) -> str:
        return f"block_size={self.shape.block_size}, target_layers={self.target_layers}"

    @stage("draft")
    def combine(self, features: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    @stage("draft")
    def entries(self, state: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, heads of all layers, D] of what `combine` gives for the ``positions`` int64 [n]."""
        dim = self.config.head_dim
        angles = [one[0, :, None] for one in self.angles(state, positions[None])]
        attentions: Sequence[Any] = [layer.self_attn for layer in self.layers]
        keys = [each.k_norm(each.k_proj(state).unflatten(-1, (-1, dim))) for each in attentions]
        values = [each.v_proj(state).unflatten(-1, (-1, dim)) for each in attentions]
        return rotated(torch.cat(keys, 1), *angles), torch.cat(values, 1)

    def take_in(self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor, attend: Attend) -> None:
        keys, values = self.entries(state, positions - 1)
        attend(keys, keys, values, 1.0)

    @stage("draft")
    def draft(self, embedding: torch.Tensor, positions: torch.Tensor, attend: BlockAttend) -> torch.Tensor:
        """The normalised states [n, d] of the positions of blocks.

        Args:
            embedding: of their tokens, [n, d].
            positions: int64 [n].
            attend: see `attention_behind`.
        """
        hidden = embedding.to(self.fc.weight.dtype)[None]
        angles = self.angles(hidden, positions[None])
        for number, layer in enumerate(self.layers):
            own = partial(attend, number)
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles, attend=own)
        return self.norm(hidden)[0]

    def attention_behind(self, text: DraftLayerCache) -> BlockAttend:
        """The attention of a block to itself and to the entries of a sequence, behind which it is written."""
        size, (heads, *dims) = self.shape.block_size, self.entry_shape
        keys, values = (self.fc.weight.new_zeros(size, heads, dim) for dim in dims)
        text.write_drafts(keys, values, 0)
        room = text.read(size)

        def attending(
            layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            # Views: layers write one after the other, each into its own heads.
            read = [pairs[layer * keys.shape[1] : (layer + 1) * keys.shape[1]] for pairs in room]
            for pairs, new in zip(read, (keys, values), strict=True):
                pairs[:, -size:] = new.transpose(0, 1)
            if (window := self.shape.windows[layer]) is not None:
                read = [pairs[:, -window - size :] for pairs in read]
            mask = self._sees(layer, read[0].shape[1] - size, query.device)
            return attend(query, read[0], read[1], mask, scaling)

        return attending

    def _sees(self, layer: int, context: int, device: torch.device) -> torch.Tensor | None:
        """Which of ``context`` entries and then the block the block sees, bool [block, keys]; None is all."""
        window, causal, size = self.shape.windows[layer], self.shape.causal[layer], self.shape.block_size
        if window is None and not causal:
            return None
        before = torch.arange(size, device=device)[:, None] - torch.arange(-context, size, device=device)
        far = context + size if window is None else window
        # Unless it is causal, as much is seen behind a position as before it.
        return (before < far) & (before >= 0 if causal else -before < far)

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        """What becomes of the products of the language-model head."""
        scaled, cap = products * self.shape.logit_scale, self.shape.logit_cap
        return scaled if cap is None else (scaled / cap).tanh() * cap
