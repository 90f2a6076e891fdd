"""How much memory is available."""

from pathlib import Path

import psutil
import torch


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still take on ``device``."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has reserved but does not use is available as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = psutil.virtual_memory().available
    try:
        # A container may have a lower limit than the machine.
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def floats(*shape: int) -> torch.Tensor:
    """Room for numbers that the native library reads and writes, whatever dtype and device are PyTorch's defaults."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")
