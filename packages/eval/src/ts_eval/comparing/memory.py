"""What memory a generation held at its peak."""

import re
from pathlib import Path

import psutil
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """The process's resident memory."""
    return psutil.Process().memory_info().rss


def held_bytes(device: torch.device) -> int:
    """What `PeakMemory` counts, now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


class PeakMemory:
    """From its making on: of a CUDA device what tensors held, on a CPU the process's resident memory (Linux only,
    since psutil tells no peak).

    Weights and whatever else was there before are included; on a CPU the interpreter and its libraries too.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._resettable = self._reset()

    def bytes(self) -> int | None:
        """None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self._resettable:
            return None
        [peak] = re.findall(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        return 1024 * int(peak)

    @staticmethod
    def _reset() -> bool:
        try:
            _CLEAR.write_text("5")  # proc(5): resets the peak resident set size of the process
        except OSError:
            return False
        return True


def short_of_memory(error: RuntimeError | MemoryError, sentence: str) -> Exception:
    """A MemoryError that says ``sentence`` when that is what ``error`` means, else the error itself."""
    # torch raises an own class on CUDA only.
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return MemoryError(sentence) if short or "not enough memory" in str(error) else error
