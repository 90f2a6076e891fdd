"""Copies between host and device: the host waits when it reads from a device, never when it writes."""

from collections.abc import Sequence

import torch


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the host reads ``tensor`` without waiting for any device."""
    return tensor.device.type == "cpu"


def upload(numbers: int | Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """``numbers`` (nested lists of integers, or a tensor) on ``device``; on CUDA the host does not wait for it."""
    tensor = torch.as_tensor(numbers)
    if device.type != "cuda" or not on_host(tensor):
        return tensor
    # A copy from pageable memory would block the host until the device reaches it.
    return tensor.pin_memory().to(device, non_blocking=True)


def overwrite(destination: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into ``destination``; if that is on CUDA, the host does not wait for the copy."""
    pinned = tensor.pin_memory() if destination.is_cuda and on_host(tensor) else tensor
    destination.copy_(pinned, non_blocking=True)


def download(tensor: torch.Tensor) -> list:
    """The numbers of ``tensor`` as nested lists; the host waits until the device has computed them."""
    return tensor.tolist()


def copy_vectors(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy vectors [B, G, n, D] between buffers, one of which may be in pinned memory; no host waits for it.

    Each of the B x G parts is one piece of memory. Copied together between devices, pieces with gaps between them would
    pass through pageable memory, for which the host waits.
    """
    for one, other in zip(source.flatten(0, 1), destination.flatten(0, 1), strict=True):
        other.copy_(one, non_blocking=True)
