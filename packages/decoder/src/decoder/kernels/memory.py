"""How much memory is available."""

from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on ``device``; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has reserved but does not use is available as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _available_on_host()


def _available_on_host() -> int | None:
    """Bytes that this process may still take (Linux); None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        # A container may have a lower limit than the machine.
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
