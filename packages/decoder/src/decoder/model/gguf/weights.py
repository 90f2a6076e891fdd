"""The weights of a file, unpacked into a model's parameters of the wanted dtype, one tensor at a time."""

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decoder.model.gguf.architectures import Source, sources
from decoder.model.gguf.file import ELSE, FETCH, GgufFile
from decoder.model.gguf.formats import unpacked


def state_dict(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters of the model, each of ``dtype``.

    Raises ValueError, with the tensor, for what cannot be unpacked, is unknown or is no number.
    """
    made = {name: parameter(file, source, dtype) for name, source in sources(file, config).items()}
    for name, weight in made.items():
        # A layer of one output, which the file has as a list.
        if name.endswith("shared_expert_gate.weight"):
            made[name] = weight.view(1, -1)
    return made


def check_shapes(file: GgufFile, model: PreTrainedModel) -> None:
    """Refuse a file whose tensors are not those of its configuration, before any is unpacked.

    Args:
        model: the model of the configuration, which may be on the meta device.

    Raises:
        ValueError: it has too few, or of other sizes; both are named.
    """
    made = sources(file, model.config)
    tied = set(model.all_tied_weights_keys)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name not in made:
            if name in tied:
                continue
            raise ValueError(f"{file.path} lacks a tensor that its configuration asks for: {name}")
        source = made[name]
        shapes = [file.tensors[each].shape for each in source.tensors]
        joined = (*shapes[0][:-2], sum(shape[-2] for shape in shapes), shapes[0][-1]) if len(shapes) > 1 else shapes[0]
        expected = tuple(weight.T.shape if source.transposed else weight.shape)
        if joined != expected and (1, *joined) != expected:
            sizes, others = "x".join(map(str, joined)), "x".join(map(str, expected))
            raise ValueError(
                f"{file.path} has a tensor {source.tensors[0]} of {sizes} numbers, and its configuration says {others}"
            )


def parameter(file: GgufFile, source: Source, dtype: torch.dtype) -> torch.Tensor:
    """One parameter of a model."""
    parts = []
    for name in source.tensors:
        tensor = file.tensors[name]
        # A bias has as many rows as numbers.
        blocks = tensor.blocks if len(tensor.shape) > 1 else tensor.blocks.reshape(-1, tensor.format.bytes)
        blocks = rows_in_order(blocks, source.heads)
        # What is added to norms is taken away before rounding.
        exact = torch.float32 if source.offset else dtype
        try:
            parts.append(unpacked(blocks, tensor.format, exact).view(tensor.shape))
        except FloatingPointError as error:
            raise ValueError(f"{file.path} holds values in {name} that are no numbers: {FETCH}, or {ELSE}") from error
        file.release(name)
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
    if source.offset:
        joined = (joined - source.offset).to(dtype)
    return joined.T.contiguous() if source.transposed else joined


def rows_in_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in transformers' order, where those of the two halves of a head stand behind each other.

    Args:
        rows: [rows, ...], in llama.cpp's order if ``heads`` is not 0.
    """
    if not heads or len(rows) % (2 * heads):
        return rows
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
