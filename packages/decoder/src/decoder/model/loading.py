"""Reading models and tokenizers from folders or the hub: whatever cannot be read is told in one sentence."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from decoder.model import gguf
from decoder.model.architectures import refuse_unsupported

HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token", "trust_remote_code")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_NO_MEMORY = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    # More than can be counted is more than there is.
    "Storage size calculation overflowed",
    "Overflow when unpacking long",
)


def check_source(what: str, source: str | os.PathLike) -> None:
    """Refuse what is no folder, no GGUF file and can be no hub id, without asking the hub.

    Args:
        what: what should be there, for the message: "model", "heads".

    Raises:
        ValueError: no text or path at all.
        OSError: there is no such folder.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"the {what} must be a folder or a hub id, not {type(source).__name__}")
    path = Path(source)
    if path.is_dir():
        return
    if gguf.is_gguf(source):
        gguf.open_header(source)
        return
    if path.exists():
        raise NotADirectoryError(f"{source} is a file, and a {what} folder is needed")
    # A mistyped name in a folder that is there would otherwise be looked for on the hub.
    if path.parent.is_dir() and path.parent != Path():
        raise FileNotFoundError(f"there is no {what} folder at {source}")
    if not HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(f"there is no {what} folder at {source}, and it is no hub id (owner/name) either")


def read_tokenizer(source: str | os.PathLike, **from_hub: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; ``from_hub`` are `HUB_ARGUMENTS`. Raises OSError when it cannot be read."""
    if gguf.is_gguf(source):
        header = gguf.open_header(source)
        return gguf.mend_tokenizer(_from_gguf("tokenizer", AutoTokenizer, header), header)
    with _readable("tokenizer", source):
        return AutoTokenizer.from_pretrained(source, **from_hub)


def read_config(source: str | os.PathLike, **from_hub: Any) -> Any:
    """The configuration of a model; ``from_hub`` are `HUB_ARGUMENTS`.

    Raises:
        OSError: it cannot be read.
        ValueError: the architecture is not supported.
    """
    if gguf.is_gguf(source):
        header = gguf.open_header(source)
        config = gguf.mend_config(_from_gguf("model", AutoConfig, header), header)
    else:
        with _readable("model", source):
            config = AutoConfig.from_pretrained(source, **from_hub)
    refuse_unsupported(config)
    return config


def read_model(source: str | os.PathLike, device: torch.device, **kwargs: Any) -> PreTrainedModel:
    """A model in eval mode on ``device``; ``kwargs`` are those of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        ValueError: the checkpoint lacks tensors of the model it describes.
        OSError: it cannot be read.
    """
    # What does not fit is then named below, where transformers' own error only points to its log.
    kwargs |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
    header = gguf.open_header(source) if gguf.is_gguf(source) else None
    if header is not None:
        # The blocks are unpacked: what a device takes by default is no dtype of the file's.
        if kwargs.get("dtype") == "auto":
            kwargs["dtype"] = torch.bfloat16
        model, found = _from_gguf("model", AutoModelForCausalLM, header, **gguf.unpacking(), **kwargs)
    else:
        with _readable("model", source):
            model, found = AutoModelForCausalLM.from_pretrained(source, **kwargs)
    # transformers would fill these with random numbers.
    for names, fault in (
        (found["missing_keys"], "lacks tensors that its configuration asks for"),
        ((name for name, *_ in found["mismatched_keys"]), "has tensors of other shapes than its configuration says"),
    ):
        names = sorted(names)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"the model {source} {fault}: {names[0]}{more}")
    if header is not None:
        model = gguf.mend_model(model, header)
    return model.to(device).eval()


def _from_gguf(what: str, auto_class: type, header: gguf.Header, **kwargs: Any) -> Any:
    """What an auto class of transformers reads from a GGUF file. Raises OSError, with what to do, when it cannot."""
    folder, file_name = gguf.arguments(header.path)
    try:
        return auto_class.from_pretrained(folder, **file_name, **kwargs)
    except Exception as error:
        if out_of_memory(error):
            raise
        # As below: many unrelated types for one fact.
        raise OSError(f"the {what} {header.path} cannot be read: {gguf.reason_of(error, header)}") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or on an accelerator."""
    told = isinstance(error, RuntimeError | TypeError) and any(words in str(error) for words in _NO_MEMORY)
    return told or isinstance(error, MemoryError | torch.OutOfMemoryError)


@contextmanager
def _readable(what: str, source: str | os.PathLike) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        # Parsers, validators and the hub client raise many unrelated types for one fact.
        raise OSError(f"the {what} {source} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return repr(error)
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
