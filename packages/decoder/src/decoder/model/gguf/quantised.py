"""The model of a file whose weights stay in the file's own formats, as the native library multiplies them."""

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decoder.kernels.quantised import (
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedMatrix,
    WeightFormat,
    weight_formats,
    width,
)
from decoder.model.gguf.architectures import Source, sources
from decoder.model.gguf.file import ELSE, FETCH, GgufFile
from decoder.model.gguf.weights import parameter, rows_in_order
from decoder.model.short_weights import GGUF, mark_short


def holds_quantised(file: GgufFile) -> bool:
    """Whether some matrix of a file can stay in its format here."""
    return any(_kind_of(file, name) is not None for name, one in file.tensors.items() if len(one.shape) == 2)


def quantised_model(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype, **kwargs) -> PreTrainedModel:
    """The model, on the CPU, with linear layers and embeddings in the file's formats and all else in ``dtype``.

    Args:
        **kwargs: for the making of the model, such as ``attn_implementation``.

    Raises:
        ValueError: weights are no numbers, are missing, or are none of this model's.
    """
    with no_init_weights():
        # Memory that is reserved and never written to, for weights that are replaced below.
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=dtype, **kwargs)
    found = sources(file, config)
    plain: dict[str, torch.Tensor] = {}
    for name, source in found.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path) if leaf == "weight" else None
        kind = None if module is None else _stays(file, source, module, path)
        if kind is None:
            plain[name] = parameter(file, source, dtype)
        elif isinstance(module, nn.Embedding):
            model.set_submodule(path, QuantisedEmbedding(_matrix(file, source, kind, module.weight.shape), dtype))
        else:
            biased = getattr(module, "bias", None) is not None
            bias = torch.zeros(module.out_features, dtype=dtype) if biased else None
            matrix = _matrix(file, source, kind, module.weight.shape)
            model.set_submodule(path, QuantisedLinear(matrix, bias, dtype))
    _tie(model, config, dtype)
    _fill(model, plain, file)
    model.generation_config = GenerationConfig.from_model_config(config)
    mark_short(model, GGUF)
    return model.eval()


def _kind_of(file: GgufFile, name: str) -> WeightFormat | None:
    return weight_formats().get(file.tensors[name].format.number)


def _stays(file: GgufFile, source: Source, module: nn.Module, path: str) -> WeightFormat | None:
    """The format of a matrix that can stay in it."""
    if len(source.tensors) > 1 or source.offset or source.transposed or type(module) not in (nn.Linear, nn.Embedding):
        return None
    # Layers that are joined need whole panels; the head is alone.
    if isinstance(module, nn.Linear) and module.out_features % width() and path != "lm_head":
        return None
    return _kind_of(file, source.tensors[0])


def _matrix(file: GgufFile, source: Source, kind: WeightFormat, shape: torch.Size) -> QuantisedMatrix:
    name = source.tensors[0]
    tensor = file.tensors[name]
    if tensor.shape != tuple(shape):
        sizes, needed = ("x".join(map(str, one)) for one in (tensor.shape, shape))
        raise ValueError(f"{file.path} has {name} of {sizes} numbers, and {needed} are needed: {FETCH}, or {ELSE}")
    blocks = rows_in_order(tensor.blocks, source.heads)
    # A copy, since PyTorch would warn of memory that cannot be written to.
    matrix = QuantisedMatrix(kind, torch.from_numpy(blocks.copy()))
    if not matrix.finite:
        raise ValueError(f"{file.path} holds values in {name} that are no numbers: {FETCH}, or {ELSE}")
    return matrix


def _tie(model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Give the language-model head the embeddings' weights, where they are the same."""
    embeddings = model.get_input_embeddings()
    if not config.tie_word_embeddings or not isinstance(embeddings, QuantisedEmbedding):
        return
    head = QuantisedLinear(embeddings, None, dtype)
    model.set_output_embeddings(head)


def _fill(model: PreTrainedModel, plain: dict[str, torch.Tensor], file: GgufFile) -> None:
    """Put the parameters that are plain numbers in their places."""
    tied = isinstance(model.get_input_embeddings(), nn.Embedding) and model.config.tie_word_embeddings
    held = {name for name, one in model.named_parameters() if one.dtype != torch.uint8}
    if tied:
        held.discard("lm_head.weight")
    if missing := sorted(held - plain.keys()):
        raise ValueError(f"the model {file.path} lacks weights: {missing[0]}")
    for name, weight in plain.items():
        wanted = model.get_parameter(name)
        if wanted.shape != weight.shape:
            raise ValueError(f"the model {file.path} has weights of the wrong shape: {name}")
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
    if tied:
        model.tie_weights()
