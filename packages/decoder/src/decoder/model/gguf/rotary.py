"""The rotary embeddings of a file, as in the configuration of the model's Hugging Face folder."""

from typing import Any

import numpy as np

from decoder.model.gguf.file import ELSE, GgufFile
from decoder.model.gguf.keys import needed_size, value_of

_BY_LENGTH = ("rope_factors_short.weight", "rope_factors_long.weight")
OF_ROTARY = ("rope_freqs.weight", *_BY_LENGTH)
"""Tensors that make rotary angles, and no parameters."""

_SCALING = "rope.scaling."


def rotary_of(file: GgufFile, head_size: int | None, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """The rotary parameters of heads of a size.

    Args:
        others: names of keys of scalings that the caller reads.

    Raises:
        ValueError: angles are scaled in a way that is not read.
    """
    base = value_of(file, "rope.freq_base", float, 10000.0) or 10000.0
    turned = value_of(file, "rope.dimension_count", int)
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if turned is not None and not (head_size and 2 <= turned <= head_size and turned % 2 == 0):
        key = f"{file.architecture}.rope.dimension_count"
        raise ValueError(f"{file.path} turns {turned} of {head_size} numbers of each head ({key}): {ELSE}")
    if head_size:  # some families' configurations would else take a part
        rotary["partial_rotary_factor"] = (turned or head_size) / head_size
    stray = [name for name in file.tensors if name.startswith("rope_f") and name not in OF_ROTARY]
    scaled = {key for key in file.metadata if key.startswith(f"{file.architecture}.{_SCALING}")}
    scaling = value_of(file, f"{_SCALING}type", str, "none")
    factor = value_of(file, f"{_SCALING}factor", float, 1.0) * value_of(file, "rope.scale_linear", float, 1.0)
    if not stray and all(name in file.tensors for name in _BY_LENGTH) and scaling in ("none", "longrope"):
        return rotary | _as_longrope(file, turned or head_size or 0)
    stray += [name for name in _BY_LENGTH if name in file.tensors]
    if scaling == "yarn" and not stray:
        return rotary | _as_yarn(file, scaled, others)
    if scaling == "linear" and factor and not stray and OF_ROTARY[0] not in file.tensors:
        return rotary | {"rope_type": "linear", "factor": factor}
    if scaling != "none" or factor not in (0.0, 1.0) or stray:
        raise ValueError(f"{file.path} scales its rotary embeddings in a way that is not read: {ELSE}")
    stretched = file.tensors.get(OF_ROTARY[0])
    return rotary if stretched is None else _as_llama3(file, rotary, turned or head_size or 0)


def rotary_by_layer(file: GgufFile, head_size: int | None, local: float | None = None) -> dict[str, Any]:
    """The rotary parameters by kind of layer, where those of windows are not scaled.

    Args:
        local: the base in layers of windows, where the file does not say; that of the others if it is None.
    """
    full = rotary_of(file, head_size)
    base = value_of(file, "rope.freq_base_swa", float, local or full["rope_theta"])
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": base}}


def _as_yarn(file: GgufFile, keys: set[str], others: tuple[str, ...]) -> dict[str, Any]:
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "factor": "factor"}
    read = {*names, "type", "original_context_length", "finetuned", *others}
    ones = {"attn_factor", "yarn_attn_factor", "yarn_ext_factor"}
    for key in sorted(keys):
        name = key.rpartition(".")[2]
        if name not in read and not (name in ones and value_of(file, _SCALING + name, float) == 1.0):
            raise ValueError(f"{file.path} scales its rotary embeddings in a way that is not read ({key}): {ELSE}")
    given = {ours: value_of(file, _SCALING + name, float) for name, ours in names.items()}
    if given["factor"] is None:
        raise ValueError(f"{file.path} has no {file.architecture}.{_SCALING}factor: {ELSE}")
    found = {name: value for name, value in given.items() if value is not None}
    length = needed_size(file, f"{_SCALING}original_context_length")
    return {"rope_type": "yarn", "original_max_position_embeddings": length, **found}


def _as_longrope(file: GgufFile, size: int) -> dict[str, Any]:
    """LongRoPE's two sets of factors, for texts up to the trained length and for longer ones."""
    sets = []
    for name in _BY_LENGTH:
        stored = file.tensors[name]
        factors = stored.blocks.reshape(-1).view("<f4") if stored.format.name == "F32" else np.zeros(0, np.float32)
        if len(factors) != size // 2 or not (np.isfinite(factors) & (factors > 0)).all():
            raise ValueError(f"{file.path} scales its rotary embeddings ({name}) in an unknown way: {ELSE}")
        sets.append([float(str(factor)) for factor in factors])
    length = needed_size(file, f"{_SCALING}original_context_length")
    found: dict[str, Any] = dict(short_factor=sets[0], long_factor=sets[1], original_max_position_embeddings=length)
    if (scaling := value_of(file, f"{_SCALING}attn_factor", float)) is not None:
        found["attention_factor"] = scaling
    return {"rope_type": "longrope", **found}


def _as_llama3(file: GgufFile, rotary: dict[str, Any], size: int) -> dict[str, Any]:
    """Llama 3's scaling of rotary frequencies, if it is what the factors in the file are.

    Raises ValueError if they are not.
    """
    stored = file.tensors[OF_ROTARY[0]]
    factors = stored.blocks.reshape(-1).view("<f4") if stored.format.name == "F32" else np.zeros(0, np.float32)
    scaled = rotary | {
        "rope_type": "llama3",
        "factor": float(factors.max(initial=1.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    lengths = 2 * np.pi * rotary["rope_theta"] ** (np.arange(0, size, 2) / max(size, 1))
    smooth = np.clip((8192 / lengths - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaled["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{file.path} scales its rotary embeddings ({OF_ROTARY[0]}) in an unknown way: {ELSE}")
    return scaled
