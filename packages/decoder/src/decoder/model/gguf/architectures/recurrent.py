"""Architectures with layers of recurrent states, or of convolutions, beside those of attention."""

from typing import Any

import numpy as np

from decoder.model.gguf import sources
from decoder.model.gguf.architectures.base import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    OUTSIDE,
    PROJECTIONS,
    RMS_NORM,
    Architecture,
)
from decoder.model.gguf.architectures.dense import granite_scales
from decoder.model.gguf.architectures.experts import (
    EXPERTS,
    SHARED_EXPERT,
    SIGMOID,
    check_gating,
    experts,
    routed_experts,
)
from decoder.model.gguf.file import ELSE, GgufFile
from decoder.model.gguf.keys import needed_size, size_of, value_of
from decoder.model.gguf.rotary import rotary_of

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
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_NEMOTRON = {
    "attn_norm": "norm",
    **{name: path.replace("self_attn.", "mixer.") for name, path in PROJECTIONS.items()},
    **{name: path.replace("mamba.", "mixer.") for name, path in _MAMBA.items()},
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_SHORT_CONVOLUTIONS = {
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
}
_OUTSIDE_OF_LFM2 = OUTSIDE | {"token_embd_norm": "model.embedding_norm"}
_HYBRID = ATTENTION | HEAD_NORMS | {"post_attention_norm": "post_attention_layernorm"}


def _has_any(file: GgufFile, name: str) -> bool:
    return any(tensor.endswith(f".{name}") for tensor in file.tensors)


def _lfm2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        "num_key_value_heads": size_of(file, "attention.head_count_kv", some_layers=True),
        "conv_L_cache": needed_size(file, "shortconv.l_cache"),
        "conv_bias": _has_any(file, "shortconv.conv.bias"),
        # The size is in the file as it is in the model.
        "block_auto_adjust_ff_dim": False,
        "layer_types": _layer_types(file, "shortconv.conv.weight", "conv"),
    }


