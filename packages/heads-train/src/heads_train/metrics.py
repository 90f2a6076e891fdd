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
    """New tokens per verification that the heads' guesses would give on the text seen [max_k + 1].

    At every position the model knows one token itself; of the heads, in turn, each is right with some chance, and what
    follows a wrong one is lost: 1 + the mean over the positions of the sum over heads i of (right_1 ... right_i).

    - The first ``max_k`` entries are greedy, for k = 1 .. max_k guesses per head: right is a head that has the token
      which the model itself finds likeliest there, given the text before it, among its k likeliest.
    - The last is for sampling at temperature 1 with one guess per head: right with the overlap of head and model, which
      is as often as a coupled draft can be.

    Methods without a draft pass (auto, tokenswift-fused, medusa, eagle3) draft so; that of tokenswift adds a token.
    """

    def __init__(self, num_heads: int, max_k: int = 3):
        super().__init__()
        self.num_heads, self.max_k = num_heads, max_k
        self.add_state("accepted", torch.zeros(max_k + 1, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("positions", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, ranks: list[Tensor], overlaps: list[Tensor]) -> None:
        """Per head [batch, targets]: the ranks of the model's likeliest tokens, and the overlaps of the distributions.

        Column t is position t for all, and the last heads have fewer.
        """
        positions = ranks[-1].shape[1]
        stacked = torch.stack([rank[:, :positions] for rank in ranks])
        for k in range(1, self.max_k + 1):
            self.accepted[k - 1] += (stacked < k).cumprod(0).sum()
        self.accepted[-1] += torch.stack([overlap[:, :positions] for overlap in overlaps]).cumprod(0).sum()
        self.positions += stacked[0].numel()

    def compute(self) -> Tensor:
        return 1 + self.accepted / self.positions
