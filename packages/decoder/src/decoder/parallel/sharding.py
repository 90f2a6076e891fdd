"""Sharing a model among processes, by transformers' own plan, and reading whole what is shared."""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from decoder.model.options import layer_configs
from decoder.parallel.ranks import Ranks

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_PIECES, _PIECE = 64, 4096  # of a file, how many parts of how many bytes a digest reads


def sharding(ranks: Ranks) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that make each process read its share of the weights."""
    if ranks.size == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks.size, tp_plan="auto")}


def refuse_without_accelerate(ranks: Ranks) -> None:
    """Raise ValueError where transformers cannot read a share of a model for want of a package."""
    if ranks.size > 1 and find_spec("accelerate") is None:
        extra = "pip install 'tokenswift-decoder[tensor-parallel]'"
        raise ValueError(f"tensor parallelism needs accelerate, which is not installed: {extra}")


def refuse_unshareable(config: PreTrainedConfig, size: int) -> None:
    """Raise ValueError, with the reason, where ``size`` processes cannot share a model by its attention heads."""
    name = config.model_type
    if size == 1:
        return
    if not getattr(config, "base_model_tp_plan", None):
        raise ValueError(f"transformers has no plan to share {name} among processes: load it on one device")
    heads = config.num_attention_heads
    kv_heads = math.gcd(*(getattr(layer, "num_key_value_heads", None) or heads for layer in layer_configs(config)))
    if heads % size or kv_heads % size:
        fitting = [str(n) for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n]
        raise ValueError(
            f"{size} processes cannot share the {heads} query and {kv_heads} KV heads of this {name} evenly: "
            f"start {' or '.join(fitting)}"
        )


def shared_parameters(names: Iterable[str], plan: Mapping[str, str]) -> set[str]:
    """Those of the parameters ``names`` of which a process holds a part under a model's ``tp_plan``."""
    found = set()
    for name in names:
        module, _, parameter = name.rpartition(".")
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", module), "")
        # A row-wise product is summed over the processes, and its bias is added once.
        if "colwise" in style or ("rowwise" in style and parameter != "bias"):
            found.add(name)
    return found


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A parameter as one process would hold it. Of a shared one all processes must ask at the same time."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that this process holds, all of it unless it is shared."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def digest_of(source: object, revision: str | None = None) -> str:
    """Tells checkpoints apart without reading all of them: by names, sizes and some bytes of the weight files.

    Args:
        source: a folder, a file, or a hub id, of which ``revision``, the commit, says the same.
    """
    if not isinstance(source, str | os.PathLike):
        return type(source).__name__
    path, digest = Path(source), hashlib.sha256()
    if not path.exists():
        return f"{source}@{revision}"
    files = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern)) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for start in range(0, size, max(_PIECE, size // _PIECES)):
                opened.seek(start)
                digest.update(opened.read(_PIECE))
    return digest.hexdigest()
