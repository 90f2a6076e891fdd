"""Models in GGUF files, the format of llama.cpp: header, tokenizer, configuration and weights, by code of our own."""

import os
from pathlib import Path
from typing import Any

from decoder.model.gguf.file import ELSE, GgufFile, open_gguf

SUFFIX = ".gguf"

__all__ = ["GgufFile", "is_gguf", "open_checked", "open_gguf"]


def is_gguf(source: Any) -> bool:
    """Whether ``source`` is the name of a GGUF file."""
    return str(source).lower().endswith(SUFFIX)


def open_checked(source: str | os.PathLike) -> GgufFile:
    """The file at ``source``, if all that is in it can be read.

    Raises:
        OSError: there is no such file.
        ValueError: see `GgufFile.read`; or it is a part of several, or a quantisation cannot be unpacked.
    """
    file = open_gguf(Path(source))
    if (parts := file.get("split.count", int, 0)) and parts > 1:
        raise ValueError(f"{file.path} is one of {parts} parts of a model: merge them with llama-gguf-split --merge")
    for name, tensor in file.tensors.items():
        if fault := tensor.format.fault():
            raise ValueError(f"{file.path} has {name} in the quantisation {tensor.format.name}, {fault}: {ELSE}")
    return file
