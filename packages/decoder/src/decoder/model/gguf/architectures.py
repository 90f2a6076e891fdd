"""The architectures that are read: llama.cpp's keys and names of tensors, and transformers' for the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoder.model.gguf import sources
from decoder.model.gguf.file import ELSE, GgufFile
from decoder.model.gguf.keys import needed_size, size_of, value_of
from decoder.model.gguf.rotary import rotary_of
from decoder.model.gguf.sources import Change

_RMS_NORM, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SIGMOID = 2  # of llama.cpp's functions that make weights of logits
# Stacks of experts are parameters themselves, not weights of modules.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_RULE = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MIXED_DELTA_RULE = _DELTA_RULE | {
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}


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
        some_layers: sizes that are 0 in layers without such a part.
    """

    model_type: str
    names: dict[str, str]
    extra: Callable[[GgufFile, "Architecture"], dict[str, Any]] | None = None
    norm: tuple[str, str] = (_RMS_NORM, "rms_norm_eps")
    layers: str = "model.layers"
    outside: dict[str, str] = field(default_factory=lambda: _OUTSIDE)
    change: Change = sources.unchanged
    some_layers: tuple[str, ...] = ()

    def parameter(self, layer: str | None, name: str) -> str | None:
        """The name of the parameter of a tensor, whose name is without that of its ``layer``; None if unknown."""
        stem, _, leaf = name.rpartition(".")
        names = self.outside if layer is None else self.names
        known = names.get(name)
        if known is None:
            known = f"{names[stem]}.{leaf}" if stem in names and leaf in ("weight", "bias") else None
        return known if known is None or layer is None else f"{self.layers}.{layer}.{known}"


def architecture_of(file: GgufFile) -> Architecture:
    """How the model of a file is read. Raises ValueError for an architecture that is not."""
    name = file.architecture
    if name == "llama" and value_of(file, "expert_count", int, 0):
        name = "mixtral"
    if name not in ARCHITECTURES:
        raise ValueError(f"models of the architecture {name} cannot be read from the GGUF file {file.path}: {ELSE}")
    return ARCHITECTURES[name]


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}" in file.tensors


