"""Passes of fixed shape: recorded as CUDA graphs and replayed, so that a step is a few launches and not thousands."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch

from decoder.kernels.fast_paths import RECORDED, in_words, tell_fault
from decoder.kernels.host_reads import HostReadsRefused
from decoder.kernels.transfers import overwrite, upload

Run = Callable[[torch.Tensor, torch.Tensor | None], Any]
"""A pass: from ids [2, T] (tokens, positions) and a mask [T, T] or None, both in device memory, to its outputs."""

_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BEYOND = 32
WIDEST_RECORDED = 256  # tokens of a pass; the chunks of a prompt are longer, and too few to record


def padded_width(nodes: int) -> int:
    """The width at which a tree of ``nodes`` is verified where passes are recorded: a few widths serve all trees."""
    return next((width for width in _WIDTHS if width >= nodes), -(-nodes // _BEYOND) * _BEYOND)


class Recorder(Protocol):
    """Records what a device is asked to do, to ask for it again all at once."""

    fault: str | None
    """Why a recording has failed, after which none is tried: CUDA leaves a memory pool that cannot be recorded into."""

    def rehearse(self, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Run it as it is; whether it could be recorded, and its outputs."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record it without running it: a function that replays it, and the outputs that each replay writes anew."""


# Those that are alive, of all devices.
_recorders: "WeakSet[CudaGraphs]" = WeakSet()


class CudaGraphs:
    """Records on one CUDA device.

    Each has a memory pool and a stream of its own, and shares neither with another one that is alive. One recorder for
    all models of a device would let two threads that run different models write over each other's outputs.
    """

    def __init__(self, device: torch.device):
        self.device, self.fault = device, None
        # Graphs are replayed one after the other, so they share what memory they need in between.
        self._pool = torch.cuda.graph_pool_handle()
        # Without a stream of our own, PyTorch takes one for the whole process: on the device that was the first to
        # record, and with a workspace of cuBLAS that goes when any graph of it does (pytorch issue 193402).
        self._stream = _unused_stream(device)
        _recorders.add(self)
        # A pool that its last graph has left while anything lives in it cannot be recorded into again: one stays. The
        # state that PyTorch makes with a first graph must serve those that users record outside of inference mode too.
        with torch.inference_mode(False), _failure_told(self, device):
            self._first, _ = self._graph(lambda: torch.zeros(1, device=device))

    def rehearse(self, run: Callable[[], Any]) -> tuple[bool, Any]:
        """A pass in which the host reads from the device (some mixtures of experts) cannot be recorded."""
        try:
            with HostReadsRefused():
                return True, run()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # Triton raises many types. What was no read of the host fails again below, outside of any check.
            pass
        return False, run()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph, outputs = self._graph(run)
        return graph.replay, outputs

    def _graph(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may do what they like meanwhile.
        recording = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        # A recording that fails does not go back to the stream it came from.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)), recording:
            outputs = run()
        return graph, outputs


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which no other recorder that is alive records: PyTorch hands out a few dozen in turn.

    The workspace of cuBLAS belongs to a stream, and lies in the memory pool of the recorder that was first to use it.
    """
    used = {recorder._stream.cuda_stream for recorder in _recorders if recorder.device == device}
    # At most one round, through those that are in use and one more.
    for _ in range(len(used) + 1):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(f"{len(used)} models record on {device}, and it has no stream left for another")


@contextmanager
def _failure_told(recorder: Recorder, device: torch.device) -> Iterator[None]:
    """A recording that fails in this block is the recorder's last, and is told in a warning."""
    before = sys.exception()
    try:
        yield
    except Exception as error:
        # What went wrong first here: ending a broken recording fails, too.
        cause: BaseException = error
        while cause.__context__ not in (None, before):
            cause = cause.__context__
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        recorder.fault = in_words(cause)
        tell_fault(RECORDED, device, recorder.fault)


class FixedPass:
    """One kind of pass at one width over one cache: run as it is at first, recorded the second time, then replayed.

    One that cannot be recorded is run as it is every time, and so are all that come after a recording that failed.

    Its outputs are the same tensors every time, and hold until any pass of the same recorder is run: what one graph
    needs in between may lie where another has its outputs.

    Args:
        recorder: of the device.
        device: where the inputs are.
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
        """Whether it is worth keeping for another text: recorded, or known to be none that can be."""
        return self._replay is not None or not self._recordable

    def __call__(self, run: Run, ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """Outputs of ``run`` on tensors ids [2, T] and mask [T, T]; ``run`` must be the same function every time.

        It may be recorded, so all that changes from one call to the next must be in the inputs or in device memory.
        """
        if self._ids is None:
            own_ids = upload(ids, self.device).clone()
            self._mask = None if mask is None else upload(mask, self.device).clone()
            self._recordable, outputs = self.recorder.rehearse(lambda: run(own_ids, self._mask))
            # A rehearsal that failed has prepared nothing, and the next call is the first one again.
            self._ids = own_ids
            return outputs
        overwrite(self._ids, ids)
        if mask is not None:
            overwrite(self._mask, mask)
        if self._replay is None and self._recordable and self.recorder.fault is None:
            with _failure_told(self.recorder, self.device):
                self._replay, self._outputs = self.recorder.record(lambda: run(self._ids, self._mask))
        if self._replay is None:
            return run(self._ids, self._mask)
        self._replay()
        return self._outputs
