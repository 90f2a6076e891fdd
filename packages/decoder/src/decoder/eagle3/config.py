"""The shape of an EAGLE-3 draft model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a draft model.

    Attributes:
        target_hidden_size: size of the target's hidden states.
        hidden_size: d, the size of the draft model's own, mostly the same.
        intermediate_size: width of its gated unit.
        attention_heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: size of a head.
        vocab_size: how many tokens the target has.
        target_layers: the layers of the target whose inputs are the features, which are joined in the order in which
            layers run; the number of layers stands for the input of the final norm. None takes `default_layers` of the
            model that it is used with.
        sliding_window: how many tokens of the text its attention sees; None sees all. What it costs and how well it
            drafts then hardly depends on the text's length.
        norm_eps: epsilon of its norms.
        rotary: transformers' ``rope_parameters``.
        max_positions: ``max_position_embeddings``, which some rotary embeddings depend on.
        levels: how many levels of drafts it was trained for; deeper ones are drafted likewise.
        norm_before_residual: the residual is the normalised state.
        norm_before_fc: one norm over all features before they are joined.
        fc_norm: a norm for each layer's features before they are joined.
        norm_output: the next level reads the normalised state (EAGLE 3.1).
        attention_bias: the attention's projections have biases.
        mlp_bias: the gated unit's layers have biases.
        qk_norm: queries and keys are normalised, as Qwen3 does it.
    """

    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    target_layers: tuple[int, ...] | None
    sliding_window: int | None = None
    norm_eps: float = 1e-6
    rotary: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0})
    max_positions: int = 4096
    levels: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        positive = (
            "target_hidden_size hidden_size intermediate_size attention_heads kv_heads head_dim vocab_size levels"
        )
        for name in positive.split():
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.attention_heads % self.kv_heads:
            raise ValueError(
                f"{self.attention_heads} query heads cannot share {self.kv_heads} heads of keys and values"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.target_layers is not None and (not self.target_layers or min(self.target_layers) < 0):
            raise ValueError(f"target_layers must be layers' numbers from 0 on, got {list(self.target_layers)}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")

    @classmethod
    def for_model(
        cls,
        config: PretrainedConfig,
        target_layers: Sequence[int] | None = None,
        sliding_window: int | None = 512,
        levels: int = 3,
    ) -> "Eagle3Config":
        """A draft model of the shape of one layer of the model of ``config``; without layers `default_layers`.

        Raises:
            ValueError: the model has no RMSNorm or no rotary embedding of the usual fields.
        """
        heads, rotary = config.num_attention_heads, getattr(config, "rope_parameters", None)
        eps = getattr(config, "rms_norm_eps", None)
        if eps is None or not rotary or "rope_type" not in rotary:
            raise ValueError(f"models of type {config.model_type} have no layer that a draft model could be made like")
        return cls(
            target_hidden_size=config.hidden_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            attention_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            target_layers=default_layers(config.num_hidden_layers) if target_layers is None else tuple(target_layers),
            sliding_window=sliding_window,
            norm_eps=eps,
            rotary=dict(rotary),
            max_positions=config.max_position_embeddings,
            levels=levels,
        )


def default_layers(layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads in a model of so many layers: one at the bottom, the middle and the top."""
    return min(2, layers), layers // 2, max(layers - 3, 0)