def _llama(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_gate.bias")}


def _experts(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
    }
    if architecture.model_type == "mixtral":
        return {"num_local_experts": values.pop("num_experts"), **values}
    values["moe_intermediate_size"] = size_of(file, "expert_feed_forward_length")
    if architecture.model_type != "qwen2_moe":
        # llama.cpp always normalises their weights, too.
        values["norm_topk_prob"] = True
    else:
        values["qkv_bias"] = _has(file, "attn_q.bias")
        experts = file.tensors.get("blk.0.ffn_gate_exps.weight")
        if values["moe_intermediate_size"] is None and experts is not None:
            values["moe_intermediate_size"] = experts.shape[-2]
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    values["shared_expert_intermediate_size"] = None if shared is None else shared.shape[0]
    return values


def _gpt_oss(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    # llama.cpp rounds the borders of YaRN's ramp to whole numbers, which the model was not trained with.
    whole = {"truncate": False} if value_of(file, "rope.scaling.type", str) == "yarn" else {}
    return {
        "num_local_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
        "intermediate_size": needed_size(file, "expert_feed_forward_length"),
        "sliding_window": needed_size(file, "attention.sliding_window"),
        "attention_bias": _has(file, "attn_q.bias"),
        "rope_parameters": rotary_of(file, size_of(file, "attention.key_length")) | whole,
    }


def _glm4_moe(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    if (function := value_of(file, "expert_gating_func", int, _SIGMOID)) != _SIGMOID:
        key = f"{file.architecture}.expert_gating_func"
        raise ValueError(f"{file.path} chooses experts by a function that is not read ({key} {function}): {ELSE}")
    return {
        "n_routed_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
        "moe_intermediate_size": needed_size(file, "expert_feed_forward_length"),
        "n_shared_experts": needed_size(file, "expert_shared_count"),
        "first_k_dense_replace": value_of(file, "leading_dense_block_count", int, 0),
        "routed_scaling_factor": value_of(file, "expert_weights_scale", float, 1.0),
        "norm_topk_prob": value_of(file, "expert_weights_norm", bool, False),
        "n_group": size_of(file, "expert_group_count") or 1,
        "topk_group": size_of(file, "expert_group_used_count") or 1,
        "attention_bias": _has(file, "attn_q.bias"),
        "use_qk_norm": _has(file, "attn_q_norm.weight"),
    }


def _lfm2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        "conv_L_cache": needed_size(file, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.tensors),
        # The size is in the file as it is in the model.
        "block_auto_adjust_ff_dim": False,
        "layer_types": _layer_types(file, "shortconv.conv.weight", "conv"),
    }


def _delta_rule(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    heads = needed_size(file, "ssm.time_step_rank")
    values = {
        "linear_conv_kernel_dim": needed_size(file, "ssm.conv_kernel"),
        "linear_key_head_dim": needed_size(file, "ssm.state_size"),
        "linear_num_key_heads": needed_size(file, "ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": needed_size(file, "ssm.inner_size") // heads,
        "layer_types": _layer_types(file, "ssm_a", "linear_attention"),
        "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
    }
    sections = value_of(file, "rope.dimension_sections", np.ndarray)
    if sections is not None:
        rotary = rotary_of(file, size_of(file, "attention.key_length"))
        values["rope_parameters"] = rotary | {"mrope_interleaved": True, "mrope_section": sections[:3].tolist()}
    return values | (_experts(file, architecture) if "ffn_gate_inp" in architecture.names else {})


def _layer_types(file: GgufFile, name: str, kind: str) -> list[str]:
    """The layers that have a tensor of this name are of a ``kind`` of their own."""
    count = needed_size(file, "block_count") - (size_of(file, "nextn_predict_layers") or 0)
    return [kind if f"blk.{i}.{name}" in file.tensors else "full_attention" for i in range(count)]


def _qwen3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias")}


def _window(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"sliding_window": value_of(file, "attention.sliding_window", int) or None}


def _gemma3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Its layers have windows, but for each sixth, and rotary embeddings of their own."""
    base = value_of(file, "rope.freq_base", float, 10000.0)
    local = value_of(file, "rope.freq_base_swa", float, 10000.0)
    layers, period = size_of(file, "block_count") or 1, size_of(file, "attention.sliding_window_pattern") or 6
    kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    heads, size = size_of(file, "attention.head_count"), size_of(file, "embedding_length")
    # As in llama.cpp, the largest model is the one that scales its scores by another size than that of its heads.
    scale = size // heads if layers == 62 and size and heads else size_of(file, "attention.key_length")
    return {
        "sliding_window": value_of(file, "attention.sliding_window", int),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": scale,
        "final_logit_softcapping": value_of(file, "final_logit_softcapping", float) or None,
    }


def _starcoder2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"use_bias": _has(file, "attn_q.bias"), **_window(file, architecture)}


def _gpt2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    inner = size_of(file, "feed_forward_length")
    return {"n_inner": inner, "head_dim": None, "num_key_value_heads": None, "rope_parameters": None}


_HYBRID = _ATTENTION | _HEAD_NORMS | {"post_attention_norm": "post_attention_layernorm"}
_GEMMA = _ATTENTION | _GATED | _HEAD_NORMS
ARCHITECTURES = {
    "llama": Architecture("llama", _ATTENTION | _GATED, _llama, change=sources.rotary_pairs),
    "mixtral": Architecture("mixtral", _ATTENTION | _EXPERTS, _experts, change=sources.rotary_pairs),
    "qwen2": Architecture("qwen2", _ATTENTION | _GATED),
    "qwen2moe": Architecture(
        "qwen2_moe", _ATTENTION | _EXPERTS | _SHARED_EXPERT, _experts, change=sources.shared_expert
    ),
    "qwen3": Architecture("qwen3", _ATTENTION | _GATED | _HEAD_NORMS, _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _ATTENTION | _EXPERTS | _HEAD_NORMS, _experts),
    "qwen3next": Architecture(
        "qwen3_next", _HYBRID | _EXPERTS | _SHARED_EXPERT | _MIXED_DELTA_RULE, _delta_rule, change=sources.qwen3_next
    ),
    "qwen35": Architecture("qwen3_5_text", _HYBRID | _GATED | _DELTA_RULE, _delta_rule, change=sources.qwen3_5),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", _HYBRID | _EXPERTS | _SHARED_EXPERT | _DELTA_RULE, _delta_rule, change=sources.qwen3_5
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _ATTENTION
        | _HEAD_NORMS
        | _GATED
        | _EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        _glm4_moe,
        change=sources.glm4_moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _ATTENTION
        | _EXPERTS
        | {
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        _gpt_oss,
        change=sources.gpt_oss,
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        _lfm2,
        norm=(_RMS_NORM, "norm_eps"),
        outside={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        change=sources.lfm2,
        some_layers=("attention.head_count_kv",),
    ),
    "phi3": Architecture(
        "phi3",
        _ATTENTION | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        _window,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _starcoder2,
        norm=(_LAYER_NORM, "norm_epsilon"),
    ),
    "nemotron": Architecture(
        "nemotron",
        _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        norm=(_LAYER_NORM, "norm_eps"),
        change=sources.norms_around_one,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3,
        change=sources.norms_around_one,
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        _gpt2,
        norm=(_LAYER_NORM, "layer_norm_epsilon"),
        layers="transformer.h",
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        change=sources.gpt2,
    ),
}
"""By llama.cpp's names, the architectures that are read; "mixtral" is a "llama" with experts there."""
