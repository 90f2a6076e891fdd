"""The model of a file whose weights stay in the file's own formats, as the native library multiplies them."""

import re

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decoder.backends.native.experts import are_experts, gating_of
from decoder.backends.native.quantised import (
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedMatrix,
    WeightFormat,
    weight_formats,
    width,
)
from decoder.backends.native.quantised_experts import PARTS, QuantisedExperts
from decoder.model.gguf.file import ELSE, FETCH, GgufFile
from decoder.model.gguf.sources import Source
from decoder.model.gguf.weights import check_shapes, parameter, sources
from decoder.model.quantising import GGUF, note_weights

_KEPT = (nn.Linear, nn.Embedding)
# By its name, as few models have it and their modules are slow to import.
_SCALED = re.compile(r"Gemma\w*TextScaledWordEmbedding")


def holds_quantised(file: GgufFile) -> bool:
    """Whether some matrix of a file can stay in its format here."""
    return any(_kind_of(file, name) is not None for name, one in file.tensors.items() if len(one.shape) == 2)


def quantised_model(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model, on the CPU: linear layers, experts and embeddings in the file's formats, all else in ``dtype``.

    Raises:
        ValueError: weights are no numbers, or see `check_shapes`.
    """
    with no_init_weights():
        # Memory that is reserved and never written to, for weights that are replaced below.
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=dtype)
    check_shapes(file, model)
    plain: dict[str, torch.Tensor] = {}
    given = sources(file, config)
    for path, stack in list(model.named_modules()):
        if are_experts(stack):
            _keep_experts(file, model, path, given, dtype)
    for name, source in given.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path) if leaf == "weight" else None
        kind = _kept(file, source, module, path)
        if kind is None or module is None:
            plain[name] = parameter(file, source, dtype)
        elif isinstance(module, nn.Linear):
            # The bias comes with what is plain.
            bias = None if module.bias is None else torch.zeros(module.out_features)
            model.set_submodule(path, QuantisedLinear(_matrix(file, source, kind), bias, dtype))
        else:
            scale = getattr(module, "scalar_embed_scale", 1.0)
            model.set_submodule(path, QuantisedEmbedding(_matrix(file, source, kind), dtype, scale))
    file.stop_packing()
    _tie(model, config, dtype)
    _fill(model, plain)
    file.release()
    model.generation_config = GenerationConfig.from_model_config(config)
    note_weights(model, GGUF)
    return model.eval()


def _keep_experts(
    file: GgufFile, model: PreTrainedModel, path: str, given: dict[str, Source], dtype: torch.dtype
) -> None:
    """Put a stack of experts in its place, and take its parameters from what is ``given``, if formats can stay."""
    names = {name: f"{path}.{name}" for name in model.get_submodule(path)._parameters}
    gated = "gate_up_proj" in names
    tensors = (*given[names["gate_up_proj" if gated else "up_proj"]].tensors, *given[names["down_proj"]].tensors)
    if any(_kind_of(file, name) is None for name in tensors) or (not gated and "down_proj_bias" in names):
        return
    of_parts = PARTS if gated else (PARTS[0], PARTS[-1])
    # Gates and what they gate may be one tensor, one behind the other.
    counts = (2, 1) if len(tensors) < len(of_parts) else (1,) * len(of_parts)
    each = [own for name, count in zip(tensors, counts, strict=True) for own in _matrices(file, name, count)]
    matrices = dict(zip(of_parts, each, strict=True))
    biases: dict[str, torch.Tensor] = {}
    if gated and "down_proj_bias" in names:
        of_biases = (*given[names["gate_up_proj_bias"]].tensors, *given[names["down_proj_bias"]].tensors)
        biases = {
            part: parameter(file, Source((name,)), torch.float32) for part, name in zip(PARTS, of_biases, strict=True)
        }
    stack = model.get_submodule(path)
    model.set_submodule(path, QuantisedExperts(stack, gating_of(stack), matrices, biases, dtype))
    for name in names.values():
        del given[name]


def _matrices(file: GgufFile, name: str, parts: int) -> list[list[QuantisedMatrix]]:
    """Of each of the ``parts`` of the rows of a tensor [experts, out, in], each expert's."""
    kind, tensor = _kind_of(file, name), file.tensors[name]
    assert kind is not None
    blocks = tensor.blocks.reshape(tensor.shape[0], parts, tensor.shape[1] // parts, -1)
    matrices = [[QuantisedMatrix(kind, own) for own in blocks[:, part]] for part in range(parts)]
    if not all(matrix.finite for of_part in matrices for matrix in of_part):
        raise ValueError(f"{file.path} holds values in {name} that are no numbers: {FETCH}, or {ELSE}")
    file.release(name)
    return matrices


def _kind_of(file: GgufFile, name: str) -> WeightFormat | None:
    return weight_formats().get(file.tensors[name].format.number)


def _kept(file: GgufFile, source: Source, module: nn.Module | None, path: str) -> WeightFormat | None:
    """The format of the matrix of a module that can stay in it."""
    if source.number or source.transposed or source.join or len({_kind_of(file, name) for name in source.tensors}) > 1:
        return None
    if type(module) not in _KEPT and not _SCALED.fullmatch(type(module).__name__):
        return None
    # Layers that are joined need whole panels; the head is alone.
    if isinstance(module, nn.Linear) and module.out_features % width() and path != "lm_head":
        return None
    kind = _kind_of(file, source.tensors[0])
    if kind is None or source.columns is None or _blocks_in_order(file, source, kind) is not None:
        return kind
    return None


def _blocks_in_order(file: GgufFile, source: Source, kind: WeightFormat) -> np.ndarray | None:
    """The order of the blocks of a row whose columns are in another one in the file; None if it parts blocks."""
    assert source.columns is not None
    columns = source.columns(file.tensors[source.tensors[0]].shape[-1]).reshape(-1, kind.inputs)
    first = columns[:, 0]
    whole = (columns == first[:, None] + np.arange(kind.inputs)).all() and not (first % kind.inputs).any()
    return first // kind.inputs if whole else None


def _matrix(file: GgufFile, source: Source, kind: WeightFormat) -> QuantisedMatrix:
    first, *others = source.tensors
    blocks = file.tensors[first].blocks
    if others:
        blocks = np.concatenate([file.tensors[name].blocks for name in source.tensors])
    if source.part is not None:
        blocks = blocks.reshape(file.tensors[first].shape[0], -1, blocks.shape[-1])[source.part]
    as_it_is = source.rows is None and source.columns is None and source.part is None and not others
    matrix = file.packed(first) if as_it_is else None
    if source.rows is not None:
        blocks = blocks[source.rows(len(blocks))]
    if source.columns is not None:
        blocks = blocks.reshape(len(blocks), -1, kind.bytes_of_block)[:, _blocks_in_order(file, source, kind)]
        blocks = blocks.reshape(len(blocks), -1)
    if matrix is None:
        matrix = QuantisedMatrix(kind, blocks)
        for name in source.tensors:
            file.release(name)
    if not matrix.finite:
        raise ValueError(f"{file.path} holds values in {first} that are no numbers: {FETCH}, or {ELSE}")
    return matrix


def _tie(model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Give the language-model head the embeddings' weights, where they are the same."""
    embeddings = model.get_input_embeddings()
    if config.tie_word_embeddings and isinstance(embeddings, QuantisedEmbedding):
        model.set_output_embeddings(QuantisedLinear(embeddings.matrix, None, dtype))


def _fill(model: PreTrainedModel, plain: dict[str, torch.Tensor]) -> None:
    """Put the parameters that are plain numbers in their places."""
    for name, weight in plain.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = weight
        else:
            module.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
    if "model.embed_tokens.weight" in plain and model.config.tie_word_embeddings:
        model.tie_weights()
