"""The configuration of a file's model, as in its Hugging Face folder."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from decoder.model.gguf.architectures import architecture_of
from decoder.model.gguf.file import ELSE, FETCH, GgufFile
from decoder.model.gguf.keys import refuse_unread, size_of, value_of
from decoder.model.gguf.sources import LAYER
from decoder.model.gguf.tokenizer import end_tokens, token_count, token_of_role

# By llama.cpp's keys behind the architecture's name: what must be at least one, and its name in configurations.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration as in the model's Hugging Face folder.

    Raises ValueError, with the key, for one that cannot be read completely and correctly.
    """
    architecture = architecture_of(file)
    sizes = {key: name for key, name in _SIZES.items() if key not in architecture.by_layer}
    values: dict[str, Any] = {name: size_of(file, key) for key, name in sizes.items()}
    values.setdefault("num_key_value_heads")
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values[architecture.norm[1]] = value_of(file, architecture.norm[0], float)
    heads = values["num_attention_heads"]
    head_size = size_of(file, "attention.key_length")
    if head_size is None and values["hidden_size"] and heads:
        head_size = values["hidden_size"] // heads
    values |= {"head_dim": head_size, "vocab_size": _vocabulary_size(file)}
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["rope_parameters"] = architecture.rotary(file, head_size)
    values |= {f"{name}_token_id": token_of_role(file, f"{name}_token") for name in ("bos", "pad")}
    ends = end_tokens(file)
    values["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    for key, name in (*sizes.items(), architecture.norm):
        # All of whose layers may be experts, which have a size of their own.
        if values[name] is None and not (name == "intermediate_size" and "ffn_gate_inp" in architecture.names):
            raise ValueError(f"{file.path} has no {file.architecture}.{key}: {ELSE}")
    values["sliding_window"] = None
    if architecture.extra is not None:
        values |= architecture.extra(file, architecture)
    _check_layers(file, values["num_hidden_layers"])
    # Layers that predict further tokens stand behind the others.
    predicting = size_of(file, "nextn_predict_layers") or 0
    values["num_hidden_layers"] -= 0 if architecture.drafts else predicting
    try:
        # What the file does not say is the architecture's default, but for tokens and what only some models have.
        none = [name for name in values if name.endswith("_token_id") or name in ("sliding_window", "q_lora_rank")]
        given = {name: value for name, value in values.items() if value is not None or name in none}
        config = AutoConfig.for_model(architecture.model_type, **given)
    except Exception as error:
        # Validators of configurations raise errors of their own.
        reason = " ".join(str(error).split())
        raise ValueError(f"{file.path} has a configuration that cannot be: {reason}: {ELSE}") from error
    refuse_unread(file, getattr(config, "norm_topk_prob", True))
    config.architectures = [_class_name(config)]
    return config


def _vocabulary_size(file: GgufFile) -> int | None:
    tokens = token_count(file)
    embeddings = file.tensors.get("token_embd.weight")
    rows = size_of(file, "vocab_size") or tokens if embeddings is None else embeddings.shape[0]
    if tokens > rows:
        raise ValueError(f"{file.path} has {tokens} tokens and embeddings of {rows}: {FETCH}, or {ELSE}")
    return rows or None


def _check_layers(file: GgufFile, layers: int) -> None:
    found = len({layer[1] for layer in map(LAYER.fullmatch, file.tensors) if layer})
    if found != layers:
        key = f"{file.architecture}.block_count"
        raise ValueError(f"{file.path} says {layers} layers and has weights of {found} ({key}): {FETCH}")


def _class_name(config: PreTrainedConfig) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
