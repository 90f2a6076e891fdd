"""What a verification costs on this machine, by its number of nodes and the length of the text."""

import time
from itertools import accumulate, pairwise

import torch

from decoder.cache.full import FullCache
from decoder.drafters.tuning.running_costs import RunningCosts
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree

WIDEST = 64
_WIDTHS = (1, 4, 16)
_MOST_REPEATS = 5
_RECORDING = 2  # passes of a width before it is replayed: a run as it is, and its recording
_LONG = 0.05  # seconds after which two repeats of a width are enough
_SHORTEST = 1024  # below it the length hardly matters


class VerifyCosts:
    """Seconds per forward pass, measured once whenever the text is four times as long, and kept for all generations.

    Args:
        target: the model; measuring writes behind the committed tokens of a full cache and commits nothing.
    """

    def __init__(self, target: Target):
        self.target = target
        self._costs: dict[tuple, RunningCosts] = {}

    def at(self, cache: FullCache) -> RunningCosts:
        """Costs of 1 node up to the widest tree at the cache's length, which may learn from the steps that follow.

        The model must be borrowed. Costs of 1, 4 and 16 nodes are measured, the others follow their lines.
        """
        weight = self.target.lm_head.weight
        place = (max(cache.length, _SHORTEST).bit_length() // 2, weight.dtype, weight.device, torch.get_num_threads())
        if place not in self._costs:
            self._costs[place] = RunningCosts(self._measure(cache))
        return self._costs[place]

    def _measure(self, cache: FullCache) -> list[float]:
        best = list(accumulate((self._seconds(width, cache) for width in _WIDTHS), max))
        table = [0.0, best[0]]
        for (left, at_left), (right, at_right) in pairwise(zip(_WIDTHS, best, strict=True)):
            # The last slope goes on to the widest tree.
            for nodes in range(left + 1, (right if right < _WIDTHS[-1] else WIDEST) + 1):
                # What a tree is padded with costs as much as its nodes.
                table.append(at_left + (self.target.width(nodes) - left) / (right - left) * (at_right - at_left))
        return table

    def _seconds(self, width: int, cache: FullCache) -> float:
        """The best of a few verifications in a row: the first one of a width also prepares it."""
        # All below the root: a deeper tree might look beyond the model's last position.
        tree = TokenTree(0)
        for token in range(width - 1):
            tree.add(0, token, "measure")
        tree.tokens = [0] * width
        for _ in range(_RECORDING if self.target.recorder is not None else 0):
            self.target.forward([tree], [cache])
        best, began = float("inf"), time.perf_counter()
        for repeat in range(_MOST_REPEATS):
            self.target.wait()
            start = time.perf_counter()
            self.target.forward([tree], [cache])
            self.target.wait()
            end = time.perf_counter()
            best = min(best, end - start)
            if repeat and end - began > _LONG:
                break
        return best
