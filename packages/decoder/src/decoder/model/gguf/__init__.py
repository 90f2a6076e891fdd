"""Reads models from GGUF files, the format of llama.cpp, through transformers, and corrects what it gets wrong.

transformers turns the quantised blocks into plain weights. This module adds what it leaves out: pre-tokenizers that it
does not know, end tokens besides the first, and a check that the file is complete. Files that transformers would read
wrongly without an error are refused.
"""

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SUFFIX = ".gguf"
INSTALL = 'install the extra "gguf" of tokenswift-decoder (pip install gguf accelerate)'
_ELSE = "give the model's Hugging Face folder or hub id instead"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PREFIX = "tokenizer.ggml."
# Longer arrays, such as those of the vocabulary, are skipped, since they are not needed here.
_LONG = 64
# What must be at least one.
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_LAYER = re.compile(r"blk\.(\d+)\.")
# Keys for the tokens at which a text, a turn or a message ends.
_ENDS = tuple(f"{_PREFIX}{name}_token_id" for name in ("eos", "eot", "eom"))


def _digits_apart() -> PreTokenizer:
    """SmolLM's pre-tokenizer: every digit is split off, and the rest is split as GPT-2 does."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": _digits_apart,
    "gpt-2": _gpt2,
}
"""By their names in files, the pre-tokenizers of byte-level tokenizers that transformers does not know."""


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file: all that is before its weights.

    Attributes:
        path: the file.
        metadata: its keys and values; for a long array only its length.
        tensors: name -> (number of its type, number of elements, offset in the data).
        data_start: the offset in the file at which the data begins.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, int, int]]
    data_start: int

    @classmethod
    def read(cls, path: Path) -> "Header":
        """Read the header. Raises ValueError if this is not a GGUF file, or it ends within its header."""
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is no GGUF file: {_ELSE}")
            try:
                version, tensor_count, count = _unpack(file, "IQQ")
                if version not in (2, 3):
                    raise ValueError(f"{path} is of GGUF version {version}, and 2 and 3 are read: convert it anew")
                metadata = {}
                for _ in range(count):
                    key = _string(file)
                    metadata[key] = _value(file, *_unpack(file, "I"))
                tensors = {}
                for _ in range(tensor_count):
                    name = _string(file)
                    sizes = _unpack(file, f"{_unpack(file, 'I')[0]}Q")
                    kind, offset = _unpack(file, "IQ")
                    tensors[name] = (kind, prod(sizes), offset)
            except (struct.error, MemoryError, OverflowError, UnicodeDecodeError, KeyError) as error:
                raise ValueError(_cut_short(path)) from error
            header = cls(path, metadata, tensors, file.tell())
            return replace(header, data_start=-(-file.tell() // header.alignment) * header.alignment)

    def check(self) -> None:
        """Refuse files that cannot be read completely and correctly, before any weights are read.

        Raises:
            ValueError: a quantisation is unknown, rotary embeddings are scaled, or the file is incomplete.
        """
        import gguf

        self._check_sizes()
        blocks = {}
        for kind in {kind for kind, *_ in self.tensors.values()}:
            name = str(kind)
            try:
                name = gguf.GGMLQuantizationType(kind).name
                blocks[kind] = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
                gguf.dequantize(np.zeros((1, blocks[kind][1]), np.uint8), gguf.GGMLQuantizationType[name])
            except (ValueError, KeyError, NotImplementedError) as error:
                raise ValueError(
                    f"{self.path} has weights of the quantisation {name}, unknown here: {_ELSE}"
                ) from error
        # As llama.cpp asks for: each tensor begins where the one before it ends.
        end = start = 0
        for name, (kind, elements, offset) in sorted(self.tensors.items(), key=lambda item: item[1][2]):
            if offset != start:
                raise ValueError(f"{self.path} is damaged, its tensor {name} is not where it should be: fetch it again")
            elements_per_block, bytes_per_block = blocks[kind]
            end = offset + elements // elements_per_block * bytes_per_block
            start = -(-end // self.alignment) * self.alignment
        if self.path.stat().st_size < self.data_start + end:
            raise ValueError(_cut_short(self.path))
        scaling = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if scaling != "none" or any(name.startswith("rope_f") for name in self.tensors):
            raise ValueError(f"{self.path} scales its rotary embeddings, which would be lost in reading it: {_ELSE}")

    def _check_sizes(self) -> None:
        """Refuse what transformers would meet with an error that tells nothing, or read wrongly."""
        for name in _SIZES:
            size = self.metadata.get(f"{self.architecture}.{name}")
            if isinstance(size, int) and size < 1:
                raise ValueError(f"{self.path} says that its {name} is {size}: {_ELSE}")
        layers = self.metadata.get(f"{self.architecture}.block_count")
        numbers = [int(found[1]) for found in map(_LAYER.match, self.tensors) if found]
        if isinstance(layers, int) and numbers and max(numbers) + 1 != layers:
            raise ValueError(f"{self.path} says {layers} layers and has weights of {max(numbers) + 1}: fetch it again")
        tokens = self.metadata.get(f"{_PREFIX}tokens", 0)
        count = tokens if isinstance(tokens, int) else len(tokens)
        for token in self.end_tokens:
            if count and not 0 <= token < count:
                raise ValueError(f"{self.path} ends texts with token {token} of {count}: {_ELSE}")

    @property
    def alignment(self) -> int:
        """Each tensor begins at a multiple of so many bytes."""
        return int(self.metadata.get("general.alignment", 32))

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the model's architecture. Raises ValueError if the file has none."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ValueError(f"{self.path} names no architecture: {_ELSE}")
        return name

    @property
    def end_tokens(self) -> list[int]:
        """The ids of the tokens at which a text ends, beginning with the tokenizer's end-of-sequence id."""
        return list(dict.fromkeys(self.metadata[key] for key in _ENDS if key in self.metadata))


