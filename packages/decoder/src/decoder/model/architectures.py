"""Which architectures can be decoded exactly, as configuration and model class show before weights are loaded."""

import inspect
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from decoder.backends.reference.mixers import leaves_state
from decoder.cache.layout import FULL, NONE, RECURRENT, LayerKind
from decoder.model.looked_at import looked_at
from decoder.model.options import (
    is_read,
    layer_configs,
    partly_rotated,
    refuse_layers_apart,
    refuse_passed_over,
    refuse_unknown_options,
    rotary_kinds,
)
from decoder.model.yarn import LONGROPE, changes_with_length

# Rotary scalings that transformers recomputes when the text becomes longer than some limit.
_LENGTH_DEPENDENT_ROPE = ("dynamic", LONGROPE)
_ROTATING, _PART = "compute_default_rope_parameters", "partial_rotary_factor"
# By transformers' name of a layer, the name of its `LayerKind`, and what the configuration calls its size.
_ATTENTION = {
    "sliding_attention": ("window", "sliding_window"),
    "hybrid_sliding": ("window", "sliding_window"),
    "chunked_attention": ("chunk", "attention_chunk_size"),
}
_WHOLE = ("full_attention", "attention", "hybrid")
_WITHOUT_ATTENTION = dict.fromkeys(("linear_attention", "conv", "mamba"), RECURRENT) | dict.fromkeys(
    ("moe", "mlp"), NONE
)


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
    if model_class is not None:
        refuse_layers_apart(config, model_class)
    layer_kinds(config)
    refuse_unknown_options(config)
    _refuse_quantised(config)
    # Gemma 4 names the kind of tokens that do, and there are only those of text.
    both_ways = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")
    if both_ways or not getattr(config, "is_causal", True):
        raise ValueError(f"{name} is configured to attend in both directions; only causal attention can be accelerated")
    for kind in rotary_kinds(config):
        if kind in _LENGTH_DEPENDENT_ROPE and (kind != LONGROPE or changes_with_length(config)):
            reason = "which changes with the length of the text, so that cached keys would go stale"
            instead = ": load it by decoder.load, which takes one set of factors" if kind == LONGROPE else ""
            raise ValueError(f"{name} uses {kind} rotary scaling, {reason}{instead}")
    if model_class is not None:
        _refuse_class(config, model_class)
        refuse_passed_over(config, model_class)
    if not getattr(config, "max_position_embeddings", None):
        raise ValueError(f"{name} names no max_position_embeddings, so it is not known how long its texts may be")


def _refuse_class(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ValueError for a model whose modules neither use the attention interface nor leave states in the cache.

    So it does for one whose modules rotate whole heads where the configuration names a part.
    """
    name, kinds = config.model_type, layer_kinds(config)
    beside = vars(sys.modules[model_class.__module__])
    modules = [one for one in beside.values() if isinstance(one, type) and issubclass(one, nn.Module)]
    rotating = [getattr(one, _ROTATING) for one in modules if hasattr(one, _ROTATING)]
    part = partly_rotated(config)
    if part is not None and rotating and not any(_PART in inspect.unwrap(one).__code__.co_consts for one in rotating):
        raise ValueError(f"{name} has {_PART}={part!r}, which its layers do not look at")
    recurrent = model_class._is_stateful or RECURRENT in kinds
    named = dict.fromkeys(getattr(config, "layer_types", None) or ())
    with_state = [kind for kind in named if "hybrid" in kind or _WITHOUT_ATTENTION.get(kind) == RECURRENT]
    recurrent = recurrent or bool(with_state)
    if recurrent and not any(map(leaves_state, modules)):
        those = f" ({', '.join(with_state)})" if with_state else ""
        state = f"a recurrent state{those}"
        raise ValueError(f"{name} has layers with {state}, which they do not leave in transformers' cache")
    if recurrent and not any(kind.attends for kind in kinds):
        raise ValueError(f"{name} has layers with a recurrent state alone, and none that attends to the text")
    # Classes of hybrid models do not say that they use it.
    if not model_class._supports_attention_backend and not (recurrent and "ALL_ATTENTION_FUNCTIONS" in beside):
        raise ValueError(
            f"{name} does not use transformers' attention interface, so its attention cannot be given a token tree"
        )
    if not is_read(config, "layer_types", looked_at(model_class)) and kinds != _kinds_without(config):
        told = f"its layers do not look at layer_types={config.layer_types!r}"
        raise ValueError(f"{name} has another mask in a layer than its configuration says: {told}")


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """What tokens see in each layer. Raises ValueError if a layer is of another kind than those that are known."""
    named = getattr(config, "layer_types", None)
    return _kinds(config, named) if named else _kinds_without(config)


def _kinds_without(config: PreTrainedConfig) -> list[LayerKind]:
    """What tokens see in layers without types, as in Mistral: a window applies to all; Qwen2 has a switch for it."""
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    name = "sliding_attention" if windowed else "full_attention"
    return _kinds(config, [name] * getattr(config, "num_hidden_layers", 0))


def _kinds(config: PreTrainedConfig, names: Iterable[str]) -> list[LayerKind]:
    kinds, configs = [], layer_configs(config)
    for number, name in enumerate(names):
        if name in _WITHOUT_ATTENTION:
            kinds.append(_WITHOUT_ATTENTION[name])
            continue
        kind, setting = _ATTENTION.get(name, ("full", ""))
        size = getattr(configs[number % len(configs)], setting, None)
        if size is not None and not (isinstance(size, int) and size > 0):
            raise ValueError(f"{config.model_type} has {name.replace('_', ' ')} layers with a {setting} of {size!r}")
        if name not in _WHOLE and size is None:
            raise ValueError(f"{config.model_type} has {name} layers, which are not known and cannot be accelerated")
        # A window that no text fills is none, unless its layers may have other heads.
        longest = getattr(config, "max_position_embeddings", None) or math.inf
        apart = size is not None and (size < longest or len(configs) > 1)
        kinds.append(LayerKind(kind, size or 0) if apart else FULL)
    return kinds


def decoder_of(model: PreTrainedModel) -> Any:
    """The model without its language-model head."""
    found = model.get_decoder()
    # transformers does not find that of Llama 4 without its vision.
    return getattr(model, "model", found) if found is model else found


def _refuse_quantised(config: PreTrainedConfig) -> None:
    """Raise ValueError for quantised products of which a row depends on the other rows."""
    found = getattr(config, "quantization_config", None) or {}
    settings = found if isinstance(found, dict) else found.to_dict()
    method = settings.get("quant_method")
    if method is not None and not AutoHfQuantizer.supports_quant_method(dict(settings)):
        raise ValueError(f"{config.model_type} has quant_method={str(method)!r}, which is not known and cannot be run")
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
