"""Reading models and tokenizers from folders, GGUF files or the hub; every error is one sentence for the user."""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from decoder.checks import meant_beside
from decoder.model import gguf
from decoder.model.architectures import refuse_unsupported
from decoder.model.gguf.architectures import architecture_of
from decoder.model.gguf.config import read_config as gguf_config
from decoder.model.gguf.quantised import holds_quantised, quantised_model
from decoder.model.gguf.tokenizer import read_tokenizer as gguf_tokenizer
from decoder.model.gguf.weights import check_shapes
from decoder.model.gguf.weights import state_dict as gguf_weights
from decoder.model.mxfp4 import has_mxfp4, keeps_mxfp4, read_mxfp4
from decoder.model.options import NO_MODEL, passed_over, refuse_written
from decoder.model.wrapped import language_config, reading_alone
from decoder.model.yarn import stretch, take_one_set

logger = logging.getLogger(__name__)

HUB_ARGUMENTS = ("cache_dir", "local_files_only", "revision", "token", "trust_remote_code")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# transformers would else ask on standard output, and take what is piped into a command for the answer.
_NO_CODE = {"trust_remote_code": False}
# How many multi-token-prediction modules stand behind the layers, in words of configurations.
_PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers")
_NO_MEMORY = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    # Sizes that overflow a counter are larger than any memory.
    "Storage size calculation overflowed",
    "Overflow when unpacking long",
)


def check_source(what: str, source: str | os.PathLike) -> None:
    """Check that ``source`` is a folder, a GGUF file or possibly a hub id, without asking the hub.

    Args:
        what: what is to be read from there, for the message: "model", "heads".
        source: where it is to be read from.

    Raises:
        ValueError: ``source`` is neither text nor a path.
        OSError: there is no such folder.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"the {what} must be a folder or a hub id, not {type(source).__name__}")
    path = Path(source)
    if path.is_dir():
        return
    if gguf.is_gguf(source):
        gguf.open_checked(source)
        return
    if path.exists():
        raise NotADirectoryError(f"{source} is a file, and a {what} folder is needed")
    # A mistyped name in an existing folder must not be looked up on the hub.
    near = meant_beside(path)
    if path.parent.is_dir() and path.parent != Path():
        raise FileNotFoundError(f"there is no {what} folder at {source}{near}: give one that is there, or a hub id")
    if not HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(
            f"there is no {what} folder at {source}{near}, and it is no hub id (owner/name): give either"
        )


def read_tokenizer(source: str | os.PathLike, **from_hub: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; ``from_hub`` are `HUB_ARGUMENTS`. Raises OSError when it cannot be read."""
    if gguf.is_gguf(source):
        return gguf_tokenizer(gguf.open_checked(source))
    with _readable("tokenizer", source):
        return AutoTokenizer.from_pretrained(source, **_NO_CODE | from_hub)


def read_config(source: str | os.PathLike, yarn: float | None = None, **from_hub: Any) -> Any:
    """The configuration of a model, or of the language model inside; ``from_hub`` are `HUB_ARGUMENTS`.

    Raises:
        OSError: it cannot be read.
        ValueError: the architecture is not supported, or see `stretch`, to which ``yarn`` is given.
    """
    with _usable(source):
        refuse_written(_written(source))
    if gguf.is_gguf(source):
        file = gguf.open_checked(source)
        with _usable(source):
            if architecture_of(file).drafts:
                raise ValueError(NO_MODEL)
        config = gguf_config(file)
    else:
        config = language_config(_own_config(source, **from_hub))
    with _usable(source):
        take_one_set(config, yarn)
        refuse_unsupported(config)
        stretch(config, yarn)
    if words := passed_over(config):
        logger.warning("%s says %s, which %s models do not look at", source, ", ".join(words), config.model_type)
    return config


