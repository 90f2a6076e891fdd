"""Gemma 4's assistant: a few layers that draft from the model's last hidden state and read the model's KV cache."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from decoder.backends.base import AttentionShape
from decoder.cache.layout import LayerKind, Layout
from decoder.draft_heads import Drafting
from decoder.eagle3.draft_model import rotated
from decoder.model.architectures import layer_kinds
from decoder.timings import stage

KIND = "assistant"
AttendText = Callable[[LayerKind, torch.Tensor, float], torch.Tensor]
"""The attention [n, heads, D] of queries [n, heads, D] to what the model keeps of the text in its last layer of a kind,
whose products are scaled by the last argument."""


class _Clusters(nn.Module):
    """Which of the vocabulary's clusters are likely to hold the next token, and which tokens they hold."""

    token_ordering: torch.Tensor

    def __init__(self, hidden_size: int, vocab_size: int, clusters: int, best: int):
        super().__init__()
        if vocab_size % clusters or not 1 <= best <= clusters:
            raise ValueError(f"{vocab_size} tokens cannot be told apart by the best {best} of {clusters} centroids")
        self.best = best
        self.centroids = nn.Linear(hidden_size, clusters, bias=False)
        self.register_buffer("token_ordering", torch.empty(vocab_size, dtype=torch.int64))

    def forward(self, normalised: torch.Tensor) -> torch.Tensor:
        """The tokens [n, v] of the likeliest clusters behind states [n, h]."""
        likely = self.centroids(normalised).topk(self.best, -1).indices
        return self.token_ordering.view(self.centroids.out_features, -1)[likely].flatten(1)


class AssistantModel(Drafting):
    """Drafts token by token: a level reads the token before it and what came out of the level before.

    The first level reads the model's last hidden state behind its final norm. Queries alone are the assistant's own:
    each of its layers attends to the keys and values that the model's last layer of the same kind keeps of the text, as
    if it stood where the newest token does, at all levels. So drafts need no entries of their own, and no prompt is
    read. The language-model head is the assistant's, too; the smaller ones ask it for the tokens of the likeliest
    clusters of the vocabulary alone.

    Args:
        config: of its layers, as of a small Gemma 4.
        hidden_size: of the model that it is for.
        clusters: into how many the vocabulary is cut, and how many of these a level looks at; None looks at all tokens.

    Attributes:
        layer_kinds: what each layer attends to.
        drafted: among how many tokens a level chooses.
    """

    kind: ClassVar[str] = KIND
    conditioned: ClassVar[bool] = True

    def __init__(self, config: PreTrainedConfig, hidden_size: int, clusters: tuple[int, int] | None = None):
        super().__init__()
        self.config: Any = deepcopy(config)
        self.hidden_size = hidden_size
        # A model all of whose layers share the keys of others is refused by some of transformers' releases. What theirs
        # would be made with is taken away.
        self.config.num_kv_shared_layers = 0
        model: Any = AutoModel.from_config(self.config)
        for layer in model.layers:
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
                delattr(layer.self_attn, name)
        self.layer_kinds = layer_kinds(self.config)
        self.layers, self.norm = model.layers, model.norm
        own = self.config.hidden_size
        self.pre_projection = nn.Linear(2 * self.hidden_size, own, bias=False)
        self.post_projection = nn.Linear(own, self.hidden_size, bias=False)
        self.masked_embedding: _Clusters | None = None
        self.drafted: int = self.config.vocab_size
        # Of a head of which some rows are wanted no packed copy is made.
        self.lm_head: nn.Linear | nn.Embedding
        if clusters is not None:
            self.masked_embedding = _Clusters(own, self.config.vocab_size, *clusters)
            self.drafted = self.config.vocab_size // clusters[0] * clusters[1]
            self.lm_head = nn.Embedding(self.config.vocab_size, own)
        else:
            self.lm_head = nn.Linear(own, self.config.vocab_size, bias=False)
        # In a tuple it is no submodule: its frequencies keep their precision when the weights are cast.
        with torch.device("cpu"):
            self._rotary = (type(model.rotary_emb)(config=self.config),)

    @property
    def num_heads(self) -> int:
        """One, which serves any number of levels."""
        return 1

    def extra_repr(self) -> str:
        return f"backbone_hidden_size={self.hidden_size}, layers={', '.join(map(str, self.layer_kinds))}"

    def check_fits(self, hidden_size: int, vocab_size: int | None = None) -> None:
        """Raise ValueError unless it is for a model of that hidden size and vocabulary."""
        if hidden_size != self.hidden_size or vocab_size not in (None, self.config.vocab_size):
            own = f"hidden size {self.hidden_size} and {self.config.vocab_size} tokens"
            raise ValueError(f"the assistant{self._where} is for a model of {own}: give the one of this model")

    def check_attends(self, layout: Layout, shapes: Mapping[LayerKind, AttentionShape]) -> None:
        """Raise ValueError unless a model of that layout keeps what its layers attend to."""
        heads = self.config.num_attention_heads
        for kind, layer in zip(self.layer_kinds, self.layers, strict=True):
            shape = shapes.get(kind) if layout.members.get(kind) else None
            if shape is None:
                raise ValueError(f"the assistant{self._where} reads {kind}, of which the model keeps nothing")
            if (shape.dim, shape.value_dim) != (layer.self_attn.head_dim,) * 2 or heads % shape.kv_heads:
                raise ValueError(
                    f"the assistant{self._where} has {heads} heads of {layer.self_attn.head_dim} for {kind}, the model "
                    f"keeps {shape.kv_heads} of {shape.dim}: give the assistant of this model"
                )

    @stage("draft")
    def advance(
        self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor, attend: AttendText
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next states [n, d], and the normalised ones [n, h] for `candidates`.

        Args:
            state: [n, d].
            embedding: of the tokens before, [n, d].
            positions: of the newest token of each row's text, int64 [n].
            attend: attention to the text.
        """
        dtype = self.norm.weight.dtype  # matrices may be in a file's format
        hidden = self.pre_projection(torch.cat((embedding.to(dtype), state.to(dtype)), -1))
        for name, kind, layer in zip(self.config.layer_types, self.layer_kinds, self.layers, strict=True):
            own: Any = layer
            query = self._query(own.self_attn, own.input_layernorm(hidden), positions, name)
            attended = own.self_attn.o_proj(attend(kind, query, own.self_attn.scaling).flatten(1))
            hidden = hidden + own.post_attention_layernorm(attended)
            change = own.mlp(own.pre_feedforward_layernorm(hidden))
            hidden = (hidden + own.post_feedforward_layernorm(change)) * own.layer_scalar
        normalised = self.norm(hidden)
        return self.post_projection(normalised), normalised

    def _query(self, attention: Any, x: torch.Tensor, positions: torch.Tensor, name: str) -> torch.Tensor:
        """The queries [n, heads, D] of rows [n, h]; ``name`` is transformers' for the kind of layer."""
        query = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, attention.head_dim)))
        angles = self._rotary[0](x, positions[None], name)
        return rotated(query, *(one[0, :, None] for one in angles))

    @stage("draft")
    def candidates(self, normalised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [n, drafted] behind normalised states [n, h], and of which tokens they are; None of all."""
        if self.masked_embedding is None:
            return self.lm_head(normalised), None
        tokens = self.masked_embedding(normalised)
        return (self.lm_head(tokens) @ normalised[:, :, None])[:, :, 0], tokens
