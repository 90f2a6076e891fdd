"""`decoder.load`: reads a model with its tokenizer and heads as a `Decoder`."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from decoder.backends import kept_tests
from decoder.backends.bitwise import BitwiseSetting
from decoder.backends.native import library as native
from decoder.checks import meant
from decoder.collecting import uncollected
from decoder.decoder import Decoder
from decoder.heads import MTP, Heads, HeadsLike, check_heads, load_built_in, load_heads
from decoder.model.gguf import is_gguf
from decoder.model.loading import (
    HUB_ARGUMENTS,
    check_source,
    empty_model,
    keeps_formats,
    read_config,
    read_model,
    read_quantised,
    read_tokenizer,
)
from decoder.model.quantising import QUANTISED_DTYPES, quantise, quantised_layers
from decoder.model.vocabularies import refuse_other_tokens
from decoder.parallel.ranks import ALONE, Ranks, join, linked
from decoder.parallel.sharding import digest_of, refuse_unshareable, refuse_without_accelerate, sharding

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", *QUANTISED_DTYPES)
"""The names of dtypes that `load` takes."""

Tests = Literal["always", "kept", "anew"]


@uncollected()
def load(
    model: str | os.PathLike,
    heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_model: str | os.PathLike | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    bitwise: BitwiseSetting = "auto",
    prefix_cache_bytes: int = 0,
    tensor_parallel: bool = False,
    sanitize_control_tokens: bool = False,
    tests: Tests = "always",
    yarn: float | None = None,
    **model_kwargs: Any,
) -> Decoder:
    """Load a model folder or hub id with its tokenizer, and heads, as a `Decoder`.

    Args:
        model: folder, GGUF file or hub id.
        heads: a heads checkpoint folder or hub id, or {kind: checkpoint}; "mtp" is the multi-token-prediction module
            that the model has built in.
        tokenizer: the one that belongs to the model, where it has been read already; None reads it.
        draft_model: folder, GGUF file or hub id of a small model with the same vocabulary, with its tokenizer.
        device: "auto" takes CUDA if there is a CUDA device.
        dtype: a torch dtype or its name; "auto" is the checkpoint's own on CUDA, and on a CPU bfloat16 if that is the
            checkpoint's, the native library multiplies it here and bitwise decoding holds, otherwise float32; matrices
            of a quantised GGUF file, and the MXFP4 experts of a gpt-oss folder, stay in their own formats on a CPU for
            which there is the native library. "int4" and "int8" round the weights of the model's linear layers
            (`model.quantising`), on a CPU: the text is that of the model with these weights. All else, and the draft
            model, is then bfloat16 if the native library multiplies it here and bitwise decoding holds, otherwise
            float32.
        bitwise: see `Decoder`.
        prefix_cache_bytes: see `Decoder`.
        tensor_parallel: whether the processes that torchrun has started share the model: each holds a part of the
            weights and some of the KV heads, on a device of its own, and all run the same program.
        tests: whether the tests at load run "always", or their outcome is "kept" in the user's cache folder and relied
            on while neither the model's files nor code, libraries, processor, threads and environment change; "anew"
            runs them and keeps it. This is for programs that replace nothing of PyTorch's, transformers' or this
            package's, and for models on a CPU that are loaded from a folder or file without ``model_kwargs``; all
            others are always tested.
        yarn: by which factor the length that the model, and the draft model, was trained for is stretched with YaRN
            (arXiv:2309.00071), where its rotary embeddings are not scaled already. All logits change. A model with
            LongRoPE's factors takes those for long texts instead, and without this those for texts up to that length.
        **model_kwargs: passed to ``AutoModelForCausalLM.from_pretrained``. Arguments for the hub among them are also
            used for the tokenizer, the heads and the draft model, except ``revision``, which applies to the model and
            its tokenizer alone.

    Raises:
        OSError: a model, tokenizer or heads checkpoint cannot be found or read.
        ValueError: one of them does not fit or lacks tensors, or the draft model has other tokens; device or dtype are
            unknown; or the model cannot be shared among so many processes, or not without the extra
            ``tensor-parallel``, or these were given different models or arguments.
        ConnectionError: another process of the run has ended.
    """
    device = device_named(device)
    if tests not in get_args(Tests):
        raise ValueError(f"unknown tests {tests!r}{meant(tests, get_args(Tests))}: use one of always, kept, anew")
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}{meant(dtype, DTYPES)}: use one of {', '.join(DTYPES)}")
    rounded = dtype if dtype in QUANTISED_DTYPES else None
    if rounded and (device.type != "cpu" or tensor_parallel):
        raise ValueError(f"dtype {dtype!r} is for one process on a CPU: use device 'cpu', or another dtype")
    ranks = join(device) if tensor_parallel else ALONE
    refuse_without_accelerate(ranks)
    if ranks.size > 1:
        device = _own_device(device)
    # A revision belongs to one repository: the given one is the model's.
    of_draft = {name: value for name, value in model_kwargs.items() if name != "revision"}
    with linked():
        # Refuse what can be refused before gigabytes of weights are read.
        own_heads = ranks.together(lambda: _read_heads(model, heads, draft_model, model_kwargs))
        config, sources = ranks.together(
            lambda: _checked(model, heads, draft_model, model_kwargs, rounded, ranks, yarn)
        )
        chosen = dtype == "auto" and device.type == "cpu"
        kept = chosen and ranks.size == 1 and keeps_formats(model, config, **model_kwargs)
        narrow = bool(rounded or chosen) and bitwise is not False and ranks.size == 1
        narrow = narrow and (bool(rounded) or kept or _is_bf16(config, model)) and native.multiplies(torch.bfloat16)
        around = "bfloat16" if narrow else "float32"
        dtype = around if chosen else dtype
        ranks.refuse_unequal(sources | {"dtype": dtype, "bitwise": bitwise, "other argument": sorted(model_kwargs)})
        if tokenizer is None:
            tokenizer = read_tokenizer(model, **_for_hub(model_kwargs))
        if draft_model is not None:
            with suppress(OSError):  # a folder of weights alone will do
                refuse_other_tokens(tokenizer, read_tokenizer(draft_model, **_for_hub(of_draft)))
        # The checkpoint's own dtype takes the least memory until its weights are rounded. Those of a GGUF file may have
        # four bits already, which another rounding before would change.
        read_as = ("float32" if is_gguf(model) else "auto") if rounded else dtype
        if kept:
            target = read_quantised(model, config, getattr(torch, dtype), **model_kwargs)
        else:
            target = read_model(model, device, yarn, dtype=read_as, **model_kwargs, **sharding(ranks))
        if rounded:
            quantise(target, rounded, getattr(torch, around))
        small = None
        if draft_model is not None:
            as_it_is = chosen and ranks.size == 1
            small = _read_draft_model(draft_model, device, yarn, around if rounded else dtype, as_it_is, of_draft)
        more = bitwise, prefix_cache_bytes, sanitize_control_tokens
        if tests != "always" and device.type == "cpu" and ranks.size == 1 and bitwise and not model_kwargs:
            asked = {"dtype": [dtype, rounded, around], "bitwise": bitwise, "config": config.to_json_string()}
            kept_tests.note(target, Path(model).resolve(), asked, tests == "anew")
        made = Decoder(target, tokenizer, own_heads, small, *more)
        if narrow and not made.bitwise:
            # Widening changes no weight.
            small = None if small is None else small.float()
            made = Decoder(target.float(), tokenizer, own_heads, small, *more)
        return made


def _is_bf16(config: Any, model: str | os.PathLike) -> bool:
    """Whether a model's own dtype is bfloat16, which may be faster and is not another rounding.

    Beside rounded weights, and those of a GGUF file, any model's other numbers may be rounded to it.
    """
    return getattr(config, "dtype", None) in (torch.bfloat16, "bfloat16") and not is_gguf(model)


def _for_hub(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: model_kwargs[name] for name in HUB_ARGUMENTS if name in model_kwargs}


def _read_draft_model(
    source: str | os.PathLike,
    device: torch.device,
    yarn: float | None,
    dtype: str,
    as_it_is: bool,
    model_kwargs: Mapping[str, Any],
) -> PreTrainedModel:
    """A draft model in a dtype; ``as_it_is`` in the formats of its file, since each pass reads all of its weights."""
    config = read_config(source, yarn, **_for_hub(model_kwargs))
    if as_it_is and keeps_formats(source, config, **model_kwargs):
        return read_quantised(source, config, getattr(torch, dtype), **_for_hub(model_kwargs))
    return read_model(source, device, yarn, dtype=dtype, **model_kwargs)


def _checked(
    model: str | os.PathLike,
    heads: HeadsLike | Mapping[str, HeadsLike] | None,
    draft_model: str | os.PathLike | None,
    model_kwargs: Mapping[str, Any],
    rounded: str | None,
    ranks: Ranks,
    yarn: float | None,
) -> tuple[PreTrainedConfig, dict[str, str]]:
    """Check what can be checked without reading weights; the configuration, and what tells checkpoints from others."""
    from_hub = _for_hub(model_kwargs)
    if ranks.size > 1 and is_gguf(model):
        raise ValueError("a GGUF file cannot be shared among processes: give a model folder or hub id")
    config = read_config(model, yarn, **from_hub)
    # Code of a model's own is fetched and run only once, with the weights.
    if rounded and not getattr(config, "auto_map", None):
        quantised_layers(empty_model(config, model), rounded)
    if draft_model is not None:
        read_config(draft_model, yarn, **{name: value for name, value in from_hub.items() if name != "revision"})
    if ranks.size == 1:
        return config, {}
    refuse_unshareable(config, ranks.size)
    given = heads.values() if isinstance(heads, Mapping) else [heads]
    return config, {
        "model": digest_of(model, getattr(config, "_commit_hash", None)) + config.to_json_string(),
        "heads": ", ".join(map(digest_of, given)),
        "draft model": digest_of(draft_model),
    }


def _read_heads(
    model: str | os.PathLike,
    heads: HeadsLike | Mapping[str, HeadsLike] | None,
    draft_model: str | os.PathLike | None,
    model_kwargs: Mapping[str, Any],
) -> Heads | dict[str, Heads] | None:
    """Read the heads, once it is clear that the folders of all that is to be read are there; no hub is asked before."""
    check_source("model", model)
    if draft_model is not None:
        check_source("draft model", draft_model)
    check_heads(heads)
    of_heads = {name: model_kwargs[name] for name in ("cache_dir", "local_files_only", "token") if name in model_kwargs}

    def read(one: HeadsLike) -> Heads:
        if one == MTP:
            of_model = _for_hub(model_kwargs)
            of_model.pop("trust_remote_code", None)
            return load_built_in(model, **of_model)
        return one if isinstance(one, Heads) else load_heads(one, **of_heads)

    if isinstance(heads, Mapping):
        return {kind: read(one) for kind, one in heads.items()}
    return None if heads is None else read(heads)


def _own_device(device: torch.device) -> torch.device:
    """The device of this process: transformers gives each the accelerator of its number, where there is one."""
    if device.index is not None or (device.type == "cpu" and torch.cuda.is_available()):
        raise ValueError("each process takes the device of its own number: leave device at 'auto'")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


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
