"""What the torchmetrics classes share."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torchmetrics import Metric


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None when there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Ratio(Metric):
    """A quotient of sums that accumulate over updates and devices; NaN while the divisor is 0.

    Args:
        numerators: how many sums share the divisor; the result has as many entries, one is a scalar.
    """

    full_state_update = False

    def __init__(self, numerators: int | None = None, **kwargs):
        super().__init__(**kwargs)
        shape = () if numerators is None else (numerators,)
        self.add_state("numerator", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("denominator", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> torch.Tensor:
        return self.numerator / self.denominator


class MeanOverTexts(Ratio):
    """The mean of a measure over texts, one per update; texts for which it is None do not count."""

    @abstractmethod
    def measure(self, text) -> float | None:
        """The measure of one text."""

    def update(self, text) -> None:
        value = self.measure(text)
        if value is not None:
            self.numerator += value
            self.denominator += 1
