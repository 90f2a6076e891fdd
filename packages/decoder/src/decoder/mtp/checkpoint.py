"""Built-in multi-token-prediction modules in a model's own folder, which transformers passes over when it loads it."""

import logging
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from decoder.draft_heads import refuse_not_finite
from decoder.heads_files import CONFIG, files_of_tensors, open_tensors, read_json, refuse_misfits
from decoder.model.wrapped import NAMES, language_config
from decoder.mtp.module import MtpModule

logger = logging.getLogger(__name__)

_NAMED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose module is called ``mtp``."""
_NUMBERED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families where it is a layer behind the last one."""
FAMILIES = (*_NAMED, *_NUMBERED)
"""transformers' names of the families whose modules are read."""
_PARTS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

_told: set[str] = set()


def holds_mtp(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the model in ``folder``, whose ``config.json`` holds ``config``, has a module that could be read."""
    return bool(_places(folder, config))


def usable_mtp(folder: Path) -> bool:
    """Whether the module in a model's folder can be read, as names and shapes tell; a fault is told once."""
    try:
        config = read_json(folder / CONFIG)
        if not holds_mtp(folder, config):
            return False
        _checked(folder, config, weights=False)
    except (OSError, ValueError) as error:
        if (folder / CONFIG).is_file() and str(folder) not in _told:
            _told.add(str(folder))
            logger.warning("decoding goes on without built-in heads: %s", error)
        return False
    return True


def read_mtp(folder: Path, config: Mapping[str, Any], source: str) -> MtpModule:
    """The module in a model's ``folder``, in the dtype it was saved in; ``source`` is what errors call it.

    Raises:
        OSError: a file is missing.
        ValueError: tensors are missing, of other shapes, or no finite numbers.
    """
    module, tensors = _checked(folder, config, weights=True)
    for name, tensor in tensors.items():
        refuse_not_finite(name, tensor, f" in {folder}")
    module.load_state_dict(tensors, assign=True)
    module.source = source
    return module.requires_grad_(False)


def module_config(config: PreTrainedConfig, experts: bool) -> PreTrainedConfig:
    """The configuration of a model that has the module's layer alone: full attention, with experts or without."""
    own = deepcopy(config)
    changes: dict[str, Any] = dict(num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=[])
    changes |= dict(first_k_dense_replace=int(not experts), decoder_sparse_step=1 if experts else 2)
    changes |= dict(mlp_layer_types=["sparse" if experts else "dense"])
    for name, value in changes.items():
        if hasattr(own, name):
            setattr(own, name, value)
    # It knows every dtype, and for a few tokens it is as fast as others.
    own._experts_implementation = "eager"
    return own


def _prefix(config: Mapping[str, Any]) -> str | None:
    """What the names of the module's tensors begin with; None for families whose modules are not read."""
    text = config.get("text_config") or config
    family = text.get("model_type")
    if family in _NUMBERED:
        return f"model.layers.{text.get('num_hidden_layers')}."
    return "mtp." if family in _NAMED else None


def _places(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """By the names of `MtpModule`, what tensors are called in the folder's files and which one they are in."""
    prefix, found = _prefix(config), {}
    if prefix is None:
        return {}
    for published, file in files_of_tensors(folder).items():
        name = published
        for pattern, alone in NAMES.items():
            name = re.sub(pattern, alone, name)
        if not name.startswith(prefix):
            continue
        name = name.removeprefix(prefix)
        # One module serves all levels: those for tokens further ahead are left.
        if name not in _SHARED and not re.match(r"layers\.[1-9]", name):
            part, _, leaf = name.rpartition(".")
            numbered = f"{_PARTS[part]}.{leaf}" if part in _PARTS else f"layers.0.{name}"
            found[name if prefix == "mtp." else numbered] = published, file
    return found


def _published_name(name: str, config: Mapping[str, Any]) -> str:
    """What a tensor of `MtpModule` is called in the model's files."""
    prefix, (part, _, leaf) = _prefix(config), name.rpartition(".")
    if prefix != "mtp.":
        published = {own: theirs for theirs, own in _PARTS.items()}
        name = f"{published[part]}.{leaf}" if part in published else name.removeprefix("layers.0.")
    return f"{prefix}{name}"


def _checked(folder: Path, config: Mapping[str, Any], weights: bool) -> tuple[MtpModule, dict[str, torch.Tensor]]:
    """The module without weights, and its tensors, whose names and shapes are right; on the meta device if no
    ``weights`` are asked for. Raises ValueError if they are not."""
    tensors: dict[str, torch.Tensor] = {}
    places = _places(folder, config)
    for file in sorted({file for _, file in places.values()}):
        with open_tensors(folder / file) as opened:
            held = set(opened.keys())
            for name, (published, its_file) in places.items():
                if its_file == file and published in held:
                    tensors[name] = opened.get_tensor(published) if weights else _like(opened.get_slice(published))
    experts = any(".mlp.experts." in name for name in tensors)
    try:
        language = language_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        with torch.device("meta"):
            module = MtpModule(module_config(language, experts))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the built-in heads in {folder} cannot be made: {error}") from error
    tensors = _stacked(tensors)
    found, expected = (
        {_published_name(name, config): tensor for name, tensor in each.items()}
        for each in (tensors, module.state_dict())
    )
    refuse_misfits(found, expected, f"the built-in heads in {folder}")
    return module, tensors


def _like(tensor: Any) -> torch.Tensor:
    return torch.empty(tensor.get_shape(), device="meta")


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with those of experts as transformers has them: one for all, [experts, ...]; cut ones as they are."""
    found: dict[str, torch.Tensor] = {}
    by_part: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            found[name] = tensor
        else:
            by_part.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
    for block in dict.fromkeys(block for block, _ in by_part):
        parts = {part: by_part.get((block, part), {}) for part in ("gate", "up", "down")}
        count = max(map(len, parts.values()))
        for part, each in parts.items():
            if each.keys() != set(range(count)):
                raise ValueError(f"the built-in heads lack {part}_proj of an expert of {count}")
        gate, up, down = ([parts[part][expert] for expert in range(count)] for part in ("gate", "up", "down"))
        found[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        found[f"{block}.down_proj"] = torch.stack(down)
    return found
