"""Options and kinds of layers that transformers' modules do not know, or pass over: each is refused by name."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoder.model.looked_at import LookedAt, looked_at

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""transformers' names of drafters that are published beside a model, in the form of one."""
NO_MODEL = "it is an assistant, which drafts for a Gemma 4 model: give that one, and this as its heads"
_ACTIVATION = re.compile(r"(^|_)(act|activation|act_fn|activation_function)$")
_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
# By model type what its modules know of an option, where they take anything else for one of these.
_WORDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v2": {"scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy")},
    "deepseek_v3": _SIGMOID,
    "glm4_moe": _SIGMOID,
    "glm4_moe_lite": _SIGMOID,
    "gpt_oss": {"hidden_act": ("silu", "swish")},
    "granitemoehybrid": {"position_embedding_type": ("rope", "nope")},
    "kimi_linear": {"moe_router_activation_func": ("sigmoid",)},
    "minimax_m2": {"scoring_func": ("sigmoid",)},
    "phimoe": {"num_experts_per_tok": (2,)},
    "qwen3_5_moe_text": {"attn_output_gate": (True,)},
    "qwen3_5_text": {"attn_output_gate": (True,)},
}
# What changes nothing of options that some families have, beside None; modules of the others do not look at them.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_k_eq_v": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "key_multiplier": (1,),
    "lm_head_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_layer_types": (),
    "no_rope_layers": (),
    "num_kv_shared_layers": (0,),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "router_logit_softcapping": (0,),
    "routed_scaling_factor": (1,),
    "sliding_window": (),
}
# Fields that change no pass: of training, tokens, caches, kernels and rounding, and of what stands beside.
_PASSIVE = re.compile(
    r"initializer|init_std|dropout|pdrop|aux_loss|jitter|pretraining_tp|^output_|token_id|tie_word|cache|overlap"
    r"|mtp|nextn|mem_eff_path|in_fp32|is_decoder|max_position_embeddings|num_hidden_layers"
)
# Layers of this kind are those of any other text.
_PLAIN = "full_attention"
# For which kind of layers transformers' masks look at a field; models need not.
_READ_FOR = {"attention_chunk_size": "chunked_attention", "sliding_window": "sliding_attention"}
_OF_ALL = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))
_SIZE = re.compile(r"(^|_)(size|dim|rank|heads|layers|experts|group|groups|window|tok|embeddings)$")
# Sizes that are more than zero where they are given.
_SOME = re.compile(
    r"(^|_)(hidden_size|vocab_size|head_dim|attention_heads|(key|value|mamba)_heads|hidden_layers|chunk_size|block_size"
    r"|n_group|state_size|d_state|d_conv|conv_kernel|conv_kernel_dim)$"
)
# Lists of the kinds of layers, and all kinds that there are.
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_KNOWN_KINDS = {*ALLOWED_LAYER_TYPES, "attention", "mamba", "mlp"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Heads that share keys, or states, with as many others each.
_SHARING = {
    "num_attention_heads": "num_key_value_heads",
    "linear_num_value_heads": "linear_num_key_heads",
    "mamba_n_heads": "mamba_n_groups",
    "mamba_num_heads": "n_groups",
    "n_mamba_heads": "mamba_ngroups",
}
_CHOICE = re.compile(r"_(type|kind|method|func|function|mode)$")


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """What each layer is configured as, where that differs as in Gemma 4; else the one configuration of all.

    transformers does not let the fields that differ be read from the model's own configuration.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def refuse_layers_apart(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ValueError for settings of single layers that the modules of a class of models do not look at."""
    if not getattr(config, "is_heterogeneous", False):
        return
    if any(layer.skip for layer in layer_configs(config)) or "per_layer_config" not in looked_at(model_class).names:
        given = config.to_dict()["per_layer_config"]
        raise ValueError(f"{config.model_type} has per_layer_config={given!r}, which its layers do not know")


def refuse_unknown_options(config: PreTrainedConfig) -> None:
    """Raise ValueError, with the field and its value, for what the modules of a configuration would not compute."""
    name = config.model_type
    for field, value in _unknown(config):
        raise ValueError(f"{name} has {field}={value!r}, which is not known and cannot be run")
    for layer in layer_configs(config):
        for field, value in _sizes(layer):
            raise ValueError(f"{name} has a {field} of {value!r}, of which there must be a whole number above zero")
        _refuse_heads(layer)
        _refuse_experts(layer)


def _refuse_heads(config: PreTrainedConfig) -> None:
    """Raise ValueError for heads that are shared unevenly, have no numbers, or an odd number where pairs are turned."""
    name = config.model_type
    for field, other in _SHARING.items():
        heads, groups = getattr(config, field, None), getattr(config, other, None)
        if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
            raise ValueError(f"{name} has a {field} of {heads}, no multiple of its {other} of {groups}")
    heads, latent = getattr(config, "num_key_value_heads", None), getattr(config, "kv_lora_rank", None)
    if latent and heads not in (None, config.num_attention_heads):
        all_heads = f"which have one for each of {config.num_attention_heads} heads"
        raise ValueError(f"{name} has a num_key_value_heads of {heads}, and compressed keys, {all_heads}")
    field = "qk_rope_head_dim" if latent else "head_dim"
    dim, size, heads = (getattr(config, one, None) for one in (field, "hidden_size", "num_attention_heads"))
    if dim is None and isinstance(size, int) and isinstance(heads, int) and heads:
        dim, field = size // heads, f"hidden_size of {size} for {heads} heads, and so a head_dim"
    rotary = _rotary(config)
    turned = any(rotary) and all(part.get("partial_rotary_factor") in (None, 1) for part in rotary)
    if isinstance(dim, int) and (dim < 1 or (turned and dim % 2)):
        raise ValueError(f"{name} has a {field} of {dim}, where rotary embeddings turn pairs of numbers")


def _refuse_experts(config: PreTrainedConfig) -> None:
    """Raise ValueError for numbers of experts and of their groups that do not go with each other."""
    name, declared = config.model_type, _declared(config)
    own = [field for field in _EXPERTS if field in declared] or _EXPERTS
    count = next((one for field in own if isinstance(one := getattr(config, field, None), int)), None)
    if not count:
        return
    groups = getattr(config, "n_group", None) if "n_group" in declared else None
    chosen = getattr(config, "topk_group", None)
    if isinstance(groups, int) and (count % groups or (isinstance(chosen, int) and not 0 < chosen <= groups)):
        raise ValueError(f"{name} has an n_group of {groups}, a topk_group of {chosen}, and {count} experts")
    for field in ("num_experts_per_tok", "top_k_experts"):
        used = getattr(config, field, None)
        if isinstance(used, int) and not 0 < used <= count:
            raise ValueError(f"{name} has a {field} of {used}, and {count} experts")


def refuse_passed_over(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ValueError, with the field and its value, for what the modules of a class of models would pass over."""
    for field, value in _passed_over(config, looked_at(model_class, type(config))):
        raise ValueError(f"{config.model_type} has {field}={value!r}, which its layers do not know")


def is_read(config: PreTrainedConfig, field: str, looked: LookedAt) -> bool:
    """Whether code looks at a field, by any of its names, or has the kind of layers that transformers reads it for.

    Code that is not transformers' own may do so in any other file.
    """
    others = {name for name, meant in config.attribute_map.items() if meant == field}
    return not _is_theirs(config) or looked.at_any({field, *others}) or _READ_FOR.get(field) in looked.strings


def refuse_written(written: Mapping[str, Any]) -> None:
    """Raise ValueError for what stands in a file and a configuration made of it would not show, or not be made of.

    That is two numbers of experts, of which one would be passed over, kinds of layers that are none, and an assistant,
    whose text part alone would pass for a model.
    """
    if written.get("model_type") in ASSISTANTS:
        raise ValueError(NO_MODEL)
    inside = written.get("text_config")
    for part in (written, inside if isinstance(inside, Mapping) else {}):
        name = part.get("model_type", "it")
        counts = {field: part[field] for field in _EXPERTS if part.get(field) is not None}
        if len({repr(count) for count in counts.values()}) > 1:
            words = " and ".join(f"{field}={count!r}" for field, count in counts.items())
            raise ValueError(f"{name} has {words}: give one")
        for field in _KINDS:
            kinds = part.get(field)
            if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
                raise ValueError(f"{name} has {field}={kinds!r}, which is no list of kinds of layers")
            for kind in kinds or ():
                if kind not in _KNOWN_KINDS and "auto_map" not in written:
                    raise ValueError(f"{name} has {field}={kind!r}, which is not known and cannot be run")


def passed_over(config: PreTrainedConfig) -> list[str]:
    """In words, choices that a configuration names and transformers' modules do not look at."""
    known = _declared(config) | _known(config).keys()
    return [
        f"{field}={value!r}"
        for field, value in vars(config).items()
        if _is_theirs(config) and isinstance(value, str) and _CHOICE.search(field) and field not in known
    ]


def rotary_kinds(config: PreTrainedConfig) -> Iterator[Any]:
    """The rotary scalings that a configuration names; there may be one for each kind of layer."""
    for part in _rotary(config):
        if named := part.keys() & {"rope_type", "type"}:
            yield part["rope_type" if "rope_type" in named else "type"]


def partly_rotated(config: PreTrainedConfig) -> float | None:
    """The part of a head that is rotated without any scaling, if the configuration names one."""
    parts = (part for part in _rotary(config) if part.get("rope_type", "default") == "default")
    return next((named for part in parts if (named := part.get("partial_rotary_factor")) not in (None, 1)), None)


def _rotary(config: PreTrainedConfig) -> list[dict[str, Any]]:
    field = "rope_parameters" if getattr(config, "rope_parameters", None) else "rope_scaling"
    rope = getattr(config, field, None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _unknown(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """The options whose values are not known, and their values."""
    given = vars(config)
    for kind in rotary_kinds(config):
        if kind not in ROPE_INIT_FUNCTIONS and kind not in ("default", config.default_rope_type):
            yield "rope_type", kind
    for kind in getattr(config, "mlp_layer_types", None) or ():
        if kind not in ALLOWED_MLP_LAYER_TYPES:
            yield "mlp_layer_types", kind
    for field, known in _known(config).items():
        if given.get(field) not in (None, *known):
            yield field, given[field]
    if not _is_theirs(config):  # its modules may know more
        return
    declared = _declared(config)
    for field, value in given.items():
        if field in declared and isinstance(value, str) and _ACTIVATION.search(field) and value not in ACT2FN:
            yield field, value


def _passed_over(config: PreTrainedConfig, looked: LookedAt) -> Iterator[tuple[str, Any]]:
    """The kinds of layers and the options that code does not look at, with their values, if they change anything."""
    for kind in getattr(config, "layer_types", None) or ():
        if kind != _PLAIN and kind not in looked.strings and _is_theirs(config):
            yield "layer_types", kind
    given, declared = vars(config), _declared(config)
    for field, nothing in _NOTHING.items():
        value = given.get(field)
        if field in declared or value in (None, *nothing) or is_read(config, field, looked):
            continue
        if field != "sliding_window" or _binds(config, value):
            yield field, value
    for option in dataclasses.fields(type(config)):
        field, value = option.name, given.get(option.name)
        if field in _OF_ALL or field in _known(config) or _PASSIVE.search(field) or is_read(config, field, looked):
            continue
        if option.default is not dataclasses.MISSING and value not in (None, option.default):
            yield field, value


def _binds(config: PreTrainedConfig, window: Any) -> bool:
    """Whether a window is not switched off and is shorter than texts may be."""
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    return getattr(config, "use_sliding_window", True) and not (isinstance(window, int) and window >= longest)


def _sizes(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """The sizes of which there cannot be so many, or not a part of one, and their values."""
    declared = _declared(config)
    for field, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool) and "token_id" not in field:
            if (value < 0 and _SIZE.search(field)) or (value == 0 and _SOME.search(field)):
                yield field, value
        # Those that are declared have been checked by transformers.
        elif isinstance(value, float) and field not in declared and _SIZE.search(field):
            yield field, value


def _known(config: PreTrainedConfig) -> dict[str, tuple[Any, ...]]:
    return _WORDS.get(config.model_type, {})


def _is_theirs(config: PreTrainedConfig) -> bool:
    """Whether the class of a configuration is transformers' own."""
    return type(config).__module__.startswith("transformers.")


def _declared(config: PreTrainedConfig) -> set[str]:
    """The fields that the class of a configuration has."""
    own = (field.name for field in dataclasses.fields(type(config)))
    return {"model_type", *own, *config.attribute_map, *config.attribute_map.values()}
