"""Keys of a file behind its architecture's name, checked as they are read."""

from typing import Any

import numpy as np

from decoder.model.gguf.file import ELSE, GgufFile


def value_of(file: GgufFile, key: str, kind: Any, default: Any = None) -> Any:
    """The value of a key, as `GgufFile.get`. Raises ValueError for a number that is negative or infinite, too."""
    full = f"{file.architecture}.{key}"
    value = file.get(full, kind, default)
    if not isinstance(value, float):
        return value
    if not 0 <= value < np.finfo(np.float32).max:
        raise ValueError(f"{file.path} says that its {full} is {value}: {ELSE}")
    # The file stores float32: 1e-05 is read as 9.999999747378752e-06.
    return float(str(np.float32(value)))


def size_of(file: GgufFile, key: str, some_layers: bool = False) -> int | None:
    """A size, at least 1; None if the file does not say.

    Args:
        some_layers: whether a list of sizes by layer is read, too, with 0 where a layer has no such part.

    Raises:
        ValueError: it is none, or layers have different ones.
    """
    full = f"{file.architecture}.{key}"
    size = file.metadata.get(full)
    if isinstance(size, np.ndarray):
        of_layers = set(size.tolist()) - ({0} if some_layers else set())
        if not some_layers or len(of_layers) != 1:
            raise ValueError(f"{file.path} has a {full} of its own for each layer, which is not read: {ELSE}")
        size = of_layers.pop()
    else:
        size = file.get(full, int)
    # Far beyond any model, and small enough for products of four to be numbers of 64 bits.
    most = {"context_length": 2**31, "expert_count": 2**12, "expert_used_count": 2**12}.get(key, 2**18)
    if size is not None and not 1 <= size <= most:
        raise ValueError(f"{file.path} says that its {full} is {size}: {ELSE}")
    return size


def needed_size(file: GgufFile, key: str) -> int:
    """`size_of` what a model of this architecture has. Raises ValueError, with the key, if the file does not say."""
    size = size_of(file, key)
    if size is None:
        raise ValueError(f"{file.path} has no {file.architecture}.{key}: {ELSE}")
    return size
