"""A multi-token-prediction module: one more decoder layer of the model's own kind, which predicts one token further."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from decoder.backends.base import PassOutput
from decoder.draft_layer import Attend, EntryShape, RepeatedLayer
from decoder.model.architectures import decoder_of
from decoder.timings import stage

KIND = "mtp"
ATTENTION = "tokenswift-draft-layer"
"""The attention function of transformers' layers that are given ``attend``."""
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    *,
    attend: Attend,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' layer: it hands over what is [1, heads, n, D]."""
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    return attend(query, key, value, scaling)[None], None


AttentionInterface.register(ATTENTION, _attention)


class MtpModule(RepeatedLayer):
    """Drafts with the module that DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5 were trained with (arXiv 2412.19437,
    section 2.2): ``layer(fc([norm(embedding); norm(state)]))``, normalised.

    An entry's state is the model's last hidden state behind the final norm; of drafts it is what came out before, also
    normalised. Embeddings and language-model head are the model's.

    Args:
        config: of a model of one layer, which is the module's; see `checkpoint.module_config`.

    Raises:
        ValueError: the family's layers are of another make.
    """

    kind = KIND

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        decoder, d = decoder_of(model), config.hidden_size
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.layers = decoder.layers
        self.norm = decoder.norm
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = deepcopy(decoder.norm), deepcopy(decoder.norm)
        self.take_rotary(type(decoder.rotary_emb), config)
        if {name for name, _ in self._layer.named_children()} != _PARTS:
            raise ValueError(f"layers of {config.model_type} have other parts than {', '.join(sorted(_PARTS))}")

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def entry_shape(self) -> EntryShape:
        config = self.config
        if getattr(config, "kv_lora_rank", None):  # compressed keys are kept as those of each head
            return EntryShape(config.num_attention_heads, config.qk_head_dim, config.v_head_dim)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return EntryShape(config.num_key_value_heads, dim, dim)

    def check_fits(self, hidden_size: int, vocab_size: int | None = None, layers: int | None = None) -> None:
        own = f"hidden size {self.hidden_size} and {self.config.vocab_size} tokens"
        if hidden_size != self.hidden_size or vocab_size not in (None, self.config.vocab_size):
            raise ValueError(f"the built-in heads{self._where} are for a model of {own}: give the folder of this model")

    def features_of(self, seen: PassOutput) -> torch.Tensor:
        return seen.hidden

    def combine(self, features: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return norm(features)

    @stage("draft")
    def take_in(self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor, attend: Attend) -> None:
        self._attended(self._joined(state, embedding), positions, attend)

    @stage("draft")
    def advance(
        self,
        state: torch.Tensor,
        embedding: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._joined(state, embedding)
        hidden = hidden + self._attended(hidden, positions, attend)
        hidden = hidden if last is None else hidden[:, last]
        hidden = hidden + self._layer.mlp(self._layer.post_attention_layernorm(hidden))
        normalised = self.norm(hidden)[0]
        return normalised, normalised

    def _joined(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """What the layer reads, [1, n, d]."""
        dtype = self.fc.weight.dtype
        read = self.pre_fc_norm_embedding(embedding.to(dtype)), self.pre_fc_norm_hidden(state.to(dtype))
        return self.fc(torch.cat(read, -1))[None]

    def _attended(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The output of attention, [1, n, d]."""
        output, _ = self._layer.self_attn(
            hidden_states=self._layer.input_layernorm(hidden),
            position_embeddings=self.angles(hidden, positions[None]),
            attention_mask=None,
            attend=attend,
        )
        return output
