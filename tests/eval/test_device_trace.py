"""The share of time in which a device had nothing to do, from made-up operations and from a real profile of a CPU."""

import time

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ts_eval.measuring.device_trace import DeviceTrace, Operation, covered_seconds, operations


def microseconds(found: list[Operation]) -> float:
    return covered_seconds(found) * 1e6


def test_gaps_between_operations_do_not_count():
    assert microseconds([Operation(1, 0, 10), Operation(2, 14, 20), Operation(3, 30, 40)]) == pytest.approx(26)


def test_a_launched_graph_runs_from_its_first_kernel_to_its_last():
    graph = [Operation(7, 10, 12), Operation(7, 18, 20), Operation(7, 13, 15)]
    assert microseconds([Operation(1, 0, 5), *graph]) == pytest.approx(15)
    # Launches that are not known are not one.
    assert microseconds([Operation(0, start, end) for _, start, end in graph]) == pytest.approx(6)


def test_what_overlaps_counts_once_and_order_does_not_matter():
    found = [Operation(1, 20, 30), Operation(2, 0, 10), Operation(3, 2, 6), Operation(4, 8, 12)]
    assert microseconds(found) == microseconds(found[::-1]) == pytest.approx(22)


def test_without_any_operation_nothing_is_known():
    assert covered_seconds([]) is None


def test_a_profiles_operations_are_read_and_its_mere_ranges_are_not():
    with profile(activities=[ProfilerActivity.CPU]) as made, record_function("around all"):
        for _ in range(3):
            torch.ones(50, 50) @ torch.ones(50, 50)
    found = operations(made.events(), DeviceType.CPU)
    assert len(found) >= 3 and all(operation.start <= operation.end for operation in found)
    assert len(found) == sum(event.name != "around all" for event in made.events())
    assert operations(made.events(), DeviceType.CUDA) == []


@pytest.mark.gpu
def test_on_a_gpu_a_host_that_sleeps_leaves_it_idle():
    numbers = torch.ones(4096, 4096, device="cuda")

    def shares(pause: float) -> tuple[float, float]:
        """Seconds in all, and those that the device ran."""
        with DeviceTrace() as trace:
            start = time.perf_counter()
            for _ in range(5):
                numbers @ numbers
                torch.cuda.synchronize()
                time.sleep(pause)
            seconds = time.perf_counter() - start
        return seconds, trace.busy_seconds

    shares(0.0)
    quick, slow = shares(0.0), shares(0.02)
    assert 0.5 * quick[0] < quick[1] < quick[0]
    assert 0 < slow[1] < 0.5 * slow[0]


@pytest.mark.gpu
def test_on_a_gpu_a_graphs_kernels_are_one_launch():
    numbers, graph = torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    numbers.mul_(1.0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(50):
            numbers.mul_(1.0)
    with profile(activities=[ProfilerActivity.CUDA]) as made:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found = operations(made.events(), DeviceType.CUDA)
    assert len(found) == 150 and len({operation.launch for operation in found}) == 3
