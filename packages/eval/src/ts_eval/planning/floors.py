"""The least time of a step: reading weights and caches once, and copying what is in host memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoder.parts import CacheForm
from ts_eval.planning.model_shape import ModelShape

if TYPE_CHECKING:
    from ts_eval.planning.plan import MethodPlan


@dataclass(frozen=True)
class Gpu:
    """Bytes per second of its memory, bytes, and bytes per second from the host, as the maker states them."""

    bandwidth: float
    memory: float
    link: float


GPUS = {
    "A100": Gpu(2.039e12, 80e9, 32e9),  # 80 GB, SXM, PCIe 4; NVIDIA's data sheets, as for the others
    "H100": Gpu(3.35e12, 80e9, 64e9),  # SXM, PCIe 5
    "H200": Gpu(4.8e12, 141e9, 64e9),
}
LINK = 32e9
"""Bytes per second from the host to any other device: PCIe 4 with 16 lanes."""


@dataclass(frozen=True)
class StepFloor:
    """What a step must read and copy, and how long that takes at least.

    Args:
        model: the model's shape.
        form: how the full cache is kept.
        bandwidths: bytes per second of memories, by the name of the device.
    """

    model: ModelShape
    form: CacheForm
    bandwidths: Mapping[str, float]

    def read(self, plan: "MethodPlan", tokens: float) -> float:
        """Bytes that a step of a method reads and writes of the device's memory behind so many tokens."""
        cache, kept = tokens * self.model.cache_bytes(1), self._kept(tokens)
        if self.form.kv_dtype:
            # Codes are read, and written if they arrive from the host; a layer is restored, scaled and read.
            return plan.step_bytes(4 * cache + kept * (1 + self.form.offload))
        return plan.step_bytes(cache if self.form.plain else 2 * cache)

    def copied(self, tokens: float) -> float:
        """Bytes that a step copies from the host."""
        return self._kept(tokens) if self.form.offload else 0.0

    def seconds(self, plan: "MethodPlan", tokens: float, place: str) -> float:
        """The least time of a step: what is copied arrives while the rest is read."""
        link = GPUS[place].link if place in GPUS else LINK
        return max(self.read(plan, tokens) / self.bandwidths[place], self.copied(tokens) / link)

    def _kept(self, tokens: float) -> float:
        return tokens * self.model.kept_bytes(1, self.form)
