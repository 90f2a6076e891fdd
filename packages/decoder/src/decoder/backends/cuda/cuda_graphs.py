"""Recorded passes: forward passes of fixed shape as CUDA graphs, so that a step is a few launches and not thousands."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch

from decoder.backends.cuda.host_reads import HostReadsRefused
from decoder.backends.faults import in_words, warn_of_fault
from decoder.backends.transfers import overwrite, upload

Run = Callable[[torch.Tensor, torch.Tensor | None], Any]
"""A forward pass: takes ids [2, T] (tokens, positions) and what each token sees (a mask or `ByPosition.tails`) or None,
on the device; returns its outputs."""

_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BEYOND = 32  # wider passes have a multiple of this width
CUDA = "CUDA kernels"
WIDEST_RECORDED = 256  # tokens of the widest pass that is recorded; chunks of a prompt are longer, and too few


def padded_width(nodes: int) -> int:
    """The width to which a tree of ``nodes`` nodes is padded if passes are recorded: a few widths serve all trees."""
    return next((width for width in _WIDTHS if width >= nodes), -(-nodes // _BEYOND) * _BEYOND)


class Recorder(Protocol):
    """Records the work that a function launches on a device, so that it can be launched again in one call."""

    fault: str | None
    """Why a recording has failed. None is tried afterwards, since CUDA then leaves an unusable memory pool."""

    def warm_up(self, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Run it unrecorded, so that all is compiled; returns whether it can be recorded, and its outputs."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record ``run`` without executing it; returns a function that replays it, and the outputs it fills."""


# All recorders that are alive, on all devices.
_recorders: "WeakSet[CudaGraphs]" = WeakSet()


class CudaGraphs:
    """Records CUDA graphs on one device.

    Each recorder has a memory pool and a stream of its own. If all models of a device shared one recorder, two threads
    that run different models would write over each other's outputs.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.fault: str | None = None
        # Graphs of one recorder are replayed one after the other, so they can share memory for intermediate results.
        self._pool = torch.cuda.graph_pool_handle()
        # Without a stream of our own PyTorch uses one for the whole process. It is on the device that recorded first,
        # and its cuBLAS workspace is freed with any graph that was recorded on it (pytorch issue 193402).
        self._stream = _unused_stream(device)
        _recorders.add(self)
        # A pool whose last graph is gone while a tensor still lives in it cannot be recorded into again, so one graph
        # stays. PyTorch creates lasting state with a process's first graph; made outside of inference mode, it also
        # serves graphs that users record.
        with torch.inference_mode(False), _failure_reported(self, device):
            self._first, _ = self._graph(lambda: torch.zeros(1, device=device))

    def warm_up(self, run: Callable[[], Any]) -> tuple[bool, Any]:
        """See `Recorder.warm_up`; a pass in which the host reads from the device (some MoEs) cannot be recorded."""
        try:
            with HostReadsRefused():
                return True, run()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # Triton raises many types. An error that was not a host read is raised again by the second run below.
            pass
        return False, run()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph, outputs = self._graph(run)
        return graph.replay, outputs

    def _graph(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA freely meanwhile.
        recording = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        # A recording that fails does not restore the current stream, so that is done here.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)), recording:
            outputs = run()
        return graph, outputs


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no living recorder uses; PyTorch hands out a few dozen streams in turn.

    Streams must not be shared: a stream's cuBLAS workspace lies in the memory pool of the first recorder to use it.
    """
    used = {recorder._stream.cuda_stream for recorder in _recorders if recorder.device == device}
    # One try more than there are streams in use must find another, unless PyTorch has no more of them.
    for _ in range(len(used) + 1):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(f"{len(used)} models record on {device}, and it has no stream left for another")


@contextmanager
def _failure_reported(recorder: Recorder, device: torch.device) -> Iterator[None]:
    """A recording that fails in this block sets the recorder's ``fault`` and is reported in a warning."""
    before = sys.exception()
    try:
        yield
    except Exception as error:
        # The first error is the cause: ending a broken recording raises another one.
        cause: BaseException = error
        while cause.__context__ not in (None, before):
            cause = cause.__context__
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        recorder.fault = in_words(cause)
        warn_of_fault(CUDA, device, recorder.fault)


class FixedPass:
    """One kind of pass at one width over one cache: the first call is a warm-up, the second records it, others replay.

    A pass that cannot be recorded is run every time, and so is every pass once a recording has failed.

    The outputs are the same tensors every time. They are valid until any other pass of the same recorder runs, since
    graphs share memory: one may keep intermediate results where another has its outputs.

    Args:
        recorder: the recorder of the device.
        device: the device of the inputs.
    """

    def __init__(self, recorder: Recorder, device: torch.device):
        self.recorder, self.device = recorder, device
        self._ids: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._recordable = True
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None

    @property
    def lasting(self) -> bool:
        """Whether it is worth passing on to another sequence: it is recorded, or known not to be recordable."""
        return self._replay is not None or not self._recordable

    def __call__(self, run: Run, ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """The outputs of ``run`` for the tensors ids [2, T] and mask or None.

        Since ``run`` may be recorded, it must do the same in every call, and whatever changes between calls must be in
        the inputs or in device memory.
        """
        if self._ids is None:
            own_ids = upload(ids, self.device).clone()
            self._mask = None if mask is None else upload(mask, self.device).clone()
            self._recordable, outputs = self.recorder.warm_up(lambda: run(own_ids, self._mask))
            # Set last: if the warm-up fails, the next call must be a warm-up again.
            self._ids = own_ids
            return outputs
        overwrite(self._ids, ids)
        if mask is not None:
            overwrite(self._mask, mask)
        if self._replay is None and self._recordable and self.recorder.fault is None:
            with _failure_reported(self.recorder, self.device):
                self._replay, self._outputs = self.recorder.record(lambda: run(self._ids, self._mask))
        if self._replay is None:
            return run(self._ids, self._mask)
        self._replay()
        return self._outputs
