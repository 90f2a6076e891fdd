"""EAGLE-3 checkpoints: read in the layouts of vLLM's speculators and of SGLang and SafeAILab, written in both.

The layouts differ in the names of tensors and fields, and in how they number the target's layers: speculators names a
layer whose input is a feature, SGLang one whose output is.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoder.draft_heads import DRAFT_TO_TARGET, refuse_not_finite
from decoder.draft_layer import DraftLayer
from decoder.eagle3.config import Eagle3Config
from decoder.eagle3.draft_model import DRAFT_TO_TARGET_OFFSETS, Eagle3DraftModel
from decoder.heads_files import (
    CONFIG,
    MODEL_INDEX,
    MODEL_WEIGHTS,
    PICKLED_WEIGHTS,
    read_json,
    read_tensors,
    refuse_misfits,
    write_checkpoint,
)

LayersT = TypeVar("LayersT", bound=DraftLayer)
LAYOUTS = ("speculators", "eagle3")
_FIRST_LAYER = {"speculators": "layers.0.", "eagle3": "midlayer."}
_TARGET_TO_DRAFT = "t2d"
_FEATURES = 3  # layers where a checkpoint does not say which
# Parts of the target that some checkpoints carry along.
_NOT_READ = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of an EAGLE-3 draft model."""
    named = config.get("architectures")
    names = [config.get("speculators_model_type"), *(named if isinstance(named, list) else [])]
    return any("eagle3" in str(name).lower() for name in names)


def read_draft_model(folder: Path, config: Mapping[str, Any], source: str) -> Eagle3DraftModel:
    """The draft model in ``folder``, in the dtype it was saved in; ``source`` is what errors call it.

    Args:
        config: the content of its ``config.json``.

    Raises:
        OSError: a file is missing.
        ValueError: it is not an EAGLE-3 checkpoint of a known layout.
    """

    def made(tensors: Mapping[str, torch.Tensor]) -> Eagle3DraftModel:
        parsed = _parse_speculators(config) if "transformer_layer_config" in config else _parse_eagle3(config)
        return Eagle3DraftModel(_completed(parsed, tensors))

    model = read_layers(folder, config, source, made)
    model.target_architecture = (verifier_of(config).get("architectures") or [model.target_architecture])[0]
    return model


def read_layers(
    folder: Path, config: Mapping[str, Any], source: str, make: Callable[[Mapping[str, torch.Tensor]], LayersT]
) -> LayersT:
    """The draft layers that ``make`` makes for the tensors in a folder, with these and their draft vocabulary.

    Arguments and errors are those of `read_draft_model`.
    """
    tensors = read_weights(folder)
    try:
        offsets, known = tensors.pop(DRAFT_TO_TARGET_OFFSETS, None), tensors.pop(_TARGET_TO_DRAFT, None)
        draft_to_target = None if offsets is None else offsets.long() + torch.arange(len(offsets))
        with torch.device("meta"):
            model = make(tensors)
            model.source = source
            model.set_draft_vocabulary(draft_to_target)
            if "lm_head.weight" in tensors:
                model.make_own_head()
            if "embed_tokens.weight" in tensors:
                model.make_own_embeddings()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        told = f"no or an unknown {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{folder / CONFIG} is not of a draft model that can be read: {told}") from error
    if (
        known is not None
        and draft_to_target is not None
        and known.nonzero().flatten().tolist() != sorted(draft_to_target.tolist())
    ):
        raise ValueError(f"the maps of the draft vocabulary in {folder}, d2t and t2d, do not agree")
    _load(model, tensors, folder)
    model.base_model = verifier_of(config).get("name_or_path") or config.get("base_model")
    return model


def verifier_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration of the speculators layout tells of the model that verifies; nothing in the others."""
    found = config.get("speculators_config")
    verifier = found.get("verifier") if isinstance(found, Mapping) else None
    return verifier if isinstance(verifier, Mapping) else {}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, under the names of the speculators layout."""
    if (folder / MODEL_WEIGHTS).is_file():
        tensors = read_tensors(folder / MODEL_WEIGHTS)
    elif (folder / MODEL_INDEX).is_file():
        shards = sorted(set(read_json(folder / MODEL_INDEX).get("weight_map", {}).values()))
        tensors = {name: tensor for shard in shards for name, tensor in read_tensors(folder / shard).items()}
    elif (folder / PICKLED_WEIGHTS).is_file():
        try:
            # Tensors alone: nothing that a pickle could execute.
            found: Any = torch.load(folder / PICKLED_WEIGHTS, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise ValueError(f"{folder / PICKLED_WEIGHTS} is no whole file of tensors alone") from error
        pairs = found.items() if isinstance(found, dict) else [(None, found)]
        if not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in pairs):
            raise ValueError(f"{folder / PICKLED_WEIGHTS} holds something else than tensors with their names")
        tensors = found
    else:
        raise FileNotFoundError(f"{folder} has neither {MODEL_WEIGHTS} nor {PICKLED_WEIGHTS}")
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    named = {name: tensor for name, tensor in named.items() if not any(part in name for part in _NOT_READ)}
    return {name.replace(_FIRST_LAYER["eagle3"], _FIRST_LAYER["speculators"]): one for name, one in named.items()}


def _parse_speculators(config: Mapping[str, Any]) -> Eagle3Config:
    layer = config["transformer_layer_config"]
    if not isinstance(layer, Mapping):
        raise ValueError(f"its transformer_layer_config is {layer!r} and not the configuration of a layer")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    found = replace(_parse_layer(layer), target_layers=None if ids is None else tuple(ids), levels=_levels(config))
    return _with_flags(found, config)


