"""Linear layers on a CPU, with weights packed for oneDNN: a step has a handful of rows, and must not pay for each.

Packed weights are read once for all rows (measured with 16 rows: a third of the time of PyTorch's own product), and
prefill gains too. Where oneDNN need not split a row's sum (layers of the reference model's size), a row has the same
bits whatever rows stand beside it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn

_SHARE = 0.5  # of the memory that is available, for the packed copies


class PackedLinear:
    """The forward of a linear layer on a copy of its weights, as they were when last packed."""

    def __init__(self, module: nn.Linear):
        self.pack(module)

    def pack(self, module: nn.Linear) -> None:
        """Take in the layer's weights anew."""
        self._weight = None  # of two copies at a time none is needed
        # The operators that torch.compile itself emits for frozen linear layers on a CPU.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
        self._bias = None if module.bias is None else module.bias.detach().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")


# Decoders of one model share its packed layers: copies of their own would multiply the memory.
_packed: WeakKeyDictionary[nn.Linear, PackedLinear] = WeakKeyDictionary()


def packed_layers(modules: Iterable[nn.Module]) -> dict[nn.Linear, PackedLinear]:
    """Faster forwards for the linear layers among ``modules``, of their weights as they are now.

    They hold a copy of the weights, so there are none where new copies would take more than half of the memory that is
    available. Layers elsewhere than on a CPU, of other dtypes than float32 and bfloat16, or quantised ones have none.
    """
    layers = [module for module in modules if _packable(module)]
    memory = available_memory()
    if memory is not None and sum(m.weight.nbytes for m in layers if m not in _packed) > _SHARE * memory:
        return {}
    for layer in layers:
        if layer in _packed:
            _packed[layer].pack(layer)
        else:
            _packed[layer] = PackedLinear(layer)
    return {layer: _packed[layer] for layer in layers}


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the device is a CPU that multiplies bfloat16 itself."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


def _packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight.data
    if type(weight) is not torch.Tensor or weight.device.type != "cpu":
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def available_memory() -> int | None:
    """Bytes that this process may still take (Linux); None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        # A container may have less than the machine.
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def under_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextmanager
def replaced(layers: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Each layer with its other forward, until the end of the block; blocks nest.

    A module whose forward has been replaced already, by an outer block or by the user, keeps that one. Under autocast
    all do: it chooses other dtypes.
    """
    if under_autocast():
        layers = {}
    plain = [(layer, other) for layer, other in layers.items() if "forward" not in layer.__dict__]
    for layer, other in plain:
        layer.__dict__["forward"] = other
    try:
        yield
    finally:
        for layer, _ in plain:
            del layer.__dict__["forward"]
