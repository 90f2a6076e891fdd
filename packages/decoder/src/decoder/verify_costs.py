"""What a verification costs on this machine, by its number of nodes and the length of the text."""

import time
from bisect import bisect_left

from decoder.full_cache import FullCache
from decoder.running_costs import RunningCosts
from decoder.target import Target
from decoder.token_tree import TokenTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_MOST_REPEATS = 5
_LONG = 0.05  # seconds after which two repeats of a width are enough
_SHORTEST = 1024  # below it the length hardly matters


class VerifyCosts:
    """Seconds per forward pass, measured once whenever the text is four times as long, and kept for all generations.

    Args:
        target: the model; measuring writes behind the committed tokens of a full cache and commits nothing.
    """

    def __init__(self, target: Target):
        self.target = target
        self._costs: dict[int, RunningCosts] = {}

    def at(self, cache: FullCache) -> RunningCosts:
        """Costs of 1 node up to the widest tree at the cache's length, which may learn from the steps that follow.

        The model must be borrowed. Between the measured widths costs are interpolated, and never fall.
        """
        magnitude = max(cache.length, _SHORTEST).bit_length() // 2
        if magnitude not in self._costs:
            self._costs[magnitude] = RunningCosts(self._measure(cache))
        return self._costs[magnitude]

    def _measure(self, cache: FullCache) -> list[float]:
        best = [self._seconds(width, cache) for width in WIDTHS]
        for i in range(1, len(best)):
            best[i] = max(best[i], best[i - 1])
        table = [0.0]
        for nodes in range(1, WIDTHS[-1] + 1):
            right = bisect_left(WIDTHS, nodes)
            left = max(0, right - 1)
            share = 1.0 if left == right else (nodes - WIDTHS[left]) / (WIDTHS[right] - WIDTHS[left])
            table.append(best[left] + share * (best[right] - best[left]))
        return table

    def _seconds(self, width: int, cache: FullCache) -> float:
        """The best of a few verifications in a row: the first one of a width also prepares it."""
        # All below the root: a deeper tree might look beyond the model's last position.
        tree = TokenTree(0)
        for token in range(width - 1):
            tree.add(0, token, "measure")
        tree.tokens = [0] * width
        best, began = float("inf"), time.perf_counter()
        for repeat in range(_MOST_REPEATS):
            self.target.wait()
            start = time.perf_counter()
            self.target.forward(tree, cache)
            self.target.wait()
            end = time.perf_counter()
            best = min(best, end - start)
            if repeat and end - began > _LONG:
                break
        return best
