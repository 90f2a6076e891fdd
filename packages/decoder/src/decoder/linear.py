"""Linear layers on a CPU, with weights packed for oneDNN: a step has a handful of rows, and must not pay for each.

Packed weights are read once for all rows (measured with 16 rows: a third of the time of PyTorch's own product), prefill
gains too, and a row's result does not depend on the rows beside it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

_DTYPES = (torch.float32, torch.bfloat16)
_SHARE = 0.5  # of the memory that is available, for the packed copies

Forwards = list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]


def packed_forwards(modules: Iterable[nn.Module]) -> Forwards:
    """Faster forwards for the linear layers among ``modules``, of their weights as they are now.

    They hold a copy of the weights, so there are none where the copies would take more than half of the memory that
    is available. Layers elsewhere than on a CPU, of other dtypes than float32 and bfloat16, or quantised ones have
    none either.
    """
    layers = [module for module in modules if _packable(module)]
    memory = _available_memory()
    if memory is not None and sum(layer.weight.nbytes for layer in layers) > _SHARE * memory:
        return []
    return [(layer, _packed_forward(layer.weight.detach(), layer.bias)) for layer in layers]


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device is a CPU that multiplies bfloat16 itself."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


def _packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight.data
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype in _DTYPES


def _packed_forward(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    # The operators that torch.compile itself emits for frozen linear layers on a CPU.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(x: torch.Tensor) -> torch.Tensor:
        return product(x, packed, bias, "none", [], "")

    return forward


def _available_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


@contextmanager
def replaced(forwards: Forwards) -> Iterator[None]:
    """Each module with its forward of ``forwards``, until the end of the block; blocks nest.

    A module whose forward has been replaced already, by an outer block or by the user, keeps that one.
    """
    plain = [(module, forward) for module, forward in forwards if "forward" not in module.__dict__]
    for module, forward in plain:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, _ in plain:
            del module.__dict__["forward"]
