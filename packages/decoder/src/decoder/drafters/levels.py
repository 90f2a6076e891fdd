"""From one distribution per level to the tokens of a full tree."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch


def node_count(branching: Sequence[int]) -> int:
    """Nodes of the full tree with ``branching[i]`` children at depth i, root included."""
    return sum(accumulate(branching, mul, initial=1))


def best_tokens(scores: torch.Tensor, branching: Sequence[int]) -> list[list[int]]:
    """The ``branching[i]`` highest-scoring token ids of row i of ``scores`` [levels, V], the best first.

    Tokens that the filters dropped (-inf) are no candidates.
    """
    values, tokens = scores.topk(min(max(branching), scores.shape[-1]), dim=-1)
    levels = []
    for count, row, ids in zip(branching, values.tolist(), tokens.tolist(), strict=True):
        levels.append([token for token, value in zip(ids[:count], row, strict=False) if value > float("-inf")])
    return levels
