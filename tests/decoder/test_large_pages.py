"""Memory in large pages: places of their own, zeros, and given back."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoder.backends import large_pages


def test_every_tensor_has_its_own_zeros() -> None:
    shapes = [(3, 5), (1000, 700), (0, 4), (1,), (40 << 18,), (7, 3)]
    tensors = [
        large_pages.zeros(shape, dtype) for shape in shapes for dtype in (torch.uint8, torch.bfloat16, torch.float32)
    ]
    assert not any(tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors, 1))


def test_a_copy_is_contiguous() -> None:
    matrix = torch.arange(600.0).view(20, 30)
    copy = large_pages.contiguous(matrix.T)
    assert copy.is_contiguous() and torch.equal(copy, matrix.T)


def test_memory_is_given_back() -> None:
    first, second = (large_pages.zeros((1000,), torch.float32) for _ in range(2))
    assert large_pages._last is not None
    mapping = large_pages._last[0]
    del first
    gc.collect()
    assert mapping() is not None and not second.any()
    del second
    gc.collect()
    assert mapping() is None


@pytest.mark.parametrize("count", [100, 3 << 20])
def test_caches_have_memory_of_their_own_that_goes_with_them(count: int) -> None:
    filled, last = large_pages._last, large_pages.zeros((8,), torch.uint8)
    first, second = (large_pages.empty((2, count), torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert first.shape == (2, count) and first.dtype == torch.bfloat16 and first.is_contiguous()
    first.fill_(1), second.fill_(2)
    assert bool((first == 1).all()) and bool((second == 2).all()) and not last.any()
    # Not in the mapping that weights share, which would hold it as long as any of them.
    assert filled is None or large_pages._last is not None
    shared = large_pages._last[0]()
    assert not 0 <= first.data_ptr() - last.data_ptr() < len(shared)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
def test_large_pages_are_asked_for() -> None:
    """As the system lists them: `hg` among a mapping's flags. In a process of its own, whose mappings are few."""
    program = (
        "import torch; from decoder.backends import large_pages; held = large_pages.zeros((1 << 22,), torch.uint8);"
        "print(sum('hg' in line.split() for line in open('/proc/self/smaps') if line.startswith('VmFlags')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1
