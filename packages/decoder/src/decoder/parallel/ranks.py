"""The processes that share a model run the same program; what the host of one of them reads, all of them use.

Every pass of the model needs all processes at once, so they must take the same decisions. Decisions follow from what
the host reads: numbers of a device, the clock, the memory, files. `Ranks.agree` and `Ranks.first` give every process
what the first one has read. All that follows from it is then the same everywhere, and is not sent again.
"""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

TIMEOUT = "TOKENSWIFT_TENSOR_PARALLEL_TIMEOUT"
"""The environment variable that says for how many seconds processes wait for another one that does nothing."""
# A process may wait for the reader of its output, and all others for it. One that ends is noticed at once.
_PATIENCE = timedelta(days=1)
_LOST = "another process of this run has ended or cannot be reached any more: its own message says why"
_SILENT = f"another process of this run has been silent for longer than {TIMEOUT} says"
_TIME_TO_ASK = 2.0  # seconds for which the process that keeps what was told waits for the others


class Ranks:
    """The processes that share a model, numbered from 0, and this one's number; without a group it is alone.

    Args:
        group: a process group for messages between hosts (gloo).

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.size: int = 1 if group is None else dist.get_world_size(group)

    def agree(self, value: T) -> T:
        """The ``value`` of rank 0, which must be small and picklable."""
        if self.size == 1:
            return value
        held = [value if not self.rank else None]
        dist.broadcast_object_list(held, 0, group=self._group)
        return held[0] if self.rank else value  # type: ignore[return-value]

    def first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises on rank 0; the others do not call it."""
        if self.size == 1:
            return function()
        value, error = None, None
        if not self.rank:
            try:
                value = function()
            except Exception as raised:
                error = _portable(raised)
        value, error = self.agree((value, error))
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # there is a value where there is no error

    def together(self, function: Callable[[], T]) -> T:
        """What ``function`` returns here; where it raises ValueError or OSError on any rank, all raise that."""
        if self.size == 1:
            return function()
        value, error = None, None
        try:
            value = function()
        except (ValueError, OSError) as raised:
            error = _portable(raised)
        errors = [one for one in self._gather(error) if one is not None]
        if errors:
            raise errors[0]
        return value  # type: ignore[return-value]

    def refuse_unequal(self, given: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks where one was given something else than rank 0.

        Args:
            given: by name in words, what was given; values are equal if their representations are.
        """
        if self.size == 1:
            return
        everyone = self._gather({name: repr(value) for name, value in given.items()})
        for rank, other in enumerate(everyone):
            for name in other:
                if other[name] != everyone[0].get(name):
                    raise ValueError(
                        f"process {rank} was given another {name} than process 0: "
                        f"start all of them with the same command and the same files"
                    )

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return number if self.size == 1 else min(self._gather(number))

    def all(self, holds: bool) -> bool:
        """Whether something holds on all ranks."""
        return holds if self.size == 1 else all(self._gather(holds))

    def _gather(self, value: Any) -> list[Any]:
        everyone = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone


ALONE = Ranks()
"""For a model that one process holds."""


@contextmanager
def linked() -> Iterator[None]:
    """A block in which the loss of another process, or its silence, is a ConnectionError of one sentence."""
    try:
        yield
    except Exception as error:
        if not is_lost(error):
            raise
        silent = "timed out" in str(error).lower()
        raise ConnectionError(_SILENT if silent else _LOST) from error


@contextmanager
def ending_in_words() -> Iterator[None]:
    """A block in which SIGTERM is the ConnectionError of `linked`, for programs that torchrun has started.

    It sends SIGTERM to all others as soon as one has ended, often before these notice that themselves. A block that an
    error has ended leaves SIGTERM ignored, so that the error can be told; torchrun waits half a minute for that.

    Nothing changes outside of the main thread, where Python takes no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError(_LOST)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def is_first_to_tell(sentence: str) -> bool:
    """Whether no other process of this run has told this sentence; it needs none of the others."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    try:
        store, key = dist.distributed_c10d._get_default_store(), f"told: {sentence}"
        first = store.add(key, 1) == 1
        # What was told goes with the process that keeps it, which gives the others time to ask.
        end = time.monotonic() + _TIME_TO_ASK
        while not dist.get_rank() and store.add(key, 0) < dist.get_world_size() and time.monotonic() < end:
            time.sleep(0.02)
        return first
    except RuntimeError:
        # The process that kept what was told is gone.
        return True


def _portable(error: Exception) -> Exception:
    """The error, or where it cannot be sent one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def join(device: torch.device) -> Ranks:
    """Meet the other processes that torchrun has started, unless the program has done so before.

    Args:
        device: of the type on which they will run.

    Raises:
        ValueError: this process was started alone, or `TIMEOUT` is no number of seconds.
        ConnectionError: the others cannot be reached.
    """
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(
                "tensor parallelism needs a process per device: start them by torchrun --nproc-per-node N in place of "
                "python"
            )
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=_patience())
        except Exception as error:
            raise ConnectionError(f"the other processes cannot be reached: {_first_line(error)}") from error
    return _all_processes(dist.group.WORLD)


def _patience() -> timedelta:
    """How long processes wait for each other."""
    given = os.environ.get(TIMEOUT)
    if given is None:
        return _PATIENCE
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _PATIENCE.total_seconds():
        raise ValueError(f"{TIMEOUT} must be seconds, above 0 and at most a day, not {given}")
    return timedelta(seconds=seconds)


@lru_cache(maxsize=1)
def _all_processes(world: Any) -> Ranks:
    """All processes of the default group, with a group for messages between hosts."""
    return Ranks(dist.new_group(backend="gloo", timeout=_patience())) if dist.get_world_size(world) > 1 else ALONE


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def ranks_of(model: torch.nn.Module) -> Ranks:
    """The processes that share a model, as its parameters show: one where they are whole.

    Raises:
        ValueError: it is shared otherwise than by plain tensor parallelism over all processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    from torch.distributed.tensor import DTensor

    meshes = {weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)}
    if not meshes:
        return ALONE
    if any(mesh.ndim != 1 or mesh.size() != dist.get_world_size() for mesh in meshes):
        raise ValueError("only tensor parallelism over all processes can be decoded: load the model without any other")
    return _all_processes(dist.group.WORLD)
