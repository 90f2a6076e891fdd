"""Draft heads of any kind: linear ones, draft models of EAGLE-3 and DFlash, assistants, and built-in modules."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.assistant.checkpoint import is_assistant, read_assistant
from decoder.assistant.gguf import is_assistant_file, read_assistant_of_file
from decoder.assistant.model import KIND as ASSISTANT
from decoder.assistant.model import AssistantModel
from decoder.dflash.checkpoint import is_dflash, read_dflash
from decoder.dflash.draft_model import KIND as DFLASH
from decoder.draft_heads import KINDS as LINEAR_KINDS
from decoder.draft_heads import DraftHeads
from decoder.draft_layer import DraftLayer
from decoder.eagle3.checkpoint import is_eagle3, read_draft_model, verifier_of
from decoder.eagle3.draft_model import KIND as EAGLE3
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.heads_files import CONFIG, MODEL_INDEX, fetch, local_folder, read_json
from decoder.model.gguf import is_gguf
from decoder.mtp.checkpoint import holds_mtp, read_mtp, usable_mtp
from decoder.mtp.gguf import read_mtp_of_file, usable_in_file
from decoder.mtp.module import KIND as MTP
from decoder.mtp.module import MtpModule

Heads = DraftHeads | DraftLayer | AssistantModel
TrainedHeads = DraftHeads | Eagle3DraftModel
"""Heads that have a folder of their own."""
HeadsLike = Heads | str | os.PathLike

KINDS = (*LINEAR_KINDS, EAGLE3, DFLASH, ASSISTANT, MTP)


def kind_in(folder: str | os.PathLike) -> str | None:
    """The kind of the heads in a folder or GGUF file; None where there are none that are known."""
    if is_gguf(folder):
        return ASSISTANT if is_assistant_file(Path(folder)) else MTP if usable_in_file(Path(folder)) else None
    try:
        config = read_json(Path(folder) / CONFIG)
    except (OSError, ValueError):
        return None
    if is_eagle3(config):
        return EAGLE3
    if is_dflash(config):
        return DFLASH
    if is_assistant(config):
        return ASSISTANT
    kind = config.get("kind")
    return kind if kind in LINEAR_KINDS else MTP if usable_mtp(Path(folder)) else None


def base_model_in(folder: str | os.PathLike) -> str | None:
    """The model that the heads in a folder were trained on, as their configuration names it; None where it does not."""
    try:
        config = read_json(Path(folder) / CONFIG)
        name = verifier_of(config).get("name_or_path") or config.get("base_model")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def load_heads(source: str | os.PathLike, **from_hub: Any) -> Heads:
    """The heads in a folder, GGUF file or Hugging Face hub repository, whatever their kind; arguments of
    `DraftHeads.from_pretrained`.

    Raises:
        OSError: there is no such folder, file or reachable hub repository.
        ValueError: the contents are not heads of a known format.
    """
    if is_gguf(source):
        return (read_assistant_of_file if is_assistant_file(Path(source)) else read_mtp_of_file)(Path(source))
    folder = local_folder(str(source), **from_hub)
    config = read_json(folder / CONFIG)
    kinds = ((is_eagle3, read_draft_model), (is_dflash, read_dflash), (is_assistant, read_assistant))
    known = next((read for holds, read in kinds if holds(config)), None)
    read = known or (read_mtp if holds_mtp(folder, config) else DraftHeads.read)
    return read(folder, config, str(source))


def load_built_in(model: str | os.PathLike, **from_hub: Any) -> MtpModule:
    """The multi-token-prediction module in the folder, GGUF file or hub repository of a model.

    Raises:
        OSError: there is no such folder, file or reachable hub repository.
        ValueError: the model has none that can be read.
    """
    if is_gguf(model):
        return read_mtp_of_file(Path(model))
    folder = Path(model)
    if not folder.exists():
        folder = fetch(str(model), [CONFIG, MODEL_INDEX, "*.safetensors"], **from_hub)
    config = read_json(folder / CONFIG) if folder.is_dir() else {}
    if not holds_mtp(folder, config):
        raise ValueError(f"{model} has no multi-token-prediction module that can be read: leave out heads {MTP}")
    return read_mtp(folder, config, str(model))


def load_trained(source: str | os.PathLike, **from_hub: Any) -> TrainedHeads:
    """`load_heads`, but of heads that have a folder of their own alone. Raises ValueError for others, too."""
    heads = load_heads(source, **from_hub)
    if not isinstance(heads, TrainedHeads):
        raise ValueError(f"{source} holds heads of kind {heads.kind}, and none that heads-train trains")
    return heads


def check_heads(heads: object) -> None:
    """Raise ValueError for a value that cannot stand for draft heads."""
    for one in heads.values() if isinstance(heads, Mapping) else [] if heads is None else [heads]:
        if not isinstance(one, HeadsLike):
            raise ValueError(
                f"heads must be DraftHeads, a checkpoint folder or hub id, or {{kind: any of these}}, "
                f"not {type(one).__name__}"
            )
