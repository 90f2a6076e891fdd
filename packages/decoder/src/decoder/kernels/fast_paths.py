"""The registry of fast paths: what takes the place of the obvious functions on this device, and why not.

A fast path is a kernel, a library call or a recording that gives the numbers of an obvious function sooner. Each is
tested once per device, dtype and shape before it is used, since a card, a driver or a version of a library that nobody
has tried may compute something else, or fail in any way.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch

SPLIT_KV = "split-KV attention"
ROTARY = "fused rotary embedding"
NORMS = "fused norms"
PACKED = "packed products"
RECORDED = "recorded passes"
FLATTENED = "texts in one pass"
BITWISE = "bit for bit"

Test = Callable[[], str | None]
"""Compares a fast path with the obvious function: None where they agree, else what is wrong in a few words."""


@dataclass(frozen=True)
class FastPath:
    """One entry of the registry.

    Attributes:
        name: one of the names above.
        on: whether it is used.
        reason: why it is not used, or what it covers.
    """

    name: str
    on: bool
    reason: str


# Libraries and drivers stay the same while a process runs, so device, dtype and shapes say which test it was.
_outcomes: dict[Hashable, str | None] = {}
_told: set[tuple[str, torch.device]] = set()


class FastPaths:
    """Which fast paths one model uses on its device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._paths: dict[str, FastPath] = {}

    def __iter__(self) -> Iterator[FastPath]:
        return iter(self._paths.values())

    def __getitem__(self, name: str) -> FastPath:
        return self._paths[name]

    def enter(self, name: str, on: bool, reason: str) -> None:
        """Enter a path without a test."""
        self._paths[name] = FastPath(name, on, reason)

    def use(self, name: str, reason: str) -> None:
        """Enter a path as used."""
        self.enter(name, True, reason)

    def leave_off(self, name: str, reason: str) -> None:
        """Enter a path as one that is not for this model or device, which is no fault."""
        self.enter(name, False, reason)

    def passes(self, name: str, key: Hashable, test: Test, covers: str) -> bool:
        """Whether a path passes its test; the outcome is entered, and a fault is told in a warning.

        Args:
            key: what the outcome depends on besides the path and the device: dtypes and shapes. It is tested once.
            covers: what to enter as the reason of a path that is used.
        """
        key = (name, self.device, torch.get_num_threads() if self.device.type == "cpu" else None, key)
        if key not in _outcomes:
            _outcomes[key] = fault_of(test)
            if _outcomes[key] is not None:
                tell_fault(name, self.device, _outcomes[key])
        fault = _outcomes[key]
        self._paths[name] = FastPath(name, fault is None, covers if fault is None else fault)
        return fault is None


def fault_of(test: Test) -> str | None:
    """The outcome of a test; an exception of any type is a fault, but for memory that runs out."""
    try:
        return test()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Compilers, linkers, drivers and interpreters raise many unrelated types for one fact.
        return in_words(error)


def in_words(error: BaseException) -> str:
    """The type of an exception and the first line of what it says."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def tell_fault(name: str, device: torch.device, fault: str) -> None:
    """Warn, once for each path and device of this process, that a path has failed."""
    if (name, device) in _told:
        return
    _told.add((name, device))
    warnings.warn(
        f"{name} left off on {device}: {fault}. Decoding stays right but is slower. Please report this in an issue, "
        f"with what `python -m decoder doctor --model M` prints for your model",
        stacklevel=2,
    )
