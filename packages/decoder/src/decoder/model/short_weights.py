"""Weights of four or eight bits: what `decoder.load(..., dtype="int4")` and `dtype="int8"` make of a model.

A step of a small model takes as long as reading its weights. The weights change, so this is another model than the one
that was read, with a text of its own: plain decoding of it is what all methods reproduce.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.backends.native import library as native
from decoder.backends.native.int4 import GROUP, OUTPUTS, Int4Linear, fits_int4, int4_bytes
from decoder.backends.native.mxint8 import fits_mxint8, mxint8_bytes, rounded_to_mxint8

INT4, INT8 = "int4", "int8"
SHORT = (INT4, INT8)
"""The names of these dtypes."""

GGUF = "gguf"
"""The name of the dtype of a model whose weights are in the formats of the GGUF file that they were read from."""

_NAME = "_short_weights"  # of a model's attribute


def short_dtype(model: nn.Module) -> str | None:
    """Which of `SHORT` a model's weights are, or `GGUF`, if one of them."""
    return getattr(model, _NAME, None)


def mark_short(model: nn.Module, dtype: str) -> None:
    """Note of which such dtype a model's weights are."""
    setattr(model, _NAME, dtype)


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of a model by the name that `decoder.load` takes."""
    return short_dtype(model) or str(model.dtype).removeprefix("torch.")


def dtype_around() -> str:
    """The name of the dtype of all else in such a model: bfloat16 where the native library multiplies it."""
    return "bfloat16" if native.multiplies(torch.bfloat16) else "float32"


def make_short(model: PreTrainedModel, dtype: str, around: torch.dtype) -> None:
    """Round the weights of a model's linear layers, and make its other parameters ``around``.

    "int4" makes `Int4Linear` ones of them, and rounds the language-model head to MXINT8. "int8" rounds layers and head
    to MXINT8, which changes numbers and no module. Embeddings are the head's where they share its weights.

    Raises:
        ValueError: weights are not on a CPU, or `short_layers` raises it.
    """
    found = short_layers(model, dtype)
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ValueError(f"weights of dtype {dtype!r} are for a CPU: use device 'cpu' or another dtype")
    for path in found[INT4]:
        model.set_submodule(path, Int4Linear.of(model.get_submodule(path)))
    for path in found[INT8]:
        weight = model.get_submodule(path).get_parameter("weight")
        weight.data = rounded_to_mxint8(weight, around)
    for module in model.modules():
        parameters = () if isinstance(module, Int4Linear) else module.parameters(recurse=False)
        for parameter in parameters:
            parameter.data = parameter.data.to(around)
        # Buffers such as a rotary embedding's frequencies must not lose digits, which tell far positions apart.
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.promote_types(buffer.dtype, around))
    model.config.dtype = around
    mark_short(model, dtype)


def short_layers(model: PreTrainedModel, dtype: str) -> dict[str, list[str]]:
    """By "int4" and "int8", the paths of the layers that are held so. The model may be on the meta device.

    Raises:
        ValueError: the model has an adapter or is rounded already; or, for "int4", something else than a linear layer
            holds a matrix, or one that is no multiple of 32 inputs and 16 outputs.
    """
    if held := short_dtype(model):
        raise ValueError(f"the model's weights are {held} already")
    head, found = model.get_output_embeddings(), {INT4: [], INT8: _eight_bits(model, dtype)}
    for path, module in model.named_modules():
        if "base_layer" in module._modules:
            raise ValueError(f"{path} has an adapter, which rounding would spoil: merge it into the model first")
        if module is head or dtype == INT8 or isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1 and not fits_int4(module):
                shape = "x".join(map(str, parameter.shape))
                raise ValueError(
                    f"{path}.{name} ({type(module).__name__}, {shape}) cannot be held in four bits, which takes plain "
                    f"Linear layers with multiples of {GROUP} inputs and {OUTPUTS} outputs: use another dtype"
                )
        if type(module) is nn.Linear:
            found[INT4].append(path)
    return found


def short_bytes(model: PreTrainedModel, dtype: str | None = None) -> dict[str, int]:
    """By name, what passes read of the parameters that ``dtype`` shortens; of a model that has such weights, of those
    that are held in more. It may be on the meta device."""
    held = short_dtype(model)
    if held == GGUF:
        return {}  # its parameters are as many bytes as are read
    layers = {INT8: _eight_bits(model, held)} if held else short_layers(model, dtype) if dtype in SHORT else {}
    bytes_of = {INT4: int4_bytes, INT8: mxint8_bytes}
    return {
        f"{path}.weight": bytes_of[kind](model.get_parameter(f"{path}.weight").numel())
        for kind, paths in layers.items()
        for path in paths
    }


def _eight_bits(model: PreTrainedModel, dtype: str) -> list[str]:
    """The paths of the layers that are rounded to MXINT8."""
    head = model.get_output_embeddings()
    layers = (
        path for path, module in model.named_modules() if fits_mxint8(module) and (dtype == INT8 or module is head)
    )
    return list(layers)
