"""`decoder.load`: reads a model with its tokenizer and heads as a `Decoder`."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from decoder.decoder import Decoder, HeadsLike, check_heads
from decoder.heads import Heads, load_heads
from decoder.model.bitwise import BitwiseSetting
from decoder.model.loading import HUB_ARGUMENTS, check_source, read_config, read_model, read_tokenizer

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def load(
    model: str | os.PathLike,
    heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
    *,
    draft_model: str | os.PathLike | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    bitwise: BitwiseSetting = "auto",
    prefix_cache_bytes: int = 0,
    **model_kwargs: Any,
) -> Decoder:
    """Load a model folder or hub id with its tokenizer, and heads, as a `Decoder`.

    Args:
        heads: a heads checkpoint folder or hub id, or {kind: checkpoint}.
        draft_model: folder or hub id of a small model with the same vocabulary.
        device: "auto" takes CUDA if there is a CUDA device.
        dtype: a torch dtype or its name; "auto" is float32 on a CPU and the checkpoint's own on CUDA.
        bitwise, prefix_cache_bytes: see `Decoder`.
        **model_kwargs: passed to ``AutoModelForCausalLM.from_pretrained``. Arguments for the hub among them are also
            used for the tokenizer, the heads and the draft model, except ``revision``, which applies to the model and
            its tokenizer alone.

    Raises:
        OSError: a model, tokenizer or heads checkpoint cannot be found or read.
        ValueError: one of them does not fit or lacks tensors, or device or dtype are unknown.
    """
    device = device_named(device)
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}: use one of auto, {', '.join(_DTYPES)}")
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    check_source("model", model)
    if draft_model is not None:
        check_source("draft model", draft_model)
    check_heads(heads)
    from_hub = {name: model_kwargs[name] for name in HUB_ARGUMENTS if name in model_kwargs}
    # A revision belongs to one repository: the given one is the model's.
    of_draft = {name: value for name, value in model_kwargs.items() if name != "revision"}
    of_heads = {name: from_hub[name] for name in ("cache_dir", "local_files_only", "token") if name in from_hub}

    def read_heads(one: HeadsLike) -> Heads:
        return one if isinstance(one, Heads) else load_heads(one, **of_heads)

    if isinstance(heads, Mapping):
        heads = {kind: read_heads(one) for kind, one in heads.items()}
    elif heads is not None:
        heads = read_heads(heads)
    # Refuse what can be refused before gigabytes of weights are read.
    read_config(model, **from_hub)
    if draft_model is not None:
        read_config(draft_model, **{name: of_draft[name] for name in from_hub if name in of_draft})
    tokenizer = read_tokenizer(model, **from_hub)
    target = read_model(model, device, dtype=dtype, **model_kwargs)
    small = None if draft_model is None else read_model(draft_model, device, dtype=dtype, **of_draft)
    return Decoder(target, tokenizer, heads, small, bitwise, prefix_cache_bytes)


def device_named(device: str | torch.device) -> torch.device:
    """The device of that name; "auto" takes CUDA if possible. Raises ValueError if this machine has no such device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        raise ValueError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: use 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for and there is none: use 'auto' or 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {str(device)!r}: the last one is 'cuda:{torch.cuda.device_count() - 1}'")
    return device
