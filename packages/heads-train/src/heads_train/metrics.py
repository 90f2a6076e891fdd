"""How often a head's target is among its first guesses, and what that is worth when decoding."""

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


class TokensPerStep(Metric):
    """New tokens per verification [max_k] that the heads' guesses imply, for trees of 1 .. ``max_k`` guesses per head.

    Entry k - 1 is for the tree (1, k, k, ...): at every position, how many heads in a row, from the first on, have
    their target among their k likeliest tokens, on average, plus two: the draft pass's own next token, taken as
    always accepted, and the token that the verification adds. So it is what greedy decoding of this very text would
    give with a partial cache as good as the full one. Methods without a draft pass (medusa, tokenswift-fused, auto)
    draft no such first token: theirs is one less.
    """

    def __init__(self, num_heads: int, max_k: int = 3):
        super().__init__()
        self.num_heads, self.max_k = num_heads, max_k
        self.add_state("accepted", torch.zeros(max_k, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("positions", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ranks: list[Tensor]) -> None:
        """``ranks``: per head [batch, targets]; column t is position t for all, and the last heads have fewer."""
        positions = ranks[-1].shape[1]
        stacked = torch.stack([rank[:, :positions] for rank in ranks])
        for k in range(1, self.max_k + 1):
            self.accepted[k - 1] += (stacked < k).cumprod(0).sum()
        self.positions += stacked[0].numel()

    def compute(self) -> Tensor:
        return 2 + self.accepted / self.positions
