"""How an architecture is described: llama.cpp's keys and names of tensors, and transformers' for the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from decoder.model.gguf import sources
from decoder.model.gguf.file import GgufFile
from decoder.model.gguf.rotary import rotary_of
from decoder.model.gguf.sources import Change

RMS_NORM, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
ATTENTION = PROJECTIONS | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Architecture:
    """How models of one architecture are read.

    Attributes:
        model_type: its name in transformers.
        names: names of a layer's tensors, with or without what stands behind the dot, -> those of its parameters.
        extra: the keys of the configuration beyond those that all share.
        norm: the name of the norms' epsilon in keys and in configurations.
        layers: the name of the list of layers in the model.
        outside: names of tensors outside of layers -> those of their parameters.
        change: how parameters differ from tensors.
        rotary: the rotary parameters, of the size of heads.
        by_layer: sizes that may be lists by layer, which ``extra`` reads.
        lists: names of tensors outside of layers that hold several matrices -> the list of these in the model.
        unused: whether a layer of a configuration has no use for a tensor of this name, which files may have.
        drafts: whether it is no model by itself, and all of its layers predict further tokens of another one.
    """

    model_type: str
    names: dict[str, str]
    extra: Callable[[GgufFile, "Architecture"], dict[str, Any]] | None = None
    norm: tuple[str, str] = (RMS_NORM, "rms_norm_eps")
    layers: str = "model.layers"
    outside: dict[str, str] = field(default_factory=lambda: OUTSIDE)
    change: Change = sources.unchanged
    rotary: Callable[[GgufFile, int | None], dict[str, Any]] = rotary_of
    by_layer: tuple[str, ...] = ()
    lists: dict[str, str] = field(default_factory=dict)
    unused: Callable[[PreTrainedConfig, int, str], bool] = lambda config, layer, name: False
    drafts: bool = False

    def parameter(self, layer: str | None, name: str) -> str | None:
        """The name of the parameter of a tensor, whose name is without that of its ``layer``; None if unknown."""
        stem, _, leaf = name.rpartition(".")
        names = self.outside if layer is None else self.names
        known = names.get(name)
        if known is None:
            known = f"{names[stem]}.{leaf}" if stem in names and leaf in ("weight", "bias") else None
        return known if known is None or layer is None else f"{self.layers}.{layer}.{known}"


def in_first_layer(file: GgufFile, name: str) -> bool:
    """Whether the first layer has a tensor of this name."""
    return f"blk.0.{name}" in file.tensors
