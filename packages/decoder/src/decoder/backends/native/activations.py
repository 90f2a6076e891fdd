"""Activations on a CPU that give a number the same bits wherever it stands.

PyTorch cuts an elementwise operator over many numbers into a share for each thread, and computes the last numbers of
each share, fewer than its vectors hold, by other code. That code rounds some functions otherwise (SiLU, sigmoid and
GELU, in float32), so the bits of a row would depend on the rows beside it and on the number of threads. GELU also has
other code for numbers that do not stand side by side.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2CLS

from decoder.backends.forwards import is_changed

_ON_ONE_THREAD = 16384  # numbers that PyTorch leaves to one thread: GELU up to 20,000, others 32,768
_VECTORS = 64  # numbers that its loops take at a time, at most: two vectors of bfloat16
_KINDS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}

_GATED = ("Lfm2MLP", "Lfm2MoeMLP")
_BY_PLACE = ("sigmoid", "silu", "gelu", "softplus")


class Activation:
    """An elementwise ``function``, called for as many rows as one thread takes, each a whole number of vectors long."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self._function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., n] to numbers of the same shape."""
        width, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
        rows = functional.pad(rows, (0, -width % _VECTORS)).contiguous()
        parts = rows.split(max(1, _ON_ONE_THREAD // rows.shape[1]))
        out = self._function(rows) if len(parts) == 1 else torch.cat([self._function(part) for part in parts])
        return out[:, :width].reshape(x.shape)


silu = Activation(functional.silu)


def activations(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable]:
    """An `Activation` as the forward of those ``modules`` that are activations without parameters.

    LFM2's gated layers have none as a module: they get a forward that calls one.
    """
    found: dict[nn.Module, Callable] = {}
    for module in modules:
        if type(module) in _KINDS and not any(True for _ in module.parameters()):
            found[module] = Activation(partial(type(module).forward, module))
        elif type(module).__name__ in _GATED and not is_changed(module):
            found[module] = partial(_gated, module)
    return found


def calls_by_place(module: nn.Module) -> str | None:
    """The function of `_BY_PLACE` that an attention layer's own forward calls; None where it calls none."""
    if not type(module).__name__.endswith("Attention"):
        return None
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return next((name for name in _BY_PLACE if code is not None and name in code.co_names), None)


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.w2(silu(module.w1(x)) * module.w3(x))