def _levels(config: Mapping[str, Any]) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") or 3


def _parse_eagle3(config: Mapping[str, Any]) -> Eagle3Config:
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # An output of layer i is the input of layer i + 1.
    found = replace(_parse_layer(config), target_layers=None if ids is None else tuple(layer + 1 for layer in ids))
    return _with_flags(found, config)


def _with_flags(found: Eagle3Config, config: Mapping[str, Any]) -> Eagle3Config:
    return replace(
        found,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )


def _parse_layer(layer: Mapping[str, Any]) -> Eagle3Config:
    """What both layouts say in the fields of a transformers configuration."""
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"it has {layer['num_hidden_layers']} layers, and one is supported")
    if layer.get("hidden_act", "silu") != "silu":
        raise ValueError(f"its activation is {layer['hidden_act']}, and silu is supported")
    heads = layer["num_attention_heads"]
    windowed = layer.get("use_sliding_window", True) and "full_attention" not in (layer.get("layer_types") or [])
    return Eagle3Config(
        target_hidden_size=layer["hidden_size"],
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        attention_heads=heads,
        kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        vocab_size=layer["vocab_size"],
        target_layers=None,
        sliding_window=layer.get("sliding_window") if windowed else None,
        norm_eps=layer.get("rms_norm_eps", 1e-6),
        rotary=parse_rotary(layer),
        max_positions=layer.get("max_position_embeddings", 4096),
        attention_bias=bool(layer.get("attention_bias", False)),
        mlp_bias=bool(layer.get("mlp_bias", False)),
    )


def parse_rotary(layer: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' ``rope_parameters`` from its newer or its older fields."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    found = {"rope_theta": layer.get("rope_theta", 10_000.0), "rope_type": given.get("type", "default"), **given}
    found.pop("type", None)
    return found


def _completed(config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> Eagle3Config:
    """The configuration with what only the tensors tell."""
    if "fc.weight" not in tensors:
        raise ValueError("it has no tensor fc.weight, which joins the target's hidden states")
    features = _FEATURES if config.target_layers is None else len(config.target_layers)
    size, rest = divmod(tensors["fc.weight"].shape[-1], features)
    if rest:
        raise ValueError(f"fc.weight reads {tensors['fc.weight'].shape[-1]} channels, no multiple of {features} layers")
    return replace(config, target_hidden_size=size, qk_norm="layers.0.self_attn.q_norm.weight" in tensors)


def _load(model: DraftLayer, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    expected = {name: one for name, one in model.state_dict().items() if name != DRAFT_TO_TARGET}
    refuse_misfits(tensors, expected, f"the heads in {folder}")
    for name, tensor in tensors.items():
        refuse_not_finite(name, tensor, f" in {folder}")
    model.load_state_dict(tensors, assign=True, strict=False)


def save_draft_model(
    model: Eagle3DraftModel,
    directory: str | os.PathLike,
    *,
    layout: str = "speculators",
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint into ``directory``: ``model.safetensors`` and ``config.json``, whole or not at all.

    Args:
        layout: "speculators", which vLLM loads, or "eagle3", which SGLang loads.
        training: how it was trained, anything JSON can hold.

    Raises:
        OSError: the folder cannot be written.
        ValueError: the layout is unknown, or cannot hold such a model.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known layouts are {', '.join(LAYOUTS)}")
    if model.lm_head is None:
        raise ValueError(f"the draft model{model._where} has no language-model head, which other engines load with it")
    if model.target_layers is None:
        raise ValueError(f"the draft model{model._where} does not say which layers of the model it reads: name them")
    if layout == "eagle3" and (model.config.norm_before_residual or model.config.qk_norm):
        raise ValueError("the layout eagle3 has no draft models that normalise their residuals, queries or keys")
    tensors = {name.replace("layers.0.", _FIRST_LAYER[layout]): one for name, one in model.state_dict().items()}
    tensors.pop(DRAFT_TO_TARGET, None)
    if model.draft_to_target is not None:
        chosen = model.draft_to_target.cpu()
        tensors[DRAFT_TO_TARGET_OFFSETS] = chosen - torch.arange(len(chosen))
        tensors[_TARGET_TO_DRAFT] = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    write = _speculators_config if layout == "speculators" else _eagle3_config
    config = write(model, str(next(model.parameters()).dtype).removeprefix("torch."))
    if training is not None:
        config["training"] = dict(training)
    write_checkpoint(directory, MODEL_WEIGHTS, tensors, config)


def _layer_config(model: Eagle3DraftModel, dtype: str) -> dict[str, Any]:
    config = model.config
    fields = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": dict(config.rotary),
        # As older releases name it.
        "rope_theta": config.rotary["rope_theta"],
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if config.sliding_window is not None:
        fields |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
        fields["layer_types"] = ["sliding_attention"]
    return fields


def _speculators_config(model: Eagle3DraftModel, dtype: str) -> dict[str, Any]:
    config = model.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "model_type": "speculator_model",
        "dtype": dtype,
        "draft_vocab_size": model.draft_vocab_size or config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(model.target_layers or ()),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **_layer_config(model, dtype),
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.levels}],
            "verifier": {"architectures": [model.target_architecture], "name_or_path": model.base_model},
        },
    }


def _eagle3_config(model: Eagle3DraftModel, dtype: str) -> dict[str, Any]:
    config = model.config
    flags = ("norm_before_fc", "fc_norm", "norm_output")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layer_config(model, dtype),
        "draft_vocab_size": model.draft_vocab_size or config.vocab_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in model.target_layers or ()],
        },
        "base_model": model.base_model,
        **{flag: True for flag in flags if getattr(config, flag)},
    }
