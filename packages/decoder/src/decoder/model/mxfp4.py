"""Folders of gpt-oss, whose experts have MXFP4 weights: the native library multiplies these blocks as they are.

A block is 32 weights of four bits, along the inputs, and the exponent of what they are multiplied by. In these folders
blocks and exponents are tensors of their own, two weights that follow each other share a byte, and rows of gates and of
what they gate stand in turn.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decoder.backends.native import library as native
from decoder.backends.native.experts import are_experts, gating_of
from decoder.backends.native.quantised import QuantisedMatrix, weight_formats
from decoder.backends.native.quantised_experts import QuantisedExperts
from decoder.heads_files import files_of_tensors, open_tensors
from decoder.model.quantising import MXFP4, note_weights

_MXFP4 = 39  # in GGUF files
_PART, _BYTES = 32, 16  # weights of a block, and the bytes that hold them
_NO_NUMBER = 255  # an exponent
_HALVES = ("blocks", "scales")


def has_mxfp4(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a model whose experts have MXFP4 weights in its files."""
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return config.model_type == "gpt_oss" and method == "mxfp4"


def keeps_mxfp4(config: PreTrainedConfig) -> bool:
    """Whether `read_mxfp4` reads the model of a configuration here."""
    whole_blocks = all(not getattr(config, name) % _PART for name in ("hidden_size", "intermediate_size"))
    return has_mxfp4(config) and native.available() and whole_blocks


def read_mxfp4(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a folder, on the CPU: experts in the folder's blocks, all else in ``dtype``.

    Raises:
        ValueError: tensors are missing, of other shapes, or no numbers.
        OSError: a file is missing.
    """
    with no_init_weights():
        # Memory that is reserved and never written to, for weights that are replaced below.
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=dtype)
    files = _Files(folder)
    for path, stack in list(model.named_modules()):
        if are_experts(stack):
            model.set_submodule(path, _experts(files, path, stack, dtype))
    held = {name for name, module in model.named_modules() if isinstance(module, QuantisedExperts)}
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        if path not in held:
            weight = files.whole(name, tuple(parameter.shape)).to(dtype)
            model.get_submodule(path).register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
    if config.tie_word_embeddings:
        model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    note_weights(model, MXFP4)
    return model.eval()


class _Files:
    """The tensors of a folder, read when they are asked for."""

    def __init__(self, folder: Path):
        self.folder, self._files = folder, files_of_tensors(folder)

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor. Raises ValueError if there is none of this name and ``shape``."""
        with self._opened(name) as file:
            self._check(file, name, shape)
            return file.get_tensor(name)

    def parts(self, name: str, shape: tuple[int, ...]) -> Any:
        """The tensor's [first, ...], [second, ...], one after the other."""
        with self._opened(name) as file:
            self._check(file, name, shape)
            held = file.get_slice(name)
            for number in range(shape[0]):
                yield held[number : number + 1][0]

    def _opened(self, name: str) -> Any:
        if name not in self._files:
            raise ValueError(f"the model {self.folder} lacks tensors that its configuration asks for: {name}")
        return open_tensors(self.folder / self._files[name])

    def _check(self, file: Any, name: str, shape: tuple[int, ...]) -> None:
        if name not in file.keys():  # noqa: SIM118
            raise ValueError(f"the model {self.folder} lacks tensors that its configuration asks for: {name}")
        if tuple(file.get_slice(name).get_shape()) != shape:
            raise ValueError(f"the model {self.folder} has tensors of other shapes than its configuration says: {name}")


class _Stack(NamedTuple):
    """The shape of a stack of experts' weights: [experts, out, in]."""

    experts: int
    outputs: int
    inputs: int


def _experts(files: _Files, path: str, like: Any, dtype: torch.dtype) -> QuantisedExperts:
    count, inputs, width = like.gate_up_proj.shape
    both = _matrices(files, f"{path}.gate_up_proj", _Stack(count, width, inputs), 2)
    [down] = _matrices(files, f"{path}.down_proj", _Stack(count, inputs, width // 2), 1)
    of_both = files.whole(f"{path}.gate_up_proj_bias", (count, width))
    of_down = files.whole(f"{path}.down_proj_bias", (count, inputs))
    matrices = {"gate": both[0], "up": both[1], "down": down}
    biases = {"gate": of_both[:, ::2], "up": of_both[:, 1::2], "down": of_down}
    biases = {part: bias.contiguous() for part, bias in biases.items()}
    return QuantisedExperts(like, gating_of(like), matrices, biases, dtype)


def _matrices(files: _Files, name: str, stack: _Stack, turns: int) -> list[list[QuantisedMatrix]]:
    """The matrices of all experts, for each of so many whose rows stand in ``turns``."""
    shape = stack.experts, stack.outputs, stack.inputs // _PART
    codes, exponents = (
        files.parts(f"{name}_{half}", (*shape, *([_BYTES] if half == "blocks" else []))) for half in _HALVES
    )
    found: list[list[QuantisedMatrix]] = [[] for _ in range(turns)]
    for of_codes, of_exponents in zip(codes, exponents, strict=True):
        if bool((of_exponents == _NO_NUMBER).any()):
            raise ValueError(f"the model {files.folder} holds values in {name}_scales that are no numbers")
        blocks = blocks_of(of_codes, of_exponents)
        for turn, matrices in enumerate(found):
            matrices.append(QuantisedMatrix(weight_formats()[_MXFP4], blocks[turn::turns]))
    return found


def blocks_of(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Blocks as in GGUF files, uint8 [out, bytes], of ``codes`` [out, blocks, 16] and ``exponents`` [out, blocks].

    There the first half of a block's weights are the lower bits of its bytes.
    """
    inputs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    lower, upper = inputs.chunk(2, -1)
    return torch.cat((exponents[..., None], lower | upper << 4), -1).flatten(1)
