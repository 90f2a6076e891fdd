"""The architectures that are read: how llama.cpp's keys make a configuration, and its tensors a model's parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig, PreTrainedConfig

from decoder.model.gguf.file import ELSE, FETCH, GgufFile, named
from decoder.model.gguf.tokenizer import end_tokens, token_count, token_of_role

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
# By llama.cpp's keys behind the architecture's name: what must be at least one, and its name in configurations.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
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
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


class Source(NamedTuple):
    """What a parameter of a model is made of.

    Attributes:
        tensors: names of tensors in the file, to be joined along the rows of each expert.
        heads: if not 0, the rows of each of so many heads stand in llama.cpp's order, the two halves of a rotary pair
            side by side.
        offset: what is to be taken away from each number.
        transposed: whether rows are columns.
    """

    tensors: tuple[str, ...]
    heads: int = 0
    offset: float = 0.0
    transposed: bool = False


@dataclass(frozen=True)
class Architecture:
    """How models of one architecture are read.

    Attributes:
        model_type: its name in transformers.
        names: names of a layer's tensors -> those of its parameters.
        extra: the keys of the configuration beyond those that all share.
        norm: the name of the norms' epsilon in keys and in configurations.
        layers: the name of the list of layers in the model.
        outside: names of tensors outside of layers -> those of their parameters.
        rotary_pairs: whether queries and keys stand in llama.cpp's order.
        norm_offset: what converters add to the weights of norms.
        transposed: the parameters whose rows are columns.
    """

    model_type: str
    names: dict[str, str]
    extra: Callable[[GgufFile, "Architecture"], dict[str, Any]] | None = None
    norm: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    layers: str = "model.layers"
    outside: dict[str, str] = field(default_factory=lambda: _OUTSIDE)
    rotary_pairs: bool = False
    norm_offset: float = 0.0
    transposed: tuple[str, ...] = ()


def architecture_of(file: GgufFile) -> Architecture:
    """How the model of a file is read. Raises ValueError for an architecture that is not."""
    name = file.architecture
    if name == "llama" and _get(file, "expert_count", int, 0):
        name = "mixtral"
    if name not in ARCHITECTURES:
        raise ValueError(f"models of the architecture {name} cannot be read from the GGUF file {file.path}: {ELSE}")
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration as in the model's Hugging Face folder.

    Raises ValueError, with the key, for one that cannot be read completely and correctly.
    """
    architecture = architecture_of(file)
    values: dict[str, Any] = {name: _size(file, key) for key, name in _SIZES.items()}
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values[architecture.norm[1]] = _get(file, architecture.norm[0], float)
    heads = values["num_attention_heads"]
    head_size = _size(file, "attention.key_length")
    if head_size is None and values["hidden_size"] and heads:
        head_size = values["hidden_size"] // heads
    values |= {"head_dim": head_size, "vocab_size": _vocabulary_size(file)}
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["rope_parameters"] = _rotary(file, head_size)
    values |= {f"{name}_token_id": token_of_role(file, f"{name}_token") for name in ("bos", "pad")}
    ends = end_tokens(file)
    values["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    missing = [key for key, name in _SIZES.items() if values[name] is None]
    if missing:
        raise ValueError(f"{file.path} has no {file.architecture}.{missing[0]}: {ELSE}")
    if architecture.extra is not None:
        values |= architecture.extra(file, architecture)
    _check_layers(file, values["num_hidden_layers"])
    try:
        # What the file does not say is the architecture's default, but for tokens.
        given = {name: value for name, value in values.items() if value is not None or name.endswith("_token_id")}
        config = AutoConfig.for_model(architecture.model_type, **given)
    except Exception as error:
        # Validators of configurations raise errors of their own.
        reason = " ".join(str(error).split())
        raise ValueError(f"{file.path} has a configuration that cannot be: {reason}: {ELSE}") from error
    config.architectures = [_class_name(config)]
    return config


def sources(file: GgufFile, config: PreTrainedConfig) -> dict[str, Source]:
    """By the names of a model's parameters, what they are made of. Raises ValueError for a tensor of unknown use."""
    architecture = architecture_of(file)
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
    found: dict[str, Source] = {}
    for name in file.tensors:
        stem, _, leaf = name.rpartition(".")
        layer = _LAYER.fullmatch(name)
        known = architecture.names.get(layer[2]) if layer else architecture.outside.get(stem)
        if known is None or leaf not in ("weight", "bias"):
            if name in _OF_ROTARY or (layer and layer[2] == "attn_rot_embd"):
                continue
            raise ValueError(f"{file.path} has a tensor {named(name)}, unknown in {file.architecture} models: {ELSE}")
        # Stacks of experts are parameters themselves, not weights of modules.
        ours = known if ".experts." in known else f"{known}.{leaf}"
        ours = f"{architecture.layers}.{layer[1]}.{ours}" if layer else ours
        is_norm = leaf == "weight" and "norm" in stem
        made = Source(
            (name,),
            heads=heads.get(layer[2], 0) if layer and architecture.rotary_pairs else 0,
            offset=architecture.norm_offset if is_norm else 0.0,
            transposed=known in architecture.transposed and leaf == "weight",
        )
        if ours in found:
            # The gates of experts come before what they gate.
            names = sorted((*found[ours].tensors, name), key=lambda each: "ffn_gate_exps" not in each)
            made = made._replace(tensors=tuple(names))
        found[ours] = made
    return found


def _get(file: GgufFile, key: str, kind: Any, default: Any = None) -> Any:
    full = f"{file.architecture}.{key}"
    value = file.get(full, kind, default)
    if not isinstance(value, float):
        return value
    if not 0 <= value < np.finfo(np.float32).max:
        raise ValueError(f"{file.path} says that its {full} is {value}: {ELSE}")
    # The file stores float32: 1e-05 is read as 9.999999747378752e-06.
    return float(str(np.float32(value)))


def _size(file: GgufFile, key: str) -> int | None:
    full = f"{file.architecture}.{key}"
    if isinstance(file.metadata.get(full), np.ndarray):
        raise ValueError(f"{file.path} has a {full} of its own for each layer, which is not read: {ELSE}")
    size = file.get(full, int)
    # Far beyond any model, and small enough for products of four to be numbers of 64 bits.
    most = {"context_length": 2**31, "expert_count": 2**12, "expert_used_count": 2**12}.get(key, 2**18)
    if size is not None and not 1 <= size <= most:
        raise ValueError(f"{file.path} says that its {full} is {size}: {ELSE}")
    return size


def _vocabulary_size(file: GgufFile) -> int | None:
    tokens = token_count(file)
    embeddings = file.tensors.get("token_embd.weight")
    rows = _size(file, "vocab_size") or tokens if embeddings is None else embeddings.shape[0]
    if tokens > rows:
        raise ValueError(f"{file.path} has {tokens} tokens and embeddings of {rows}: {FETCH}, or {ELSE}")
    return rows or None


def _check_layers(file: GgufFile, layers: int) -> None:
    found = len({layer[1] for layer in map(_LAYER.fullmatch, file.tensors) if layer})
    if found != layers:
        key = f"{file.architecture}.block_count"
        raise ValueError(f"{file.path} says {layers} layers and has weights of {found} ({key}): {FETCH}")


_OF_ROTARY = ("rope_freqs.weight",)


def _rotary(file: GgufFile, head_size: int | None) -> dict[str, Any]:
    base = _get(file, "rope.freq_base", float, 10000.0) or 10000.0
    turned = _get(file, "rope.dimension_count", int)
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if turned is not None and not (head_size and 2 <= turned <= head_size and turned % 2 == 0):
        key = f"{file.architecture}.rope.dimension_count"
        raise ValueError(f"{file.path} turns {turned} of {head_size} numbers of each head ({key}): {ELSE}")
    if turned and turned != head_size:
        rotary["partial_rotary_factor"] = turned / head_size
    scaling = _get(file, "rope.scaling.type", str, "none")
    factor = _get(file, "rope.scaling.factor", float, 1.0) * _get(file, "rope.scale_linear", float, 1.0)
    others = [name for name in file.tensors if name.startswith("rope_f") and name not in _OF_ROTARY]
    if scaling != "none" or factor not in (0.0, 1.0) or others:
        raise ValueError(f"{file.path} scales its rotary embeddings in a way that is not read: {ELSE}")
    stretched = file.tensors.get(_OF_ROTARY[0])
    return rotary if stretched is None else _as_llama3(file, rotary, turned or head_size or 0)


def _as_llama3(file: GgufFile, rotary: dict[str, Any], size: int) -> dict[str, Any]:
    """Llama 3's scaling of rotary frequencies, if it is what the factors in the file are.

    Raises ValueError if they are not.
    """
    stored = file.tensors[_OF_ROTARY[0]]
    factors = stored.blocks.reshape(-1).view("<f4") if stored.format.name == "F32" else np.zeros(0, np.float32)
    scaled = rotary | {
        "rope_type": "llama3",
        "factor": float(factors.max(initial=1.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    lengths = 2 * np.pi * rotary["rope_theta"] ** (np.arange(0, size, 2) / max(size, 1))
    smooth = np.clip((8192 / lengths - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaled["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{file.path} scales its rotary embeddings ({_OF_ROTARY[0]}) in an unknown way: {ELSE}")
    return scaled


def _class_name(config: PreTrainedConfig) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}" in file.tensors


def _llama(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_gate.bias")}


def _experts(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    counts = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
    values = {name: _size(file, key) for key, name in counts.items()}
    missing = [key for key, name in counts.items() if values[name] is None]
    if missing:
        raise ValueError(f"{file.path} has no {file.architecture}.{missing[0]}: {ELSE}")
    if architecture.model_type == "mixtral":
        return {"num_local_experts": values.pop("num_experts"), **values}
    values["moe_intermediate_size"] = _size(file, "expert_feed_forward_length")
    if architecture.model_type == "qwen3_moe":
        # llama.cpp always normalises their weights, too.
        values["norm_topk_prob"] = True
    else:
        shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
        values["shared_expert_intermediate_size"] = None if shared is None else shared.shape[0]
        values["qkv_bias"] = _has(file, "attn_q.bias")
        experts = file.tensors.get("blk.0.ffn_gate_exps.weight")
        if values["moe_intermediate_size"] is None and experts is not None:
            values["moe_intermediate_size"] = experts.shape[-2]
    return values


def _qwen3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": _has(file, "attn_q.bias")}


def _window(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"sliding_window": _get(file, "attention.sliding_window", int) or None}


def _gemma3(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Its layers have windows, but for each sixth, and rotary embeddings of their own."""
    base = _get(file, "rope.freq_base", float, 10000.0)
    local = _get(file, "rope.freq_base_swa", float, 10000.0)
    layers, period = _size(file, "block_count") or 1, _size(file, "attention.sliding_window_pattern") or 6
    kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    heads, size = _size(file, "attention.head_count"), _size(file, "embedding_length")
    # As in llama.cpp, the largest model is the one that scales its scores by another size than that of its heads.
    scale = size // heads if layers == 62 and size and heads else _size(file, "attention.key_length")
    return {
        "sliding_window": _get(file, "attention.sliding_window", int),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": scale,
    }


def _starcoder2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    return {"use_bias": _has(file, "attn_q.bias"), **_window(file, architecture)}


def _gpt2(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    inner = _size(file, "feed_forward_length")
    return {"n_inner": inner, "head_dim": None, "num_key_value_heads": None, "rope_parameters": None}


_LAYER_NORM = "attention.layer_norm_epsilon"
_GEMMA = _ATTENTION | _GATED | _HEAD_NORMS
ARCHITECTURES = {
    "llama": Architecture("llama", _ATTENTION | _GATED, _llama, rotary_pairs=True),
    "mixtral": Architecture("mixtral", _ATTENTION | _EXPERTS, _experts, rotary_pairs=True),
    "qwen2": Architecture("qwen2", _ATTENTION | _GATED),
    "qwen2moe": Architecture("qwen2_moe", _ATTENTION | _EXPERTS | _SHARED_EXPERT, _experts),
    "qwen3": Architecture("qwen3", _ATTENTION | _GATED | _HEAD_NORMS, _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _ATTENTION | _EXPERTS | _HEAD_NORMS, _experts),
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
        norm_offset=1.0,
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
        norm_offset=1.0,
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
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
}
"""By llama.cpp's names, the architectures that are read; "mixtral" is a "llama" with experts there."""
