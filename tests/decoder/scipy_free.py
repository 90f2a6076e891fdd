"""The one statistical function the tests need."""

import torch


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees > statistic)."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))
