"""Architectures whose layers are all of attention and one feed-forward network."""

from functools import partial
from typing import Any

from decoder.model.gguf import sources
from decoder.model.gguf.architectures.base import (
    ATTENTION,
    GATED,
    HEAD_NORMS,
    LAYER_NORM,
    PROJECTIONS,
    Architecture,
    in_first_layer,
)
from decoder.model.gguf.file import GgufFile
from decoder.model.gguf.keys import needed_size, needed_value, size_of, value_of, window_layers
from decoder.model.gguf.rotary import rotary_by_layer, rotary_of


def _llama(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": in_first_layer(file, "attn_q.bias"), "mlp_bias": in_first_layer(file, "ffn_gate.bias")}


def _biased(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": in_first_layer(file, "attn_q.bias")}


def _smollm3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    # As in llama.cpp, each fourth layer does without rotary embeddings, which no key says.
    return _llama(file, architecture) | {"no_rope_layer_interval": 4, "no_rope_layers": None}


def granite_scales(file: GgufFile) -> dict[str, Any]:
    """What Granite multiplies embeddings, scores, layers and logits by."""
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    scales = {ours: value_of(file, key, float) for key, ours in names.items()}
    # Without a scale of its own, attention has the usual one.
    heads, size = size_of(file, "attention.head_count"), size_of(file, "embedding_length")
    if scales["attention_multiplier"] is None and heads and size:
        scales["attention_multiplier"] = (size // heads) ** -0.5
    return scales


def _granite(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return _llama(file, architecture) | granite_scales(file)


def _ministral3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    scale = needed_value(file, "attention.temperature_scale", float)
    rotary = architecture.rotary(file, size_of(file, "attention.key_length"))
    # The scale of cosines and sines is one: llama.cpp stores one of two scales, whose quotient it is.
    stored = value_of(file, "rope.scaling.yarn_log_multiplier", float, 1.0)
    scales = {"llama_4_scaling_beta": scale, "mscale": stored, "mscale_all_dim": stored}
    return {"rope_parameters": rotary | scales, "sliding_window": None}


def _window(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"sliding_window": value_of(file, "attention.sliding_window", int) or None}


def _phi3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    # Its configuration has this length beside the rotary parameters, too.
    trained = size_of(file, "rope.scaling.original_context_length")
    return _window(file, architecture) | {"original_max_position_embeddings": trained}


def _some_windows(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Windows in all layers but each fourth, unless the file says which."""
    window = value_of(file, "attention.sliding_window", int) or None
    kinds = window_layers(file, 4) if window else ["full_attention"] * needed_size(file, "block_count")
    return {"sliding_window": window, "layer_types": kinds}


def _cohere2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    scale = needed_value(file, "logit_scale", float)
    return _some_windows(file, architecture) | {"logit_scale": scale, "tie_word_embeddings": True}


def _starcoder2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"use_bias": in_first_layer(file, "attn_q.bias"), **_window(file, architecture)}


def _gpt2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    inner = size_of(file, "feed_forward_length")
    return {"n_inner": inner, "head_dim": None, "num_key_value_heads": None, "rope_parameters": None}


# Norms behind attention and the feed-forward network, and none before them.
_NORMS_BEHIND = (
    PROJECTIONS
    | HEAD_NORMS
    | GATED
    | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
)
DENSE = {
    "llama": Architecture("llama", ATTENTION | GATED, _llama, change=sources.rotary_pairs),
    "smollm3": Architecture("smollm3", ATTENTION | GATED, _smollm3, change=sources.rotary_pairs),
    "granite": Architecture("granite", ATTENTION | GATED, _granite, change=sources.rotary_pairs),
    "mistral3": Architecture("mistral", ATTENTION | GATED, _window, change=sources.rotary_pairs),
    "ministral3": Architecture(
        "ministral3",
        ATTENTION | GATED,
        _ministral3,
        change=sources.rotary_pairs,
        rotary=partial(rotary_of, others=("yarn_log_multiplier",)),
    ),
    "qwen2": Architecture("qwen2", ATTENTION | GATED),
    "qwen3": Architecture("qwen3", ATTENTION | GATED | HEAD_NORMS, _biased),
    # Of texts alone; the vision beside them is a file of its own.
    "qwen2vl": Architecture("qwen2", ATTENTION | GATED),
    "qwen3vl": Architecture("qwen3", ATTENTION | GATED | HEAD_NORMS, _biased),
    "arcee": Architecture(
        "arcee",
        ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        lambda file, architecture: _biased(file, architecture) | {"mlp_bias": in_first_layer(file, "ffn_up.bias")},
        change=sources.rotary_pairs,
    ),
    "ernie4_5": Architecture("ernie4_5", ATTENTION | GATED),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        ATTENTION | GATED | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        _biased,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        PROJECTIONS | GATED | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        lambda file, architecture: (
            _biased(file, architecture) | {"attention_out_bias": in_first_layer(file, "attn_output.bias")}
        ),
    ),
    "olmo2": Architecture("olmo2", _NORMS_BEHIND, _biased),
    "olmo3": Architecture(
        "olmo3",
        _NORMS_BEHIND,
        lambda file, architecture: _biased(file, architecture) | _some_windows(file, architecture),
        rotary=rotary_by_layer,
    ),
    "exaone4": Architecture("exaone4", _NORMS_BEHIND, _some_windows),
    "glm4": Architecture(
        "glm4",
        PROJECTIONS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _biased,
    ),
    "command-r": Architecture(
        "cohere",
        PROJECTIONS | GATED | HEAD_NORMS | {"attn_norm": "input_layernorm"},
        lambda file, architecture: (
            _biased(file, architecture)
            | {"logit_scale": needed_value(file, "logit_scale", float), "tie_word_embeddings": True}
            | {"use_qk_norm": in_first_layer(file, "attn_q_norm.weight")}
        ),
        norm=(LAYER_NORM, "layer_norm_eps"),
    ),
    "cohere2": Architecture(
        "cohere2",
        PROJECTIONS | GATED | {"attn_norm": "input_layernorm"},
        _cohere2,
        norm=(LAYER_NORM, "layer_norm_eps"),
    ),
    "phi3": Architecture(
        "phi3",
        ATTENTION | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        _phi3,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _starcoder2,
        norm=(LAYER_NORM, "norm_epsilon"),
    ),
    "nemotron": Architecture(
        "nemotron",
        ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        norm=(LAYER_NORM, "norm_eps"),
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
        norm=(LAYER_NORM, "layer_norm_epsilon"),
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
"""By llama.cpp's names, but for "olmo3" and "ministral3", which are "olmo2" and "mistral3" there."""
