"""The families that the library runs as a whole, and by what names their layers call their parts."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from decoder.backends.native.experts import block_of
from decoder.backends.native.mixers import MIXERS, MixerParts
from decoder.backends.native.packed_linear import Linear

_PRE_NORM = {"input_layernorm": "norm_in", "post_attention_layernorm": "norm_before_mlp"}
# As in Gemma, which normalises what it adds, too.
_BOTH_NORMS = {
    "input_layernorm": "norm_in",
    "pre_feedforward_layernorm": "norm_before_mlp",
    "post_attention_layernorm": "norm_behind_attention",
    "post_feedforward_layernorm": "norm_behind_mlp",
}


class Family(NamedTuple):
    """One of them.

    Attributes:
        prefix: of its classes.
        norms: by its name in a layer, what a norm is called in the library's `Layer`.
        mixer: the name of what stands in place of attention in some layers.
        mlp, mlp_parts: of the gated unit, and of gate, up and down in it, or of gate and up in one and down.
        activation: of its gate's module, if it has one.
        beside: of the experts, where there are some beside such a unit.
        out, head_norms: of the last product of attention, and of the norms of queries and keys.
        gated: whether each query has a gate behind it.
        rotary: the name of what gives the model's angles.
    """

    prefix: str
    norms: Mapping[str, str] = _PRE_NORM
    mixer: str = ""
    mlp: str = "mlp"
    mlp_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    activation: str = "act_fn"
    beside: str = ""
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    gated: bool = False
    rotary: str = "rotary_emb"


_LFM2 = Family(
    "Lfm2",
    {"operator_norm": "norm_in", "ffn_norm": "norm_before_mlp"},
    mixer="conv",
    mlp="feed_forward",
    mlp_parts=("w1", "w3", "w2"),
    out="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
)

# By the name of its modelling file.
FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "gemma3": Family("Gemma3", _BOTH_NORMS),
    "mixtral": Family("Mixtral"),
    "qwen3_moe": Family("Qwen3Moe"),
    "glm4_moe": Family("Glm4Moe"),
    "gpt_oss": Family("GptOss"),
    "qwen3_5": Family("Qwen3_5", mixer="linear_attn", gated=True),
    "qwen3_next": Family("Qwen3Next", mixer="linear_attn", gated=True),
    "qwen3_5_moe": Family("Qwen3_5Moe", mixer="linear_attn", gated=True),
    "bamba": Family(
        "Bamba",
        {"input_layernorm": "norm_in", "pre_ff_layernorm": "norm_before_mlp"},
        mixer="mamba",
        mlp="feed_forward",
    ),
    "granite": Family("Granite"),
    "granitemoe": Family("GraniteMoe", mlp="block_sparse_moe"),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        mixer="mamba",
        mlp="shared_mlp",
        mlp_parts=("input_linear", "output_linear"),
        activation="activation",
        beside="block_sparse_moe",
    ),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2._replace(prefix="Lfm2Moe", rotary="pos_emb"),
}


def family_of(module: nn.Module, *parts: str) -> Family | None:
    """The family for which transformers has a module of this class by one of these names, such as ``DecoderLayer``."""
    kind = type(module)
    family = FAMILIES.get(kind.__module__.rpartition(".modeling_")[2])
    names = () if family is None else [f"{family.prefix}{part}" for part in parts]
    within = kind.__module__.startswith("transformers.models.")
    return family if within and kind.__name__ in names else None


def rotary_of(decoder: nn.Module) -> Any:
    """What gives the angles of a model of one of these families; None where nothing is rotated."""
    family = family_of(decoder, "Model", "TextModel")
    assert family is not None
    return getattr(decoder, family.rotary)


class LayerParts:
    """The parts of a layer of such a family.

    Attributes:
        norms: by their names in the library's `Layer`.
        attention: None where something else stands in its place.
        head_norms: of queries and of keys, if there are such.
        mixer: what stands in place of attention, if it is known.
        mlp: the gated unit, None where there are experts alone.
        experts: the module of experts, if there is one.
        block: its parts, if they are known.
        residual: what is added is multiplied by it.
    """

    def __init__(self, layer: Any, family: Family):
        self.family = family
        self.norms: dict[str, Any] = {name: layer._modules.get(own) for own, name in family.norms.items()}
        self.attention: Any = layer._modules.get("self_attn")
        mixing = layer._modules.get(family.mixer)
        self.mixer: MixerParts | None = None
        if mixing is not None and type(mixing).__name__ in MIXERS:
            self.mixer = MIXERS[type(mixing).__name__](mixing)
        beside = {} if self.attention is None else self.attention._modules
        self.head_norms: list[Any] = [beside[name] for name in family.head_norms if name in beside]
        self.mlp: Any = layer._modules.get(family.mlp)
        self.experts: Any = layer._modules.get(family.beside)
        expected = {"self_attn" if mixing is None else family.mixer, family.mlp, *family.norms}
        expected |= set() if self.experts is None else {family.beside}
        if self.mlp is not None and "experts" in self.mlp._modules:
            self.mlp, self.experts = None, self.mlp
        self.block = None if self.experts is None else block_of(self.experts)
        self.residual: float = getattr(layer, "residual_multiplier", 1.0)
        has = self.experts is not None
        as_told = getattr(layer, "has_experts", has) == has
        self.complete = as_told and layer._modules.keys() == expected and (mixing is None or self.mixer is not None)
        """Whether the layer has these parts and no others, and uses them."""

    @property
    def gated(self) -> bool:
        return self.attention is not None and self.family.gated

    def products(self) -> Iterator[tuple[str, list[Linear]]]:
        """The products by their names in the library's `Layer` or `Mixer`, each of linear layers that read the same."""
        if self.mixer is not None:
            yield "qkv", self.mixer.inputs
            if self.mixer.gates:
                yield "gates", self.mixer.gates
            yield "o", [self.mixer.out]
        else:
            yield "qkv", [self.attention.q_proj, self.attention.k_proj, self.attention.v_proj]
            yield "o", [getattr(self.attention, self.family.out)]
        if self.mlp is not None:
            *gate_up, down = (getattr(self.mlp, name) for name in self.family.mlp_parts)
            yield "gate_up", gate_up
            yield "down", [down]

    @property
    def groups(self) -> list[list[Linear]]:
        """The linear layers, those of one product together."""
        return [group for _, group in self.products()] + (self.block.groups if self.block is not None else [])


def parts_of(layer: nn.Module) -> LayerParts:
    """The parts of a layer of one of these families."""
    family = family_of(layer, "DecoderLayer")
    assert family is not None
    return LayerParts(layer, family)
