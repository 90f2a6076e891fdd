"""Gemma's architectures: windows, norms on both sides, sizes that differ between layers."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

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


def _gemma3n(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """All but each fifth layer have windows, and the last ones share keys and values of others."""
    layers = needed_size(file, "block_count")
    left = file.tensors.get("blk.0.laurel_l.weight")
    embeddings = file.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": window_layers(file, 5),
        "sliding_window": needed_size(file, "attention.sliding_window"),
        "intermediate_size": sizes_of(file, "feed_forward_length", layers),
        # As in llama.cpp, whose models of this kind have twenty layers with keys of their own.
        "num_kv_shared_layers": value_of(file, "attention.shared_kv_layers", int, max(0, layers - 20)),
        "hidden_size_per_layer_input": value_of(file, "embedding_length_per_layer_input", int),
        "vocab_size_per_layer_input": None if embeddings is None else embeddings.shape[0],
        "altup_num_inputs": value_of(file, "altup.num_inputs", int),
        "altup_active_idx": value_of(file, "altup.active_idx", int),
        "laurel_rank": None if left is None else left.shape[0],
        "activation_sparsity_pattern": _sparsity(file, layers),
        "final_logit_softcapping": value_of(file, "final_logit_softcapping", float, 30.0),
    }


def _sparsity(file: GgufFile, layers: int) -> list[float] | None:
    """The share of activations that each layer sets to zero; None if the file does not say.

    The file has how many deviations above their mean the least is that stays; -inf where all stay.
    """
    key = f"{file.architecture}.activation_sparsity_scale"
    multiples = file.metadata.get(key)
    file.looked_at.add(key)
    if multiples is None:
        return None
    if not isinstance(multiples, np.ndarray) or multiples.dtype.kind != "f" or len(multiples) != layers:
        raise ValueError(f"{file.path} has a {key} that is no list of {layers} numbers: {ELSE}")
    if not (multiples < np.inf).all():
        raise ValueError(f"{file.path} says that its {key} is {multiples.max()}: {ELSE}")
    return [_share_below(float(multiple)) for multiple in multiples]


def _share_below(multiple: float) -> float:
    """The share of a normal distribution below so many deviations, as the number whose multiple this is in float32."""
    share = 0.5 * (1 + math.erf(multiple / math.sqrt(2)))
    for digits in range(1, 7):
        shorter = round(share, digits)
        if torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(shorter)).item() == multiple:
            return shorter
    return share


def _shares_keys(config: PreTrainedConfig, layer: int, name: str) -> bool:
    """Layers that look at keys and values of others may have matrices of their own in the file all the same."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    return layer >= first and name.startswith(("attn_k", "attn_v"))


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


def _gemma4_assistant(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Its layers look at keys and values of the model that it drafts for, whose hidden size it knows."""
    found = _gemma4(file, architecture)
    return found | {"attention_k_eq_v": False, "backbone_hidden_size": needed_size(file, "embedding_length_out")}


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


_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_OUTSIDE_PER_LAYER = OUTSIDE | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

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
    "gemma3n": Architecture(
        "gemma3n_text",
        _LAYER
        | HEAD_NORMS
        | _PER_LAYER
        | {
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        _gemma3n,
        outside=_OUTSIDE_PER_LAYER,
        rotary=partial(rotary_by_layer, local=10000.0),
        by_layer=("feed_forward_length",),
        lists={
            "altup_proj.weight": "model.altup_projections",
            "altup_unembd_proj.weight": "model.altup_unembed_projections",
        },
        unused=_shares_keys,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _LAYER
        | HEAD_NORMS
        | _PER_LAYER
        | {
            "layer_output_scale.weight": "layer_scalar",
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
        outside=_OUTSIDE_PER_LAYER,
        rotary=_gemma4_rotary,
        by_layer=("attention.head_count_kv", "feed_forward_length"),
        unused=_shares_keys,
    ),
    "gemma4-assistant": Architecture(
        "gemma4_text",
        _LAYER | {"attn_q_norm": "self_attn.q_norm", "layer_output_scale.weight": "layer_scalar"},
        _gemma4_assistant,
        layers="layers",
        outside={
            "token_embd": "lm_head",
            "output_norm": "norm",
            "nextn.pre_projection": "pre_projection",
            "nextn.post_projection": "post_projection",
        },
        rotary=_gemma4_rotary,
        by_layer=("attention.head_count_kv", "feed_forward_length"),
        drafts=True,
    ),
}
"""By llama.cpp's names."""
