"""How long a CUDA device had something to do, from a trace of what ran on it."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile


class Operation(NamedTuple):
    """Something that ran on a device, in microseconds; of a graph that was launched all operations have one launch."""

    launch: int
    start: float
    end: float


class DeviceTrace:
    """Traces a CUDA device in a `with` block; the trace is of what the device ran, and not of the host.

    A launched graph counts as one operation, from the beginning of its first kernel to the end of its last: what lies
    between them is the device's own. All other gaps, the shortest included, count as idle, so that the device is
    rather told too idle than too busy; tracing itself makes launches dearer too.

    Attributes:
        busy_seconds: how long something ran; None before the end, and where nothing was traced.
    """

    def __init__(self) -> None:
        self.busy_seconds: float | None = None

    def __enter__(self) -> "DeviceTrace":
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()
        return self

    def __exit__(self, error: type | None, *rest) -> None:
        self._profile.stop()
        if error is None:
            self.busy_seconds = covered_seconds(operations(self._profile.events(), DeviceType.CUDA))


def operations(events: Iterable[FunctionEvent], device: DeviceType) -> list[Operation]:
    """What of a profile's events ran on that kind of device; ranges that merely span others are left out."""
    return [
        Operation(event.id, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == device and not event.is_user_annotation
    ]


def covered_seconds(found: Sequence[Operation]) -> float | None:
    """The time that operations cover, those of one launch from the first to the last; None without any."""
    spans: dict[int, list[float]] = {}
    nameless = count(-1, -1)
    for launch, start, end in found:
        # 0 stands for a launch that is not known.
        span = spans.setdefault(launch or next(nameless), [start, end])
        span[:] = min(span[0], start), max(span[1], end)
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans.values()):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1e6 if spans else None
