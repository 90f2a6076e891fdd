"""Assistants in GGUF files, as llama.cpp's converter writes them: without clusters of the vocabulary."""

from pathlib import Path

import torch
from torch import nn

from decoder.assistant.checkpoint import load
from decoder.assistant.model import AssistantModel
from decoder.backends.native.quantised import QuantisedLinear, QuantisedMatrix, weight_formats
from decoder.heads_files import refuse_misfits
from decoder.model.gguf import GgufFile, open_checked
from decoder.model.gguf.architectures import architecture_of
from decoder.model.gguf.config import read_config
from decoder.model.gguf.file import ELSE, FETCH, named
from decoder.model.gguf.rotary import OF_ROTARY
from decoder.model.gguf.sources import LAYER, Source
from decoder.model.gguf.weights import parameter


def is_assistant_file(path: Path) -> bool:
    """Whether a GGUF file says that it is an assistant."""
    try:
        return architecture_of(open_checked(path)).drafts
    except (OSError, ValueError):
        return False  # whoever reads it says why


def read_assistant_of_file(path: Path) -> AssistantModel:
    """The assistant in a file, whose matrices stay in the file's formats where the native library is there.

    Raises:
        OSError: the file is missing.
        ValueError: it is none, or tensors are missing, of other shapes, or no finite numbers.
    """
    file = open_checked(path)
    config = read_config(file)
    with torch.device("meta"):
        model = AssistantModel(config, config.backbone_hidden_size)
    names = _names(file)
    shapes = {ours: torch.empty(file.tensors[name].shape, device="meta") for ours, name in names.items()}
    refuse_misfits(shapes, model.state_dict(), f"the assistant in {path}")
    for ours, name in list(names.items()):
        place, _, leaf = ours.rpartition(".")
        kind = weight_formats().get(file.tensors[name].format.number)
        if kind is None or leaf != "weight" or not isinstance(model.get_submodule(place), nn.Linear):
            continue
        matrix = QuantisedMatrix(kind, file.tensors[name].blocks)
        if not matrix.finite:
            raise ValueError(f"{path} holds values in {name} that are no numbers: {FETCH}, or {ELSE}")
        model.set_submodule(place, QuantisedLinear(matrix, None, torch.float32))
        del names[ours]
    whole = any(file.tensors[name].format.name == "F32" for ours, name in names.items() if ours.endswith("proj.weight"))
    dtype = torch.float32 if whole else torch.bfloat16
    load(model, {ours: parameter(file, Source((name,)), dtype) for ours, name in names.items()}, path)
    file.release()
    model.source = str(path)
    return model


def _names(file: GgufFile) -> dict[str, str]:
    """By the names of an assistant's parameters, those of the file's tensors."""
    architecture, found = architecture_of(file), {}
    for name in file.tensors:
        layer = LAYER.fullmatch(name)
        number, own = (None, name) if layer is None else layer.groups()
        if own in OF_ROTARY:
            continue
        ours = architecture.parameter(number, own) or architecture.parameter(None, own)
        if ours is None:
            raise ValueError(f"{file.path} has a tensor {named(name)}, unknown in {file.architecture} models: {ELSE}")
        found[ours] = name
    return found
