"""What has failed, in words, and that users are told of it once."""

import warnings
from collections.abc import Callable

import torch

_warned: set[tuple[str, torch.device]] = set()


def fault_of(test: Callable[[], str | None]) -> str | None:
    """The outcome of a test. An exception of any type counts as a fault, except that memory has run out."""
    try:
        return test()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Compilers, linkers, drivers and interpreters raise many unrelated types for one fact.
        return in_words(error)


def holds(trial: Callable[[], bool]) -> bool:
    """Whether somebody's function gives in a trial what is expected; what is another function may fail in any way."""
    try:
        return trial()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False


def warn_of_fault(name: str, device: torch.device, fault: str) -> None:
    """Warn that a backend has failed, once in a process for each and each device."""
    if (name, device) in _warned:
        return
    _warned.add((name, device))
    warnings.warn(
        f"{name} left off on {device}: {fault}. Decoding stays right but is slower. Please report this in an issue, "
        f"with what `python -m decoder doctor --model M` prints for your model",
        stacklevel=2,
    )


def in_words(error: BaseException) -> str:
    """The type of an exception and the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
