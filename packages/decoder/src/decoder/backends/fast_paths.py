"""The registry of fast paths: which of them a model uses on its device, and why not the others.

A fast path is a kernel, a library call or a recording that computes the same as a plain function in less time. Each is
tested once per device, dtype and shape before it is used, since on a card or with a driver or library version that
nobody has tried it may give wrong numbers or fail in any way.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch

SPLIT_KV = "split-KV attention"
NATIVE = "native attention"
DRAWS = "native drawing"
ROTARY = "fused rotary embedding"
NORMS = "fused norms"
PACKED = "packed products"
FUSED = "fused layers"
MODEL = "fused model"
RECORDED = "recorded passes"
FLATTENED = "texts in one pass"
BITWISE = "bit for bit"

Test = Callable[[], str | None]
"""Compares a fast path with the plain function: None if they agree, otherwise what is wrong, in a few words."""


@dataclass(frozen=True)
class FastPath:
    """One entry of the registry.

    Attributes:
        name: one of the names above.
        on: whether it is used.
        reason: what it is used for, or why it is not used.
    """

    name: str
    on: bool
    reason: str


# Outcomes of tests, which are made once in a process: libraries and drivers do not change while it runs.
_outcomes: dict[Hashable, str | None] = {}
_warned: set[tuple[str, torch.device]] = set()


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
        """Register a path as used or not, without a test."""
        self._paths[name] = FastPath(name, on, reason)

    def use(self, name: str, reason: str) -> None:
        """Register a path as used."""
        self.enter(name, True, reason)

    def leave_off(self, name: str, reason: str) -> None:
        """Register a path as not used because it is not for this model or device, which is no fault."""
        self.enter(name, False, reason)

    def passes_test(self, name: str, key: Hashable, test: Test, covers: str) -> bool:
        """Test a path and register the outcome; returns whether it passed. A fault is reported in a warning.

        Args:
            name: the path.
            key: what the outcome depends on besides path and device, such as dtypes and shapes. Each key is tested
                once in a process.
            test: the test.
            covers: what the path is used for if it passes, the ``reason`` of its entry.
        """
        key = (name, self.device, torch.get_num_threads() if self.device.type == "cpu" else None, key)
        if key not in _outcomes:
            _outcomes[key] = fault_of(test)
            if _outcomes[key] is not None:
                warn_of_fault(name, self.device, _outcomes[key])
        fault = _outcomes[key]
        self._paths[name] = FastPath(name, fault is None, covers if fault is None else fault)
        return fault is None


def fault_of(test: Test) -> str | None:
    """The outcome of a test. An exception of any type counts as a fault, except that memory has run out."""
    try:
        return test()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Compilers, linkers, drivers and interpreters raise many unrelated types for one fact.
        return in_words(error)


def in_words(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def warn_of_fault(name: str, device: torch.device, fault: str) -> None:
    """Warn that a path has failed, once in a process for each path and device."""
    if (name, device) in _warned:
        return
    _warned.add((name, device))
    warnings.warn(
        f"{name} left off on {device}: {fault}. Decoding stays right but is slower. Please report this in an issue, "
        f"with what `python -m decoder doctor --model M` prints for your model",
        stacklevel=2,
    )