@contextmanager
def _usable(source: str | os.PathLike) -> Iterator[None]:
    """Say of what is refused in this block where it was read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source} cannot be used: {error}") from error


def _written(source: str | os.PathLike) -> dict[str, Any]:
    """What stands in the configuration of a folder; nothing of other sources, or where transformers cannot read it."""
    path = Path(source) / "config.json"
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _own_config(source: str | os.PathLike, **from_hub: Any) -> PreTrainedConfig:
    with _readable("model", source):
        return AutoConfig.from_pretrained(source, **_NO_CODE | from_hub)


def empty_model(config: PreTrainedConfig, source: str | os.PathLike) -> PreTrainedModel:
    """The model of a configuration on the meta device: shapes without weights. ``source`` is where it was read.

    Raises OSError if transformers cannot make it, or if it has code of its own.
    """
    with _readable("model", source), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **_NO_CODE)


def read_model(
    source: str | os.PathLike, device: torch.device, yarn: float | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A model in eval mode on ``device``; ``kwargs`` are those of ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        ValueError: the checkpoint lacks tensors of the model it describes, or see `stretch`.
        OSError: it cannot be read.
    """
    # Tensors that do not fit are named below; transformers' own error only points to its log.
    kwargs |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
    if gguf.is_gguf(source):
        model, found = _from_gguf(source, yarn, **kwargs)
    else:
        # transformers looks for an adapter beside the model, too, and would ask the hub for it.
        adapter = {name: kwargs[name] for name in ("cache_dir", "local_files_only") if name in kwargs}
        config = _own_config(source, **{name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs})
        alone = own = {} if "config" in kwargs else reading_alone(config, source)
        if has_mxfp4(config) and device.type == "cpu" and not {"config", "quantization_config"} & kwargs.keys():
            # transformers would do so anyway, once it has looked for packages that it needs on other devices.
            config.quantization_config |= {"dequantize": True}
            own = {"config": config}
        longer = own.get("config", config)
        before = getattr(longer, "rope_parameters", None)
        with _usable(source):
            take_one_set(longer, yarn)
            stretch(longer, yarn)
        if getattr(longer, "rope_parameters", None) is not before:
            own = {"config": longer}
        kwargs = {"adapter_kwargs": adapter, **_NO_CODE, **own, **kwargs}
        with _readable("model", source), _without_report():
            model, found = AutoModelForCausalLM.from_pretrained(source, **kwargs)
        _tell_unread(source, model, found["unexpected_keys"], bool(alone))
    # transformers fills missing and mismatched tensors with random numbers.
    for names, fault in (
        (found["missing_keys"], "lacks tensors that its configuration asks for"),
        ((name for name, *_ in found["mismatched_keys"]), "has tensors of other shapes than its configuration says"),
    ):
        names = sorted(names)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"the model {source} {fault}: {names[0]}{more}")
    return model.to(device).eval()


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep transformers from listing each tensor that is missing or not read; its errors name one of those listed.

    Raises:
        ValueError: tensors that are stored apart, such as those of experts, do not make one together.
    """
    listed: list[str] = []
    theirs = logging.getLogger("transformers.modeling_utils")
    level, shown = theirs.level, theirs.getEffectiveLevel()

    def passes(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        if is_report:
            listed.append(record.getMessage())
        return not is_report and record.levelno >= shown

    # At the level of warnings transformers would also tell which layers are not sharded.
    theirs.setLevel(min(shown, logging.INFO))
    theirs.addFilter(passes)
    try:
        yield
    except RuntimeError as error:
        if name := re.search(r"^(.+?) *\| *CONVERSION", "\n".join(listed), re.MULTILINE):
            raise ValueError(f"parts of {name[1]} are missing or do not fit together") from error
        raise
    finally:
        theirs.removeFilter(passes)
        theirs.setLevel(level)


def _tell_unread(source: str | os.PathLike, model: PreTrainedModel, unread: Iterable[str], alone: bool) -> None:
    """Warn of tensors that a model does not use, such as biases or further layers; ``alone`` if others stand around it.

    Multi-token-prediction modules are read by others.
    """
    config, layers = model.config, f"{model.base_model_prefix}.layers."
    predicting = max(getattr(config, name, None) or 0 for name in _PREDICTING)
    beside = tuple(f"{layers}{config.num_hidden_layers + number}." for number in range(predicting))
    names = sorted(name for name in unread if name.startswith(layers if alone else "") and not name.startswith(beside))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        logger.warning("%s has tensors that its %s does not use: %s%s", source, config.model_type, names[0], more)


def _from_gguf(source: str | os.PathLike, yarn: float | None, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a GGUF file and what transformers tells of its loading. Raises OSError if it cannot be made."""
    file = gguf.open_checked(source)
    config = read_config(source, yarn)
    kwargs = {name: value for name, value in kwargs.items() if name not in HUB_ARGUMENTS}
    dtype = kwargs.pop("dtype", "auto")
    # The file has blocks, which are unpacked, and so no dtype that "auto" could take.
    dtype = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    check_shapes(file, empty_model(config, source))
    weights = gguf_weights(file, config, dtype)
    with _readable("model", source):
        of_config = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, found = of_config.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **kwargs)
    model.name_or_path = model.config.name_or_path = str(source)
    return model, found


def keeps_formats(source: str | os.PathLike, config: PreTrainedConfig, **kwargs: Any) -> bool:
    """Whether `read_quantised` reads the model of a ``config``, with these ``kwargs``, which must be the hub's alone.

    It does a GGUF file of formats that the native library multiplies, and gpt-oss with MXFP4 weights.
    """
    if kwargs.keys() - set(HUB_ARGUMENTS):
        return False
    return holds_quantised(gguf.open_checked(source)) if gguf.is_gguf(source) else keeps_mxfp4(config)


def read_quantised(
    source: str | os.PathLike, config: PreTrainedConfig, dtype: torch.dtype, **from_hub: Any
) -> PreTrainedModel:
    """A model on the CPU, its quantised weights in the formats that they are stored in and all else in ``dtype``.

    Raises:
        ValueError: weights are missing, are no numbers, or are none of this model's.
        OSError: it cannot be read.
    """
    if gguf.is_gguf(source):
        model = quantised_model(gguf.open_checked(source), config, dtype)
    else:
        model = read_mxfp4(_folder_of(source, **from_hub), config, dtype)
    model.name_or_path = model.config.name_or_path = str(source)
    return model


def _folder_of(source: str | os.PathLike, **from_hub: Any) -> Path:
    """The folder of a model, or where the hub's client keeps its files."""
    if Path(source).is_dir():
        return Path(source)
    from_hub = {name: value for name, value in from_hub.items() if name != "trust_remote_code"}
    with _readable("model", source):
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "model*.safetensors"], **from_hub))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or on an accelerator."""
    by_message = isinstance(error, RuntimeError | TypeError) and any(words in str(error) for words in _NO_MEMORY)
    return by_message or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _first_line(error: Exception) -> str:
    """The first line of an exception's message, or two if that ends with a colon; what to do where code is refused."""
    if "trust_remote_code" in str(error):
        return "it has code of its own: look at that, and give decoder.load trust_remote_code=True to run it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return repr(error)
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


@contextmanager
def _readable(what: str, source: str | os.PathLike) -> Iterator[None]:
    """Any exception in this block becomes an OSError that says what could not be read, except out of memory."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        # Parsers, validators and the hub client raise many unrelated types for one fact.
        raise OSError(f"the {what} {source} cannot be read: {_first_line(error)}") from error