def is_gguf(source: Any) -> bool:
    """Whether ``source`` is the name of a GGUF file."""
    return str(source).lower().endswith(SUFFIX)


def arguments(source: str | Path) -> tuple[str, dict[str, str]]:
    """The folder and the keyword arguments with which transformers' ``from_pretrained`` reads the file ``source``."""
    path = Path(source)
    return str(path.parent), {"gguf_file": path.name}


def unpacking() -> dict[str, Any]:
    """Arguments of a model's ``from_pretrained`` for plain weights, for versions that would not unpack the blocks."""
    keeping = getattr(transformers, "GgufConfig", None)
    return {} if keeping is None else {"quantization_config": keeping(dequantize=True)}


def open_header(source: str | os.PathLike) -> Header:
    """Read and check the header of a file.

    Raises:
        OSError: there is no such file.
        ValueError: packages for reading it are not installed, or `Header` refuses it.
    """
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file at {source}")
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ValueError(f"{source} is a GGUF file, and the packages that read it are not installed: {INSTALL}")
    header = Header.read(path)
    header.check()
    return header


def mend_config(config: PreTrainedConfig, header: Header) -> PreTrainedConfig:
    """The configuration as in the model's Hugging Face folder: for plain weights, and with unrounded numbers."""
    plain = config.to_dict()
    plain.pop("quantization_config", None)
    plain.pop("_name_or_path", None)
    for name, value in plain.items():
        if isinstance(value, float) and value == float(np.float32(value)):
            # The file stores float32: 1e-05 is read as 9.999999747378752e-06.
            plain[name] = float(str(np.float32(value)))
    ends = header.end_tokens
    if ends:
        plain["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    mended = type(config).from_dict(plain)
    mended.architectures = config.architectures
    return mended


def mend_tokenizer(tokenizer: PreTrainedTokenizerBase, header: Header) -> PreTrainedTokenizerBase:
    """Give a byte-level tokenizer the pre-tokenizer that the file names.

    transformers uses GPT-2's where it does not know the name, and transformers 5.17 does so whatever the name is.

    Raises:
        ValueError: the name is unknown here, too.
    """
    name = header.metadata.get(f"{_PREFIX}pre")
    if header.metadata.get(f"{_PREFIX}model") != "gpt2" or name is None:
        return tokenizer
    if name in PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    elif isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise ValueError(f"{header.path} names the pre-tokenizer {name!r}, which is unknown here: {_ELSE}")
    return tokenizer


def mend_model(model: PreTrainedModel, header: Header) -> PreTrainedModel:
    """The same weights in a model without reference to the file, so that it can be saved and moved like any other."""
    config = mend_config(model.config, header)
    config._attn_implementation = model.config._attn_implementation
    config.dtype = model.dtype
    with torch.device("meta"):
        plain = type(model)(config)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{header.path} holds values in {name} that are no numbers: fetch it again, or {_ELSE}")
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    # Copy buffers that checkpoints do not hold, such as those of rotary embeddings.
    for name, module in model.named_modules():
        plain.get_submodule(name)._buffers.update(module._buffers)
    plain.generation_config = model.generation_config
    plain.generation_config.eos_token_id = config.eos_token_id
    plain.name_or_path = plain.config.name_or_path = str(header.path)
    return plain.eval()


def reason_of(error: Exception, header: Header) -> str:
    """Why transformers could not read the file, and what to do instead."""
    if "architecture" in str(error) and "not supported" in str(error):
        return f"models of the architecture {header.architecture} cannot be read from GGUF: {_ELSE}"
    return f"{' '.join(str(error).split()) or repr(error)}: {_ELSE}"


def _cut_short(path: Path) -> str:
    return f"{path} is cut short: fetch it again"


def _unpack(file: BinaryIO, layout: str) -> tuple:
    layout = f"<{layout}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    content = file.read(length)
    if len(content) < length:
        raise struct.error("the file ends inside of a text")
    return content.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        kind, count = _unpack(file, "IQ")
        if kind in (_STRING, _ARRAY):
            values = []
            for _ in range(count):
                value = _value(file, kind)
                if count <= _LONG:
                    values.append(value)
            return values if count <= _LONG else count
        return list(_unpack(file, f"{count}{_NUMBERS[kind]}"))
    return _unpack(file, _NUMBERS[kind])[0]
