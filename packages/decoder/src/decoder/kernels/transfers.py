"""Between host and device without waiting: a step reads from the device once, and never waits to write to it."""

from collections.abc import Sequence

import torch


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the host reads ``tensor`` without waiting for any device."""
    return tensor.device.type == "cpu"


def upload(numbers: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``numbers`` (nested lists of integers, or a tensor) on ``device``; on CUDA the host does not wait for it."""
    tensor = torch.as_tensor(numbers)
    if device.type != "cuda" or not on_host(tensor):
        return tensor
    # A copy from pageable memory would block until the device has come to it.
    return tensor.pin_memory().to(device, non_blocking=True)


def overwrite(destination: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write a tensor over ``destination``; where that is on CUDA the host does not wait for it."""
    pinned = tensor.pin_memory() if destination.is_cuda and on_host(tensor) else tensor
    destination.copy_(pinned, non_blocking=True)


def download(tensor: torch.Tensor) -> list:
    """The numbers of ``tensor`` as nested lists, once the device has computed them: the host waits here."""
    return tensor.tolist()