def _lfm2moe(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    check_gating(file, SIGMOID)
    return {
        **_lfm2(file, architecture),
        "num_experts": needed_size(file, "expert_count"),
        "num_experts_per_tok": needed_size(file, "expert_used_count"),
        "moe_intermediate_size": needed_size(file, "expert_feed_forward_length"),
        "num_dense_layers": value_of(file, "leading_dense_block_count", int, 0),
        "use_expert_bias": _has_any(file, "exp_probs_b.bias"),
    }


def _mamba(file: GgufFile) -> dict[str, Any]:
    """The keys of mixers of Mamba2."""
    heads, inner = needed_size(file, "ssm.time_step_rank"), needed_size(file, "ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": needed_size(file, "ssm.group_count"),
        "mamba_d_state": needed_size(file, "ssm.state_size"),
        "mamba_d_conv": needed_size(file, "ssm.conv_kernel"),
        "mamba_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(file, "ssm_in.bias"),
        "attention_bias": _has_any(file, "attn_q.bias"),
    }


def _granite_hybrid(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        **_mamba(file),
        **granite_scales(file),
        "mamba_expand": needed_size(file, "ssm.inner_size") // needed_size(file, "embedding_length"),
        "num_key_value_heads": size_of(file, "attention.head_count_kv", some_layers=True),
        "layer_types": _layer_types(file, "ssm_a", "mamba", others="attention"),
        "shared_intermediate_size": needed_size(file, "expert_shared_feed_forward_length"),
        "num_local_experts": value_of(file, "expert_count", int, 0),
        "num_experts_per_tok": value_of(file, "expert_used_count", int, 0),
        # As llama.cpp has it, what is "finetuned" has rotary embeddings.
        "position_embedding_type": "rope" if value_of(file, "rope.scaling.finetuned", bool, True) else None,
    }


def _falcon_h1(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    once = ("attention_in", "attention_out", "ssm_in", "ssm_out", "key", "lm_head", "embedding")
    return {
        **_mamba(file),
        "mamba_d_ssm": needed_size(file, "ssm.inner_size"),
        "mamba_rms_norm": _has_any(file, "ssm_norm.weight"),
        "mlp_bias": _has_any(file, "ffn_gate.bias"),
        # Converters multiply the weights by these.
        **{f"{name}_multiplier": 1.0 for name in once},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def _nemotron(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Each layer is one mixer: of Mamba2, attention, experts, or a product, an activation and another product."""
    kinds = {"ssm_a": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}
    count = needed_size(file, "block_count") - (size_of(file, "nextn_predict_layers") or 0)
    layers = [
        next((kind for name, kind in kinds.items() if f"blk.{i}.{name}" in file.tensors), "mlp") for i in range(count)
    ]
    mamba = _mamba(file)
    values = {
        "layers_block_type": layers,
        "num_key_value_heads": size_of(file, "attention.head_count_kv", some_layers=True),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
        "attention_bias": mamba["attention_bias"],
        "rope_parameters": None,  # its attention knows no positions
    }
    file.looked_at.add(f"{file.architecture}.feed_forward_length")  # which tensors tell
    if "mlp" in layers:
        up = file.tensors.get(f"blk.{layers.index('mlp')}.ffn_up.weight")
        values["intermediate_size"] = None if up is None else up.shape[0]
    if "moe" in layers:
        shared = file.tensors.get(f"blk.{layers.index('moe')}.ffn_up_shexp.weight")
        values |= routed_experts(file, SIGMOID)
        values["moe_shared_expert_intermediate_size"] = None if shared is None else shared.shape[0]
        values["moe_latent_size"] = size_of(file, "moe_latent_size")
        del values["first_k_dense_replace"]
    else:
        unused = ("count", "used_count", "group_count", "group_used_count", "weights_norm", "weights_scale")
        file.looked_at.update(f"{file.architecture}.expert_{name}" for name in unused)
    return values


def _delta_rule(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    heads = needed_size(file, "ssm.time_step_rank")
    values = {
        "linear_conv_kernel_dim": needed_size(file, "ssm.conv_kernel"),
        "linear_key_head_dim": needed_size(file, "ssm.state_size"),
        "linear_num_key_heads": needed_size(file, "ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": needed_size(file, "ssm.inner_size") // heads,
        "layer_types": _layer_types(file, "ssm_a", "linear_attention"),
        "attention_bias": _has_any(file, "attn_q.bias"),
    }
    sections = value_of(file, "rope.dimension_sections", np.ndarray)
    if sections is not None:
        rotary = rotary_of(file, size_of(file, "attention.key_length"))
        values["rope_parameters"] = rotary | {"mrope_interleaved": True, "mrope_section": sections[:3].tolist()}
    return values | (experts(file, architecture) if "ffn_gate_inp" in architecture.names else {})


def _layer_types(file: GgufFile, name: str, kind: str, others: str = "full_attention") -> list[str]:
    """The layers that have a tensor of this name are of a ``kind`` of their own."""
    count = needed_size(file, "block_count") - (size_of(file, "nextn_predict_layers") or 0)
    found = [f"blk.{i}.{name}" in file.tensors for i in range(count)]
    told = value_of(file, key := "attention.recurrent_layers", np.ndarray)
    if told is not None and told[:count].tolist() != found:
        raise ValueError(f"{file.path} has other recurrent layers than its {file.architecture}.{key} says: {ELSE}")
    return [kind if own else others for own in found]


_OF_NEMOTRON = Architecture(
    "nemotron_h",
    _NEMOTRON,
    _nemotron,
    norm=(RMS_NORM, "layer_norm_epsilon"),
    outside=OUTSIDE | {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    change=sources.nemotron,
    by_layer=("attention.head_count_kv", "feed_forward_length"),
)
RECURRENT = {
    "qwen3next": Architecture(
        "qwen3_next", _HYBRID | EXPERTS | SHARED_EXPERT | _MIXED_DELTA_RULE, _delta_rule, change=sources.qwen3_next
    ),
    "qwen35": Architecture("qwen3_5_text", _HYBRID | GATED | _DELTA_RULE, _delta_rule, change=sources.qwen3_5),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", _HYBRID | EXPERTS | SHARED_EXPERT | _DELTA_RULE, _delta_rule, change=sources.qwen3_5
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        ATTENTION
        | _MAMBA
        | {
            "ffn_gate": "shared_mlp.input_linear",
            "ffn_up": "shared_mlp.input_linear",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_gate_shexp": "shared_mlp.input_linear",
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        }
        | {name: path.replace("mlp.", "block_sparse_moe.") for name, path in EXPERTS.items()}
        | {"ffn_gate_inp": "block_sparse_moe.router"},
        _granite_hybrid,
        change=sources.granite_hybrid,
        by_layer=("attention.head_count_kv",),
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        PROJECTIONS
        | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm.weight"}
        | {"ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj"}
        | _MAMBA,
        _falcon_h1,
        outside=OUTSIDE | {"output_norm": "model.final_layernorm"},
        change=sources.mamba,
    ),
    "nemotron_h": _OF_NEMOTRON,
    "nemotron_h_moe": _OF_NEMOTRON,
    "lfm2": Architecture(
        "lfm2",
        _SHORT_CONVOLUTIONS,
        _lfm2,
        norm=(RMS_NORM, "norm_eps"),
        outside=_OUTSIDE_OF_LFM2,
        change=sources.lfm2,
        by_layer=("attention.head_count_kv",),
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _SHORT_CONVOLUTIONS
        | {name: path.replace("mlp.", "feed_forward.") for name, path in EXPERTS.items()}
        | {"exp_probs_b.bias": "feed_forward.expert_bias"},
        _lfm2moe,
        norm=(RMS_NORM, "norm_eps"),
        outside=_OUTSIDE_OF_LFM2,
        change=sources.lfm2,
        by_layer=("attention.head_count_kv",),
    ),
}
"""By llama.cpp's names."""
