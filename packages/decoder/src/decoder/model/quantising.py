"""Weights of four or eight bits: what `decoder.load(..., dtype="int4")` and `dtype="int8"` make of a model.

A step of a small model takes as long as reading its weights. The weights change, so this is another model than the one
that was read, with a text of its own: plain decoding of it is what all methods reproduce.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.backends.native import library as native
from decoder.backends.native.quantised import QuantisedLinear, QuantisedMatrix, QuantisedMatrixModule, weight_formats
from decoder.backends.reference.mixers import mixers_of
from decoder.model.gguf.formats import FORMATS, unpacked
from decoder.model.rounding import BLOCK, rounded

INT4, INT8 = "int4", "int8"
QUANTISED_DTYPES = (INT4, INT8)
"""The names of these dtypes."""

GGUF = "gguf"
"""The name of the dtype of a model whose weights are in the formats of the GGUF file that they were read from."""

MXFP4 = "mxfp4"
"""That of a model whose experts are in the blocks of its folder."""

_FORMATS = {INT4: "Q4_1", INT8: "Q8_0"}
_OUTPUTS = 16  # that lie interleaved
_NAME = "_weights_format"  # of a model's attribute
_NUMBERS = {format.name: number for number, format in FORMATS.items()}


def weights_name(model: nn.Module) -> str | None:
    """Which of `QUANTISED_DTYPES` a model's weights are, or `GGUF` or `MXFP4`, if one of them."""
    return getattr(model, _NAME, None)


def note_weights(model: nn.Module, dtype: str) -> None:
    """Note of which such dtype a model's weights are."""
    setattr(model, _NAME, dtype)


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of a model by the name that `decoder.load` takes."""
    return weights_name(model) or str(model.dtype).removeprefix("torch.")


def dtype_around() -> str:
    """The name of the dtype of all else in such a model: bfloat16 where the native library multiplies it."""
    return "bfloat16" if native.multiplies(torch.bfloat16) else "float32"


def quantise(model: PreTrainedModel, dtype: str, around: torch.dtype) -> None:
    """Round the weights of a model's linear layers, and make its other parameters ``around``.

    "int4" rounds them to Q4_1 and the language-model head to Q8_0, "int8" all of them to Q8_0. They become
    `QuantisedLinear` ones; without the native library they stay what they are, with rounded weights.

    Raises:
        ValueError: weights are not on a CPU, or `quantised_layers` raises it.
    """
    found = quantised_layers(model, dtype)
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ValueError(f"weights of dtype {dtype!r} are for a CPU: use device 'cpu' or another dtype")
    for path, name in found.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        blocks, kind = rounded(layer.weight, name), weight_formats().get(_NUMBERS[name])
        if kind is None:
            weight = unpacked(blocks.numpy(), FORMATS[_NUMBERS[name]], around)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        else:
            bias = None if layer.bias is None else layer.bias.detach()
            model.set_submodule(path, QuantisedLinear(QuantisedMatrix(kind, blocks), bias, around))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not (name == "weight" and isinstance(module, QuantisedMatrixModule)):
                parameter.data = parameter.data.to(around)
        # Buffers such as a rotary embedding's frequencies must not lose digits, which tell far positions apart.
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.promote_types(buffer.dtype, around))
    model.config.dtype = around
    note_weights(model, dtype)


def quantised_layers(model: PreTrainedModel, dtype: str) -> dict[str, str]:
    """The layers that are rounded, by their paths, and to which format. The model may be on the meta device.

    Raises:
        ValueError: the model has an adapter or is rounded already; or, for "int4", something else than a linear layer
            holds a matrix, or one that is no multiple of 32 inputs and 16 outputs.
    """
    if held := weights_name(model):
        raise ValueError(f"the model's weights are {held} already")
    head, found = model.get_output_embeddings(), {}
    for path, module in model.named_modules():
        if "base_layer" in module._modules:
            raise ValueError(f"{path} has an adapter, which rounding would spoil: merge it into the model first")
        if module is head:
            # Models with recurrent layers ask for the dtype of its weights.
            if _fits(module, 1) and not mixers_of(list(model.modules())):
                found[path] = _FORMATS[INT8]
        elif _fits(module, _OUTPUTS):
            found[path] = _FORMATS[dtype]
        elif dtype == INT4 and not isinstance(module, nn.Embedding):
            _refuse_matrices(path, module)
    return found


def _fits(module: nn.Module, outputs: int) -> bool:
    """Whether a module is a linear layer with whole blocks of inputs and a multiple of so many ``outputs``."""
    return type(module) is nn.Linear and not module.in_features % BLOCK and not module.out_features % outputs


def _refuse_matrices(path: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim > 1:
            shape = "x".join(map(str, parameter.shape))
            raise ValueError(
                f"{path}.{name} ({type(module).__name__}, {shape}) cannot be held in four bits, which takes plain "
                f"Linear layers with multiples of {BLOCK} inputs and {_OUTPUTS} outputs: use another dtype"
            )


def quantised_bytes(model: PreTrainedModel, dtype: str | None) -> dict[str, int]:
    """By name, what the parameters take that ``dtype`` shortens, if it does. The model may be on the meta device."""
    found = {}
    for path, name in (quantised_layers(model, dtype) if dtype in QUANTISED_DTYPES else {}).items():
        format = FORMATS[_NUMBERS[name]]
        outputs, inputs = model.get_parameter(f"{path}.weight").shape
        found[f"{path}.weight"] = -(-outputs // _OUTPUTS) * _OUTPUTS * inputs // format.elements * format.bytes
    return found
