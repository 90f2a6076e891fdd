"""The report for an issue: versions, the device, and what runs a decoder's models on it."""

import platform
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from decoder.backends.choose import Finding
from decoder.backends.native import library as native
from decoder.model.quantising import dtype_name
from decoder.model.target import Target

_DISTRIBUTIONS = ("tokenswift-decoder", "torch", "transformers", "triton", "safetensors")


def report(targets: Mapping[str, Target], heads: Iterable[str]) -> str:
    """The report as text of several lines.

    Args:
        targets: the models by their role, the decoded one first.
        heads: the kinds of draft heads.
    """
    device = next(iter(targets.values())).device
    lines = [*_versions(), *_device(device)]
    for role, target in targets.items():
        config, shape = target.model.config, target.attention_shape
        sizes = f"{config.num_hidden_layers} layers of {target.hidden_size}, {shape.heads} query and {shape.kv_heads}"
        shared = f" in each of {target.ranks.size} processes" if target.ranks.size > 1 else ""
        lines += ["", f"{role}: {target.name} in {dtype_name(target.model)}, {sizes} KV heads of {shape.dim}{shared}"]
        lines += [f"  {_line(path)}" for path in target.findings()]
    kinds = ", ".join(heads)
    return "\n".join([*lines, "", f"draft heads: {kinds or 'none'}"])


def _line(path: Finding) -> str:
    return f"{path.name:<24} {'on ' if path.on else 'off'}  {path.reason}"


def _versions() -> list[str]:
    found = [f"python {platform.python_version()} ({sys.platform}, {platform.machine()})"]
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {torch.__version__ if name == 'torch' else version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}: not installed")
    return found


def _device(device: torch.device) -> list[str]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        size = f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"
        return [
            f"device: {device}, {found.name}, capability {found.major}.{found.minor}, {size}",
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        ]
    ours = f"{native.instruction_set()} by the native library, " if native.available() else ""
    threads = torch.get_num_threads()
    return [
        f"device: {device}, {threads} thread{'' if threads == 1 else 's'}",
        f"instructions: {ours}{torch.backends.cpu.get_cpu_capability()} by PyTorch",
    ]
