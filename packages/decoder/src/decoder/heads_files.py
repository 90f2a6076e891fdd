"""Files of a heads checkpoint, in a folder or a Hugging Face hub repository: finding, fetching and reading them."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from decoder.checks import check, parse_json

CONFIG = "config.json"
WEIGHTS = "heads.safetensors"
MODEL_WEIGHTS = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = "pytorch_model.bin"
PUBLISHED_NAME = re.compile(r"(?:model\.)?medusa_layers\.(.+)")
"""Names of the tensors of published TokenSwift heads, inside a whole model's files."""


def is_repository(name: str) -> bool:
    """Whether ``name`` has the form of a hub repository's, owner/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def local_folder(source: str, **from_hub: Any) -> Path:
    """The folder ``source``, or one with the files of the hub repository of that name that a heads checkpoint can have.

    Raises OSError when there is neither.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise NotADirectoryError(f"heads are read from a folder, and {source} is a file")
    # A mistyped name in an existing folder must not be looked up on the hub.
    if path.parent.is_dir() or not is_repository(source):
        raise FileNotFoundError(f"there is no folder of heads at {source}")
    folder = fetch(source, [CONFIG, WEIGHTS, MODEL_INDEX], **from_hub)
    if not (folder / WEIGHTS).is_file():
        # Published heads are in one or two of the shards of a whole model, which has many gigabytes.
        shards = published_files(folder) or [MODEL_WEIGHTS]
        folder = fetch(source, [CONFIG, MODEL_INDEX, *shards], **from_hub)
        if not any((folder / shard).is_file() for shard in shards):
            # Some EAGLE-3 checkpoints are pickled.
            folder = fetch(source, [CONFIG, PICKLED_WEIGHTS], **from_hub)
    return folder


def fetch(repository: str, names: list[str], **from_hub: Any) -> Path:
    """The files ``names`` of a hub repository, as far as it has them, in a folder of the hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=names, **from_hub))
    except Exception as error:
        # The hub client raises many unrelated types for one fact: it could not be read.
        reason = f"could not be read from the Hugging Face hub ({type(error).__name__})"
        raise OSError(f"there is no folder of heads at {repository}, and it {reason}") from error


def published_files(directory: Path) -> list[str]:
    """Names of the files in which a published checkpoint may hold head tensors."""
    index = directory / MODEL_INDEX
    if not index.is_file():
        return [MODEL_WEIGHTS] if (directory / MODEL_WEIGHTS).is_file() else []
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    return sorted({file for tensor, file in shards.items() if PUBLISHED_NAME.fullmatch(tensor)})


def read_json(path: Path) -> dict:
    """The object in a JSON file of a checkpoint. Raises OSError without the file, ValueError without an object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is not a heads checkpoint: it has no {path.name}")
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    check(content, str(path))
    return content


def write_checkpoint(
    directory: str | os.PathLike, weights: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """Write tensors to the file ``weights`` of a folder and the ``config`` beside it, each whole or not at all.

    Raises OSError if the folder cannot be written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as scratch:
        save_file(whole, Path(scratch, weights), metadata={"format": "pt"})
        Path(scratch, CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in (weights, CONFIG):
            os.replace(Path(scratch, name), directory / name)


def read_tensors(path: Path, pattern: re.Pattern | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file whose names match ``pattern`` whole, or all of them."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not pattern or pattern.fullmatch(name)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: copy or fetch it again") from error


def files_of_tensors(folder: Path) -> dict[str, str]:
    """By the name of each tensor of the model in a folder, its file; empty without files.

    Raises ValueError for damaged ones.
    """
    if (folder / MODEL_INDEX).is_file():
        files = read_json(folder / MODEL_INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ValueError(f"{folder / MODEL_INDEX} has no weight_map from tensors to files")
        return files
    if not (folder / MODEL_WEIGHTS).is_file():
        return {}
    with open_tensors(folder / MODEL_WEIGHTS) as file:
        return dict.fromkeys(file.keys(), MODEL_WEIGHTS)


def open_tensors(path: Path) -> Any:
    """A safetensors file of a model. Raises OSError where there is none, and ValueError for a damaged one."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}, which its index names")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: copy or fetch it again") from error


def refuse_misfits(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], which: str) -> None:
    """Raise ValueError unless the ``tensors`` of a checkpoint have the names and shapes of those that are expected.

    ``which`` names the checkpoint: "the heads in DIR".
    """
    for what, names in (("lack", expected.keys() - tensors.keys()), ("have extra", tensors.keys() - expected.keys())):
        if names:
            some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"{which} {what} tensors: {some}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, not {list(expected[name].shape)}"
            raise ValueError(f"tensor {name} of {which} has shape {shapes}")
