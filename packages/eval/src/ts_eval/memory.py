"""What memory a generation held at its peak."""

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """The process's resident memory; None where the system does not tell (Linux does)."""
    return _status("VmRSS")


def held_bytes(device: torch.device) -> int | None:
    """What `PeakMemory` counts, now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


class PeakMemory:
    """From its making on: of a CUDA device what tensors held, on a CPU the process's resident memory (Linux only).

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
        return _status("VmHWM") if self._resettable else None

    @staticmethod
    def _reset() -> bool:
        try:
            _CLEAR.write_text("5")  # proc(5): resets the peak resident set size of the process
        except OSError:
            return False
        return True


def _status(field: str) -> int | None:
    if not _STATUS.is_file():
        return None
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def short_of_memory(error: RuntimeError | MemoryError, sentence: str) -> Exception:
    """A MemoryError that says ``sentence`` when that is what ``error`` means, else the error itself."""
    # torch raises an own class on CUDA only.
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return MemoryError(sentence) if short or "not enough memory" in str(error) else error
