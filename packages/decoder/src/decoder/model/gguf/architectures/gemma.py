"""Gemma's architectures: windows, norms on both sides, sizes that differ between layers."""

from functools import partial
from typing import Any

import numpy as np

from decoder.model.gguf import sources
from decoder.model.gguf.architectures.base import ATTENTION, GATED, HEAD_NORMS, OUTSIDE, Architecture
from decoder.model.gguf.file import ELSE, GgufFile
from decoder.model.gguf.keys import needed_size, needed_value, size_of, sizes_of, value_of, window_layers
from decoder.model.gguf.rotary import OF_ROTARY, rotary_by_layer

_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = ATTENTION | GATED | _NORMS


def _scaled_like_heads(file: GgufFile, largest: int) -> int | None:
    """As in llama.cpp, only the largest model scales its scores by another size than that of its heads."""
    heads, size = size_of(file, "attention.head_count"), size_of(file, "embedding_length")
    if size_of(file, "block_count") == largest and size and heads:
        return size // heads
    return size_of(file, "attention.key_length")


def _gemma2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {
        "sliding_window": size_of(file, "attention.sliding_window") or 4096,  # as in llama.cpp
        "layer_types": window_layers(file, 2),
        "query_pre_attn_scalar": _scaled_like_heads(file, 46),
        "attn_logit_softcapping": value_of(file, "attn_logit_softcapping", float),
        "final_logit_softcapping": value_of(file, "final_logit_softcapping", float) or None,
    }


def _gemma3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Its layers have windows, but for each sixth."""
    return {
        "sliding_window": needed_size(file, "attention.sliding_window"),
        "layer_types": window_layers(file, 6),
        "query_pre_attn_scalar": _scaled_like_heads(file, 62),
        "final_logit_softcapping": value_of(file, "final_logit_softcapping", float) or None,
    }


def _gemma4(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Layers of windows and full ones differ in heads, too; the last ones may share keys and values of others."""
    kinds = window_layers(file, 6)
    full = np.array([kind == "full_attention" for kind in kinds])
    kv_heads = np.array(sizes_of(file, "attention.head_count_kv", len(kinds)))
    inner = sizes_of(file, "feed_forward_length", len(kinds))
    shared = value_of(file, "attention.shared_kv_layers", int, 0)
    doubled = len(set(inner)) > 1
    if (
        len(set(kv_heads[full])) > 1
        or len(set(kv_heads[~full])) > 1
        or (doubled and inner != [inner[0]] * (len(kinds) - shared) + [2 * inner[0]] * shared)
    ):
        raise ValueError(f"{file.path} has sizes of its own for each layer in a way that is not read: {ELSE}")
    size = needed_size(file, "attention.key_length_swa")
    if size_of(file, "attention.value_length_swa") not in (None, size):
        raise ValueError(f"{file.path} has values of another size than keys: {ELSE}")
    values = {
        "layer_types": kinds,
        "sliding_window": needed_size(file, "attention.sliding_window"),
        "head_dim": size,
        "global_head_dim": needed_size(file, "attention.key_length"),
        "num_key_value_heads": int(kv_heads[np.argmin(full)]),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": doubled,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": value_of(file, "embedding_length_per_layer_input", int, 0),
        "final_logit_softcapping": value_of(file, "final_logit_softcapping", float) or None,
    }
    if full.any():
        first = int(np.argmax(full))
        values["attention_k_eq_v"] = f"blk.{first}.attn_v.weight" not in file.tensors
        if kv_heads[first] != values["num_key_value_heads"]:
            if not values["attention_k_eq_v"]:
                raise ValueError(f"{file.path} has other KV heads in its full layers, and values of their own: {ELSE}")
            values["num_global_key_value_heads"] = int(kv_heads[first])
    embeddings = file.tensors.get("per_layer_token_embd.weight")
    if embeddings is not None:
        values["vocab_size_per_layer_input"] = embeddings.shape[0]
    if (experts := size_of(file, "expert_count")) is not None:
        values |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": needed_size(file, "expert_used_count"),
            "moe_intermediate_size": needed_size(file, "expert_feed_forward_length"),
        }
    return values


def _gemma4_rotary(file: GgufFile, head_size: int | None) -> dict[str, Any]:
    """A part of each head turns in full layers: the file divides the angles of the rest by a number without end."""
    local = {"rope_type": "default", "rope_theta": value_of(file, "rope.freq_base_swa", float, 10000.0)}
    turned, size = value_of(file, "rope.dimension_count_swa", int), needed_size(file, "attention.key_length_swa")
    if turned and turned != size:
        local["partial_rotary_factor"] = turned / size
    stored = file.tensors.get(OF_ROTARY[0])
    size = needed_size(file, "attention.key_length")
    if value_of(file, "rope.dimension_count", int, size) != size:
        raise ValueError(f"{file.path} turns a part of each head in a way that is not read: {ELSE}")
    factors = np.ones(size // 2, np.float32)
    if stored is not None:
        factors = stored.blocks.reshape(-1).view("<f4") if stored.format.name == "F32" else np.zeros(0, np.float32)
    count = int((factors == 1).sum())
    if len(factors) != size // 2 or not count or (factors[:count] != 1).any() or (factors[count:] < 1e20).any():
        raise ValueError(f"{file.path} scales its rotary embeddings ({OF_ROTARY[0]}) in an unknown way: {ELSE}")
    base = needed_value(file, "rope.freq_base", float)
    part = {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": count / len(factors)}
    return {"full_attention": part, "sliding_attention": local}


GEMMA = {
    "gemma": Architecture("gemma", ATTENTION | GATED, change=sources.norms_around_one),
    "gemma2": Architecture("gemma2", _LAYER, _gemma2, change=sources.norms_around_one),
    "gemma3": Architecture(
        "gemma3_text",
        _LAYER | HEAD_NORMS,
        _gemma3,
        change=sources.norms_around_one,
        rotary=partial(rotary_by_layer, local=10000.0),
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _LAYER
        | HEAD_NORMS
        | {
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "ffn_gate_inp.weight": "router.proj.weight",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_exps.weight": "experts.gate_up_proj",
            "ffn_up_exps.weight": "experts.gate_up_proj",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
        _gemma4,
        outside=OUTSIDE
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        rotary=_gemma4_rotary,
        by_layer=("attention.head_count_kv", "feed_forward_length"),
    ),
}
"""By llama.cpp's names."""
