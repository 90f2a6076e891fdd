"""How often a head's target is among its first guesses."""

import torch
from torch import Tensor
from torchmetrics import Metric


def top_k_accuracy(ranks: Tensor, k: int) -> Tensor:
    """Share (0 to 1) of the targets among the k likeliest tokens; ``ranks`` [n] counts the likelier tokens of each."""
    return (ranks < k).float().mean()


class TopKAccuracy(Metric):
    """Top-1 to top-``max_k`` accuracies [max_k] over all ranks seen, see :func:`top_k_accuracy`."""

    def __init__(self, max_k: int = 3):
        super().__init__()
        self.max_k = max_k
        self.add_state("hits", torch.zeros(max_k, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ranks: Tensor) -> None:
        self.hits += torch.stack([(ranks < k).sum() for k in range(1, self.max_k + 1)])
        self.seen += ranks.numel()

    def compute(self) -> Tensor:
        return self.hits / self.seen
