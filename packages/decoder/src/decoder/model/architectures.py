"""Which architectures can be decoded exactly, as configuration and model class show before weights are loaded."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

# Rotary scalings that transformers recomputes when the text becomes longer than some limit.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def refuse_unsupported(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None) -> None:
    """Raise ValueError, with the reason, for an architecture that could not be decoded exactly.

    Args:
        config: the model's configuration.
        model_class: the model's class; None looks up the one that ``AutoModelForCausalLM`` would take.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; only decoder-only causal models can be accelerated")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(f"{name} is an encoder; only decoder-only causal models can be accelerated")
    if config.get_text_config() is not config:
        raise ValueError(f"{name} wraps a language model with other parts; give the language model alone")
    if model_class is None:
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        if not known and not getattr(config, "auto_map", None):
            raise ValueError(f"{name} is no causal language model; only decoder-only causal models can be accelerated")
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    for field, value in vars(config).items():
        if "softcap" in field and value:
            raise ValueError(f"{name} caps its logits ({field}); models with soft caps cannot be accelerated")
    _refuse_layers(config)
    _refuse_quantised(config)
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ValueError(f"{name} is configured to attend in both directions; only causal attention can be accelerated")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{name} caches compressed keys (multi-head latent attention), which cannot be ranked for drafts"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type", part.get("type"))
        if kind in _LENGTH_DEPENDENT_ROPE:
            reason = "which changes with the length of the text, so that cached keys would go stale"
            raise ValueError(f"{name} uses {kind} rotary scaling, {reason}")
    if model_class is not None:
        if model_class._is_stateful:
            raise ValueError(
                f"{name} has layers with a recurrent state; only attention over the whole text can be accelerated"
            )
        if not model_class._supports_attention_backend:
            raise ValueError(
                f"{name} does not use transformers' attention interface, so its attention cannot be given a token tree"
            )
    if not getattr(config, "max_position_embeddings", None):
        raise ValueError(f"{name} names no max_position_embeddings, so it is not known how long its texts may be")


def _refuse_layers(config: PreTrainedConfig) -> None:
    """Raise ValueError if ``config`` names layers that do not attend to the whole text."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    # Without layer types, as in Mistral, a window applies to every layer; Qwen2 has a switch for it.
    if window and getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None):
        kinds.add("sliding_attention")
    if window and window >= getattr(config, "max_position_embeddings", float("inf")):
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        kind = sorted(kinds - {"full_attention"})[0].replace("_", " ")
        raise ValueError(
            f"{config.model_type} has {kind} layers; only full attention over the whole text can be accelerated"
        )


def _refuse_quantised(config: PreTrainedConfig) -> None:
    """Raise ValueError for quantised products of which a row depends on the other rows."""
    found = getattr(config, "quantization_config", None) or {}
    settings = found if isinstance(found, dict) else found.to_dict()
    if settings.get("load_in_8bit") and settings.get("llm_int8_threshold", 6.0):
        raise ValueError(
            f"this {config.model_type} is in bitsandbytes' 8 bits with outliers apart, which all tokens of a pass "
            "decide together: load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits"
        )


def refuse_devices(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ValueError for a model on several devices, or on a ``device`` that is neither a CPU nor CUDA."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(f"the model is spread over {', '.join(devices)}; load it on one device")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on device {devices[0]}; only cpu and cuda are supported")
