"""EAGLE-3's draft model: one decoder layer that reads three of the target's hidden states, and its own ones behind."""

import os
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from decoder.draft_heads import RMSNorm
from decoder.draft_layer import Attend, EntryShape, RepeatedLayer
from decoder.eagle3.config import Eagle3Config, default_layers
from decoder.timings import stage

KIND = "eagle3"
DRAFT_TO_TARGET_OFFSETS = "d2t"
_FEATURES = 3
_QUERY_BLOCK = 512  # queries whose scores exist at the same time in training


class _Attention(nn.Module):
    """The projections of the attention; keys, values and queries read [embedding; state].

    Names here and below are those of the checkpoints' tensors.
    """

    def __init__(self, config: Eagle3Config):
        super().__init__()
        query, pair = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
        read, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(read, query, bias=bias)
        self.k_proj = nn.Linear(read, pair, bias=bias)
        self.v_proj = nn.Linear(read, pair, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None


class _GatedUnit(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        d, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(d, width, bias=bias)
        self.up_proj = nn.Linear(d, width, bias=bias)
        self.down_proj = nn.Linear(width, d, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _GatedUnit(config)


class Eagle3DraftModel(RepeatedLayer):
    """Drafts with one decoder layer whose keys and values follow the text (arXiv 2503.01840, section 3).

    What an entry reads of the model are the features of `target_layers`; of drafts it reads what came out before.

    Like draft heads it may draft a part of the vocabulary only. It has a language-model head (`lm_head`) and embeddings
    (`embed_tokens`) of its own; where they are None it takes the target's.

    Args:
        config: its shape.
        draft_to_target: ids of the tokens drafted, int64 [v], without repetition; None drafts all.
        own_head: whether it has a language-model head of its own.

    Attributes:
        target_architecture: the target's class in transformers.

    Raises:
        ValueError: ``draft_to_target`` holds no token ids.
    """

    kind = KIND

    def __init__(
        self,
        config: Eagle3Config,
        draft_to_target: torch.Tensor | None = None,
        own_head: bool = False,
    ):
        super().__init__()
        self.config = config
        self.sliding_window = config.sliding_window
        self.target_architecture = "LlamaForCausalLM"
        if draft_to_target is not None:
            self.set_draft_vocabulary(draft_to_target)
        self.target_layers = config.target_layers
        d, features = config.hidden_size, _FEATURES if config.target_layers is None else len(config.target_layers)
        self.fc = nn.Linear(features * config.target_hidden_size, d, bias=False)
        self.input_norm = (
            RMSNorm(features * config.target_hidden_size, config.norm_eps) if config.norm_before_fc else None
        )
        norms = [RMSNorm(config.target_hidden_size, config.norm_eps) for _ in range(features)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = RMSNorm(d, config.norm_eps)
        if own_head:
            self.make_own_head()
        # Slow to import, and needed here alone.
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.take_rotary(LlamaRotaryEmbedding, _rotary_config(config))

    @property
    def hidden_size(self) -> int:
        return self.config.target_hidden_size

    @property
    def num_heads(self) -> int:
        """How many levels it was trained for; its one layer serves all of them."""
        return self.config.levels

    @property
    def _layer(self) -> _Layer:
        return cast(_Layer, self.layers[0])

    @property
    def entry_shape(self) -> EntryShape:
        return EntryShape(self.config.kv_heads, self.config.head_dim, self.config.head_dim)

    def extra_repr(self) -> str:
        return f"levels={self.config.levels}, target_layers={self.target_layers}"

    def check_fits(self, hidden_size: int, vocab_size: int | None = None, layers: int | None = None) -> None:
        """Raise ValueError unless it is for a target of that hidden size, vocabulary and number of layers.

        The number of layers also tells `target_layers` where the checkpoint does not.
        """
        if layers is not None:
            self.target_layers = self.config.target_layers or default_layers(layers)
        super().check_fits(hidden_size, vocab_size, layers)
        which = f"the draft model{self._where}"
        if self.embed_tokens is None and self.config.hidden_size != hidden_size:
            raise ValueError(f"{which} has hidden size {self.config.hidden_size} and no embeddings of its own")
        if self.lm_head is None and self.config.hidden_size != hidden_size:
            raise ValueError(f"{which} has hidden size {self.config.hidden_size} and no language-model head of its own")

    def save_pretrained(
        self, directory: str | os.PathLike, *, base_model: str | None = None, training: Mapping | None = None
    ) -> None:
        """Write a checkpoint in the layout of vLLM's speculators; see `checkpoint.save_draft_model`."""
        from decoder.eagle3.checkpoint import save_draft_model

        self.base_model = self.base_model if base_model is None else base_model
        save_draft_model(self, directory, training=training)

    @torch.no_grad()
    def init_from_norm(self, weight: torch.Tensor) -> None:
        """Make it predict what the last of its features do: attention and gated unit add nothing to them.

        The norm becomes the model's final one, ``weight`` [d].
        """
        d, layer = self.config.hidden_size, self._layer
        self.fc.weight.zero_()
        self.fc.weight[:, -d:].fill_diagonal_(1.0)
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.zero_()
        self.norm.weight.copy_(weight)

    def take_in(self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor, attend: Attend) -> None:
        query, keys, values, _ = self.project(state, embedding, positions)
        attend(query, keys, values, self.config.head_dim**-0.5)

    def advance(
        self,
        state: torch.Tensor,
        embedding: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, keys, values, residual = self.project(state, embedding, positions)
        attended = attend(query, keys, values, self.config.head_dim**-0.5)
        return self.finish(attended, residual) if last is None else self.finish(attended[last], residual[last])

    @stage("draft")
    def combine(self, features: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """The state [..., d] that the target's features [..., layers x target d] stand for."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    @stage("draft")
    def project(
        self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [..., heads, D], rotated, and the residual [..., d] of entries.

        Args:
            state: [..., n, d].
            embedding: of the entries' tokens, [..., n, d].
            positions: int64, broadcast to [..., n].
        """
        layer, config = self._layer, self.config
        attention = layer.self_attn
        normalised = layer.hidden_norm(state)
        read = torch.cat((layer.input_layernorm(embedding.to(state.dtype)), normalised), dim=-1)
        query = attention.q_proj(read).unflatten(-1, (config.attention_heads, config.head_dim))
        key = attention.k_proj(read).unflatten(-1, (config.kv_heads, config.head_dim))
        value = attention.v_proj(read).unflatten(-1, (config.kv_heads, config.head_dim))
        if attention.q_norm is not None and attention.k_norm is not None:
            query, key = attention.q_norm(query), attention.k_norm(key)
        cos, sin = self.angles(state, positions.reshape(1, -1))
        cos, sin = (one.view(*positions.shape, 1, config.head_dim) for one in (cos, sin))
        residual = normalised if config.norm_before_residual else state
        return rotated(query, cos, sin), rotated(key, cos, sin), value, residual

    @stage("draft")
    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention, ``attended`` [..., heads, D]: the next state and the normalised one, [..., d]."""
        layer = self._layer
        state = residual + layer.self_attn.o_proj(attended.flatten(-2))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        normalised = self.norm(state)
        return (normalised if self.config.norm_output else state), normalised

    def forward(self, features: torch.Tensor, tokens: torch.Tensor, count: int | None = None) -> list[torch.Tensor]:
        """The training-time test (section 3.2): every level of drafts behind every position, given the true tokens.

        Args:
            features: the target's, [batch, n, layers x target d].
            tokens: embeddings [batch, n, levels, d] of the tokens 1 .. levels positions ahead of each position.
            count: how many levels; all by default.

        Returns:
            Normalised states [batch, n, d], ready for the language-model head. The i-th (from 1) is for the token i + 1
            positions ahead.
        """
        state, outputs = self.combine(features), []
        positions = torch.arange(1, features.shape[1] + 1, device=features.device)
        keys, values = [], []
        for level in range(self.num_heads if count is None else count):
            query, key, value, residual = self.project(state, tokens[..., level, :], positions + level)
            keys.append(key)
            values.append(value)
            state, normalised = self.finish(self._attend_levels(query, keys, values), residual)
            outputs.append(normalised)
        return outputs

    def _attend_levels(
        self, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Attention [batch, n, heads, D] of a level of drafts, where ``query`` t drafts behind position t of the text.

        It sees the entries of the text up to its own, ``keys[0]`` and ``values[0]`` [batch, n, kv_heads, D], within the
        window; and of each level of drafts the one behind its own position.
        """
        count, window = query.shape[1], self.config.sliding_window or query.shape[1]
        outputs = []
        for start in range(0, count, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, count)
            first = max(0, start + 1 - window)
            rows = torch.arange(start, end, device=query.device)[:, None]
            columns = torch.arange(first, end, device=query.device)
            unseen = (columns > rows) | (columns <= rows - window)
            # [batch, kv_heads, queries that share it, rows, D]
            own = query[:, start:end].unflatten(2, (self.config.kv_heads, -1)).permute(0, 2, 3, 1, 4)
            own = own * self.config.head_dim**-0.5
            text = keys[0][:, first:end].permute(0, 2, 3, 1)[:, :, None]
            scores = [(own @ text).masked_fill(unseen, -torch.inf)]
            beside = [[one[:, start:end].transpose(1, 2)[:, :, None] for one in ones[1:]] for ones in (keys, values)]
            scores += [(own * key).sum(-1, keepdim=True) for key in beside[0]]
            weights = torch.cat(scores, -1).softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
            weights = weights.to(query.dtype)
            text_weights, *own_weights = weights.split([end - first] + [1] * len(beside[1]), -1)
            output = text_weights @ values[0][:, first:end].transpose(1, 2)[:, :, None]
            for weight, value in zip(own_weights, beside[1], strict=True):
                output = output + weight * value
            outputs.append(output.permute(0, 3, 1, 2, 4).flatten(2, 3))
        return torch.cat(outputs, 1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys [n, heads, D], turned by the angles of their positions; halves of a head are pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def _rotary_config(config: Eagle3Config) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.attention_heads * config.head_dim,
        num_attention_heads=config.attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rotary),
    )
