"""Architectures with experts in layers of attention."""

from typing import Any

from decoder.model.gguf import sources
from decoder.model.gguf.architectures.base import ATTENTION, GATED, HEAD_NORMS, Architecture, in_first_layer
from decoder.model.gguf.architectures.dense import granite_scales
from decoder.model.gguf.file import ELSE, GgufFile
from decoder.model.gguf.keys import needed_size, size_of, value_of
from decoder.model.gguf.rotary import rotary_of

SOFTMAX, SIGMOID = 1, 2  # of llama.cpp's functions that make weights of logits
# Stacks of experts are parameters themselves, not weights of modules.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_COMPRESSED = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight",
    "attn_v_b.weight": "self_attn.kv_b_proj.weight",
    "attn_output": "self_attn.o_proj",
}


def experts(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """The keys of experts with a softmax before them."""
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
        values["qkv_bias"] = in_first_layer(file, "attn_q.bias")
        experts = file.tensors.get("blk.0.ffn_gate_exps.weight")
        if values["moe_intermediate_size"] is None and experts is not None:
            values["moe_intermediate_size"] = experts.shape[-2]
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    values["shared_expert_intermediate_size"] = None if shared is None else shared.shape[0]
    return values


def check_gating(file: GgufFile, function: int) -> None:
    """Raise ValueError for a file that makes experts' weights by another function than this one of llama.cpp's."""
    if (told := value_of(file, "expert_gating_func", int, function)) != function:
        key = f"{file.architecture}.expert_gating_func"
        raise ValueError(f"{file.path} chooses experts by a function that is not read ({key} {told}): {ELSE}")


def _olmoe(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    # llama.cpp does not normalise their weights.
    return {
        "num_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": value_of(file, "attention.clamp_kqv", float) or None,
    }


def _ernie_moe(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        "moe_num_experts": needed_size(file, "expert_count"),
        "moe_k": needed_size(file, "expert_used_count"),
        "moe_intermediate_size": needed_size(file, "expert_feed_forward_length"),
        "moe_num_shared_experts": value_of(file, "expert_shared_count", int, 0),
        "moe_layer_interval": value_of(file, "interleave_moe_layer_step", int, 1),
        "moe_layer_start_index": value_of(file, "leading_dense_block_count", int, 0),
        "moe_layer_end_index": -1,
    }


def _granite_moe(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        **granite_scales(file),
        "num_local_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
    }


def _gpt_oss(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    # llama.cpp rounds the borders of YaRN's ramp to whole numbers, which the model was not trained with.
    whole = {"truncate": False} if value_of(file, "rope.scaling.type", str) == "yarn" else {}
    return {
        "num_local_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
        "intermediate_size": needed_size(file, "expert_feed_forward_length"),
        "sliding_window": needed_size(file, "attention.sliding_window"),
        "attention_bias": in_first_layer(file, "attn_q.bias"),
        "rope_parameters": rotary_of(file, size_of(file, "attention.key_length")) | whole,
    }


def routed_experts(file: GgufFile, function: int) -> dict[str, Any]:
    """The keys of experts beside those that all tokens go through; ``function`` as for `check_gating`."""
    check_gating(file, function)
    return {
        "n_routed_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
        "moe_intermediate_size": needed_size(file, "expert_feed_forward_length"),
        "n_shared_experts": needed_size(file, "expert_shared_count"),
        "first_k_dense_replace": value_of(file, "leading_dense_block_count", int, 0),
        "routed_scaling_factor": value_of(file, "expert_weights_scale", float, 1.0),
        "norm_topk_prob": value_of(file, "expert_weights_norm", bool, False),
        "n_group": value_of(file, "expert_group_count", int, 0) or 1,
        "topk_group": value_of(file, "expert_group_used_count", int, 0) or 1,
    }


def _glm4_moe(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        **routed_experts(file, SIGMOID),
        "attention_bias": in_first_layer(file, "attn_q.bias"),
        "use_qk_norm": in_first_layer(file, "attn_q_norm.weight"),
    }


def _compressed(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """The keys of compressed keys and values. Files of before mid-2025 have other sizes by the same names."""
    size = size_of(file, "attention.key_length_mla") or needed_size(file, "attention.key_length")
    values = size_of(file, "attention.value_length_mla") or needed_size(file, "attention.value_length")
    for of_what_is_compressed in ("attention.value_length", "attention.head_count_kv"):
        size_of(file, of_what_is_compressed)
    turned = needed_size(file, "rope.dimension_count")
    sigmoid = architecture.model_type == "deepseek_v3"
    routed = routed_experts(file, SIGMOID if sigmoid else SOFTMAX)
    return {
        **routed,
        "kv_lora_rank": needed_size(file, "attention.kv_lora_rank"),
        "q_lora_rank": size_of(file, "attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": size - turned,
        "v_head_dim": values,
        "head_dim": turned,
        "num_key_value_heads": needed_size(file, "attention.head_count"),
        "topk_method": "noaux_tc" if sigmoid else "greedy" if routed["n_group"] == 1 else "group_limited_greedy",
        "attention_bias": False,
    }


def _rotary_of_compressed(file: GgufFile, head_size: int | None) -> dict[str, Any]:
    rotary = rotary_of(file, needed_size(file, "rope.dimension_count"), ("yarn_log_multiplier",))
    stored = value_of(file, "rope.scaling.yarn_log_multiplier", float)
    # Both of the model's scales are the same number, of which the file has a tenth.
    return rotary if stored is None else rotary | dict.fromkeys(("mscale", "mscale_all_dim"), 10 * stored)


def _deepseek(model_type: str) -> Architecture:
    return Architecture(
        model_type,
        _COMPRESSED | GATED | EXPERTS | _SHARED_EXPERTS,
        _compressed,
        change=sources.compressed_keys,
        rotary=_rotary_of_compressed,
        by_layer=("attention.head_count_kv",),
    )


OF_EXPERTS = {
    "mixtral": Architecture("mixtral", ATTENTION | EXPERTS, experts, change=sources.rotary_pairs),
    "qwen2moe": Architecture("qwen2_moe", ATTENTION | EXPERTS | SHARED_EXPERT, experts, change=sources.shared_expert),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | EXPERTS | HEAD_NORMS, experts),
    "qwen3vlmoe": Architecture("qwen3_moe", ATTENTION | EXPERTS | HEAD_NORMS, experts),
    "olmoe": Architecture("olmoe", ATTENTION | EXPERTS | HEAD_NORMS, _olmoe),
    "granitemoe": Architecture(
        "granitemoe",
        ATTENTION
        | {name: path.replace("mlp.", "block_sparse_moe.") for name, path in EXPERTS.items()}
        | {"ffn_gate_inp": "block_sparse_moe.router"},
        _granite_moe,
        change=sources.rotary_pairs,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        ATTENTION
        | GATED
        | EXPERTS
        | _SHARED_EXPERTS
        | {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
        _ernie_moe,
        change=sources.ernie_moe,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        ATTENTION
        | HEAD_NORMS
        | GATED
        | EXPERTS
        | _SHARED_EXPERTS
        | {"post_attention_norm": "post_attention_layernorm"},
        _glm4_moe,
        change=sources.glm4_moe,
    ),
    "deepseek2": _deepseek("deepseek_v2"),
    "deepseek3": _deepseek("deepseek_v3"),
    "gpt-oss": Architecture(
        "gpt_oss",
        ATTENTION
        | EXPERTS
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
}
"""By llama.cpp's names, but for "mixtral", which is a "llama" with experts there, and "deepseek3", which
is a "deepseek2" with corrections of its router."""
