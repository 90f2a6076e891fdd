"""Products of the experts that rows have chosen, in one call of the native library."""

import threading
from collections.abc import Sequence
from ctypes import byref

import torch

from decoder.backends.memory import floats
from decoder.backends.native import library as native
from decoder.backends.native.packed_weight import NativeWeight
from decoder.backends.native.structures import Expert, Experts, PackedWeight


class Room(threading.local):
    """Memory between calls, a thread's own."""

    numbers: torch.Tensor | None = None

    def address(self, numbers: int) -> int:
        """Where so many float32 numbers have room."""
        if self.numbers is None or len(self.numbers) < numbers:
            self.numbers = floats(numbers)
        return self.numbers.data_ptr()


ROOM = Room()


class ExpertProducts:
    """The experts of a layer.

    Args:
        weights: by expert those of gate, of what it gates, if it gates anything, and of what is behind them.
        gating: how experts are gated, by the names of the library's `Experts`.
    """

    def __init__(self, weights: Sequence[Sequence[NativeWeight]], gating: dict[str, float]):
        self.weights, self.gating, self.dtype = weights, gating, weights[0][0].dtype
        listed = self.experts()
        self._structure = Experts((Expert * len(listed))(*listed), count=len(listed), **gating)

    @property
    def kind(self) -> type:
        """How the weights are held."""
        return type(self.weights[0][0])

    def experts(self) -> list[Expert]:
        """What the library reads of each."""
        found = []
        for gate, *up, down in self.weights:
            found.append(Expert(gate.product, up[0].product if up else PackedWeight(), down.product))
        return found

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts ``ids`` [T, k] of rows [..., d] give, times ``weights`` [T, k]."""
        x = hidden.to(self.dtype).contiguous()
        ids, weights, out = ids.contiguous(), weights.float().contiguous(), torch.empty_like(x)
        self._structure.used, rows = ids.shape[1], len(ids)
        given, library = byref(self._structure), native.library()
        at = (one.data_ptr() for one in (ids, weights, out))
        room = ROOM.address(library.expert_numbers(given, rows))
        library.run_experts(given, x.data_ptr(), rows, *at, room, x.dtype == torch.bfloat16, native.threads())
        return out.to(hidden.dtype)
