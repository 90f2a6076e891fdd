"""What a verification costs on this machine, by its number of nodes and the length of the text."""

import time
from bisect import bisect_left

from decoder.full_cache import FullCache
from decoder.target import Target
from decoder.token_tree import TokenTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 2
_SHORTEST = 1024  # below it the length hardly matters


class VerifyCosts:
    """Seconds per forward pass, measured once whenever the text is four times as long, and kept for all generations.

    Args:
        target: the model; measuring writes behind the committed tokens of a full cache and commits nothing.
    """

    def __init__(self, target: Target):
        self.target = target
        self._tables: dict[int, list[float]] = {}

    def at(self, cache: FullCache) -> list[float]:
        """Seconds to verify n nodes at the cache's length, for n from 1 to the widest tree; entry 0 is unused.

        The model must be borrowed. Between the measured widths costs are interpolated, and never fall.
        """
        magnitude = max(cache.length, _SHORTEST).bit_length() // 2
        if magnitude not in self._tables:
            self._tables[magnitude] = self._measure(cache)
        return self._tables[magnitude]

    def _measure(self, cache: FullCache) -> list[float]:
        best = [float("inf")] * len(WIDTHS)
        for _ in range(_REPEATS):
            for i, width in enumerate(WIDTHS):
                # All below the root: a deeper tree might look beyond the model's last position.
                tree = TokenTree(0)
                for token in range(width - 1):
                    tree.add(0, token, "measure")
                tree.tokens = [0] * width
                self.target.wait()
                start = time.perf_counter()
                self.target.forward(tree, cache)
                self.target.wait()
                best[i] = min(best[i], time.perf_counter() - start)
        for i in range(1, len(best)):
            best[i] = max(best[i], best[i - 1])
        table = [0.0]
        for nodes in range(1, WIDTHS[-1] + 1):
            right = bisect_left(WIDTHS, nodes)
            left = max(0, right - 1)
            share = 1.0 if left == right else (nodes - WIDTHS[left]) / (WIDTHS[right] - WIDTHS[left])
            table.append(best[left] + share * (best[right] - best[left]))
        return table
