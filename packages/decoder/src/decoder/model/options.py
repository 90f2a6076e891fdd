"""Options of a configuration that transformers' modules do not know, or pass over: each is refused by name."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.configuration_utils import ALLOWED_MLP_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOICE = re.compile(r"_(type|kind|method|func|function|mode)$")


def refuse_unknown_options(config: PreTrainedConfig) -> None:
    """Raise ValueError, with the field and its value, for what the modules of a configuration would not compute."""
    name = config.model_type
    for field, value in _unknown(config):
        raise ValueError(f"{name} has {field}={value!r}, which is not known and cannot be run")
    count = next((one for field in _EXPERTS if isinstance(one := getattr(config, field, None), int)), None)
    for field in ("num_experts_per_tok", "top_k_experts"):
        used = getattr(config, field, None)
        if count and isinstance(used, int) and used > count:
            raise ValueError(f"{name} has a {field} of {used}, and {count} experts")
    heads, latent = getattr(config, "num_key_value_heads", None), getattr(config, "kv_lora_rank", None)
    if latent and heads not in (None, config.num_attention_heads):
        all_heads = f"which have one for each of {config.num_attention_heads} heads"
        raise ValueError(f"{name} has a num_key_value_heads of {heads}, and compressed keys, {all_heads}")


def refuse_two_counts(written: Mapping[str, Any]) -> None:
    """Raise ValueError if what stands in a file names two numbers of experts, of which one would be passed over."""
    for part in (written, written.get("text_config") or {}):
        counts = {field: part[field] for field in _EXPERTS if isinstance(part.get(field), int)}
        if len(set(counts.values())) > 1:
            words = " and ".join(f"{field}={count!r}" for field, count in counts.items())
            raise ValueError(f"{part.get('model_type', 'it')} has {words}: give one")


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
    for field, nothing in _NOTHING.items():
        if field not in declared and given.get(field) not in (None, *nothing):
            yield field, given[field]


def _known(config: PreTrainedConfig) -> dict[str, tuple[Any, ...]]:
    return _WORDS.get(config.model_type, {})


def _is_theirs(config: PreTrainedConfig) -> bool:
    """Whether the class of a configuration is transformers' own."""
    return type(config).__module__.startswith("transformers.")


def _declared(config: PreTrainedConfig) -> set[str]:
    """The fields that the class of a configuration has."""
    own = (field.name for field in dataclasses.fields(type(config)))
    return {"model_type", *own, *config.attribute_map, *config.attribute_map.values()}
