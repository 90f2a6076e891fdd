"""What a verification costs on this machine, by its number of nodes and the length of the text."""

import time
from itertools import accumulate, pairwise

import torch

from decoder.cache.full import FullCache
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree

WIDEST = 64
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_MOST_REPEATS = 5
_RECORDING = 2  # passes of a width before it is replayed: one runs as it is, one is recorded
_LONG = 0.05  # seconds after which two repeats of a width are enough
_NEVER = 1e6  # the seconds that stand for a tree too wide for a pass
_SHORTEST = 1024  # tokens below which the length of the text hardly matters


class VerifyCosts:
    """Seconds per forward pass, measured once whenever the text is twice as long, and kept for all generations.

    Measuring writes behind the committed tokens of a full cache and commits nothing.
    """

    def __init__(self, target: Target):
        self.target = target
        self._tables: dict[tuple, dict[int, list[float]]] = {}  # by how many texts share a pass

    def at(self, cache: FullCache, texts: int = 1) -> list[float]:
        """Seconds of verifying n nodes, for n up to the widest tree; entry 0 is unused. The model must be patched.

        Where ``texts`` are verified in one pass, with a tree of n nodes each, it is the share of one of them.
        """
        weight = self.target.lm_head.weight
        # With the root, which is not committed: a prompt of 2,048 tokens is measured once, and not again a step later.
        length = max(cache.length + 1, _SHORTEST)
        key = (length.bit_length(), weight.dtype, weight.device, torch.get_num_threads())
        if key not in self._tables:
            self._tables[key] = {1: self._measure(cache)}
        tables = self._tables[key]
        if texts not in tables:
            tables[texts] = _share(tables[1], texts)
        return tables[texts]

    def _measure(self, cache: FullCache) -> list[float]:
        """The seconds of 1 to 64 nodes: powers of two are measured, others interpolated; more nodes never cost less."""
        most = self.target.most_nodes or WIDEST
        seconds = [self._seconds(n, cache) if n <= most else _NEVER for n in _WIDTHS]
        best = list(accumulate(self.target.ranks.agree(seconds), max))
        table = [0.0, best[0]]
        for (left, at_left), (right, at_right) in pairwise(zip(_WIDTHS, best, strict=True)):
            # What a tree is padded with costs as much as its nodes.
            narrow, wide = self.target.width(left), self.target.width(right)
            for nodes in range(left + 1, right + 1):
                share = (self.target.width(nodes) - narrow) / max(1, wide - narrow)
                table.append(at_left + share * (at_right - at_left))
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
            if self.target.ranks.agree(repeat > 0 and end - began > _LONG):
                break
        return best


def _share(measured: list[float], texts: int) -> list[float]:
    """The cost of each text's tree where ``texts`` have one of n nodes each; wider passes follow the last slope."""
    slope = (measured[WIDEST] - measured[WIDEST // 2]) / (WIDEST // 2)
    totals = (texts * nodes for nodes in range(WIDEST + 1))
    return [(measured[min(total, WIDEST)] + max(0, total - WIDEST) * slope) / texts for total in totals]
