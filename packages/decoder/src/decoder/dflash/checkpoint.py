"""DFlash checkpoints, in the layouts of their authors (z-lab) and of vLLM's speculators.

The layouts differ in where the fields stand, and in how they number the target's layers: the authors name a layer whose
output is a feature, speculators one whose input is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from decoder.dflash.draft_model import DFlashConfig, DFlashDraftModel
from decoder.eagle3.checkpoint import parse_rotary, read_layers
from decoder.heads_files import CONFIG

_SLIDING = "sliding_attention"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OF_WINDOWS = ("layer_types", "sliding_window")
# What makes another drafter of it, where it is set, and the values that do not.
_UNKNOWN = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "sample_from_anchor": (),
    "shift_label": (),
    "use_swa": (),
    "attention_sink_bias": (),
    "selector_rank": (),
}


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a drafter of DFlash's family."""
    names = config.get("speculators_model_type"), config.get("architectures")
    return "dflash_config" in config or "dflash" in str(names).lower()


def read_dflash(folder: Path, config: Mapping[str, Any], source: str) -> DFlashDraftModel:
    """The draft model in ``folder``, in the dtype it was saved in; ``source`` is what errors call it.

    Args:
        config: the content of its ``config.json``.

    Raises:
        OSError: a file is missing.
        ValueError: it is not a DFlash checkpoint of a known layout.
    """
    try:
        with torch.device("meta"):
            model = dflash_of(config)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        told = f"no or an unknown {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{folder / CONFIG} is not of a draft model that can be read: {told}") from error
    return read_layers(folder, config, source, lambda tensors: model)


def dflash_of(config: Mapping[str, Any]) -> DFlashDraftModel:
    """A new draft model as a ``config.json`` describes it."""
    speculators = "transformer_layer_config" in config
    given = {**config, **(config.get("dflash_config") or {})}
    for name, usual in _UNKNOWN.items():
        if given.get(name) and given[name] not in usual:
            raise ValueError(f"its {name} is {given[name]}, and DFlash without it is supported")
    layer = dict(config["transformer_layer_config"] if speculators else config)
    if speculators:
        # Some name these beside the layers' configuration.
        layer |= {name: config[name] for name in _OF_WINDOWS if config.get(name)}
    if layer.get("hidden_act", "silu") != "silu":
        raise ValueError(f"its activation is {layer['hidden_act']}, and silu is supported")
    sizes = {name: layer[name] for name in _SIZES}
    sizes["num_key_value_heads"] = layer.get("num_key_value_heads") or layer["num_attention_heads"]
    sizes["head_dim"] = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    sizes["max_position_embeddings"] = layer.get("max_position_embeddings", 32768)
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        raise ValueError("its query heads cannot share its heads of keys and values, or head_dim is odd")
    count = sizes["num_hidden_layers"]
    windowed = [kind == _SLIDING for kind in layer.get("layer_types") or [None] * count]
    if len(windowed) != count or (any(windowed) and not layer.get("sliding_window")):
        raise ValueError(f"its layer_types name {len(windowed)} layers of {count}, or it has no sliding_window")
    # Layers with a window are causal unless it says otherwise; the field says it of all layers, or of these alone.
    causal = config.get("is_causal") if config.get("is_causal") is not None else given.get("causal")
    of_windows = not given.get("sliding_window_non_causal", False)
    ids = given["aux_hidden_state_layer_ids"] if speculators else [output + 1 for output in given["target_layer_ids"]]
    shape = DFlashConfig(
        layers=Qwen3Config(
            **sizes,
            rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
            rope_parameters=parse_rotary(layer),
            attention_bias=bool(layer.get("attention_bias", False)),
        ),
        target_layers=tuple(ids),
        block_size=given.get("block_size", 8 if speculators else 16),
        mask_token=given["mask_token_id"],
        windows=tuple(layer["sliding_window"] if each else None for each in windowed),
        causal=tuple((each and of_windows) if causal is None else bool(causal) for each in windowed),
        embedding_scale=float(given.get("input_embedding_scale", 1.0)),
        logit_scale=float(given.get("output_multiplier", 1.0)),
        logit_cap=given.get("final_logit_softcapping") or None,
    )
    return DFlashDraftModel(shape)
