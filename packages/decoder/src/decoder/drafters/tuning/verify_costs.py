"""What a verification costs on this machine, by its number of nodes and the length of the text."""

import time
from collections import Counter
from itertools import accumulate

import numpy as np
import torch

from decoder.cache.full import FullCache
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree

WIDEST = 64
_DEAR = 3.0  # in plain steps; from there on a node costs about as much as any other
_SHORTEST = 1024  # tokens below which the length of the text hardly matters


class VerifyCosts:
    """Seconds per forward pass, measured once whenever the text is twice as long, and kept for all generations.

    Other work on the machine may have disturbed all passes of one measurement. So they are measured again when the
    second text begins, the fourth, the eighth, and so on; the shortest times count.

    Measuring writes behind the committed tokens of a full cache and commits nothing.
    """

    def __init__(self, target: Target):
        self.target = target
        self._tables: dict[tuple, list[float]] = {}
        self._seconds: dict[tuple, dict[int, float]] = {}  # by number of nodes, the shortest time seen
        self._begun: Counter[tuple] = Counter()  # texts

    def begin(self, cache: FullCache) -> None:
        """A text begins that is verified alone: measure, or measure again. The model must be patched."""
        key = self._key(cache, 1)
        self._begun[key] += 1
        if key in self._tables and self._begun[key].bit_count() == 1:
            # Those of several texts follow from these.
            self._tables = {other: table for other, table in self._tables.items() if other[1:] != key[1:]}
        self.at(cache)

    def at(self, cache: FullCache, texts: int = 1) -> list[float]:
        """Seconds of verifying n nodes, for n up to the widest tree; entry 0 is unused. The model must be patched.

        Where ``texts`` are verified in one pass, with a tree of n nodes each, it is the share of one of them.
        """
        if not self.target.flattens or self.target.most_nodes is not None:
            texts = 1  # each has a pass of its own
        key = self._key(cache, texts)
        if key not in self._tables:
            if texts > 1:
                self._tables[key] = _share(self.at(cache), texts)
            else:
                self._tables[key] = self._measure(cache, self._seconds.setdefault(key, {}))
        return self._tables[key]

    def _key(self, cache: FullCache, texts: int) -> tuple:
        """What costs depend on."""
        target = self.target
        # With the root, which is not committed: a prompt of 2,048 tokens is measured once, and not again a step later.
        length = max(cache.length + 1, _SHORTEST).bit_length()
        return texts, length, target.dtype, target.device, torch.get_num_threads(), target.width(1), cache.form

    def _measure(self, cache: FullCache, seconds: dict[int, float]) -> list[float]:
        """Powers of two are measured as far as trees may pay, others interpolated; more nodes never cost less.

        ``seconds``, by number of nodes, keeps the shortest. Those that it holds are measured once more.
        """
        target = self.target
        narrowest, most = target.width(1), target.most_nodes or WIDEST
        recorded = target.recorder is not None and cache.recordable

        def measure_in_turn() -> None:
            """A machine that is slow for a moment would else be slow at one width."""
            seconds.update({nodes: min(best, self._time(nodes, cache)) for nodes, best in seconds.items()})

        again = bool(seconds)
        if again:
            measure_in_turn()
        for nodes in sorted({min(nodes, most) for nodes in (1, 2, 4, 8, 16, 32, WIDEST, narrowest)}):
            # The first pass of a width prepares it, and on CUDA the second is recorded.
            if nodes not in seconds:
                seconds[nodes] = min(self._time(nodes, cache) for _ in range(5 if recorded else 3))
            if nodes > max(4, narrowest) and seconds[nodes] > _DEAR * seconds[1]:
                break
        for _ in range(0 if again else 2):
            measure_in_turn()
        # A tree pays for what it is padded with; attention skips the padding of the narrowest pass.
        widths = [nodes if nodes < narrowest else target.width(nodes) for nodes in range(1, WIDEST + 1)]
        order = sorted(seconds)
        rising = accumulate((seconds[nodes] for nodes in order), max)
        known = dict(zip((widths[nodes - 1] for nodes in order), rising, strict=True))
        (near, less), (far, cost) = list(known.items())[-2:]
        if far < widths[-1]:
            known[widths[-1]] = cost + (widths[-1] - far) * (cost - less) / (far - near)
        return [0.0, *np.interp(widths, list(known), list(known.values())).tolist()]

    def _time(self, nodes: int, cache: FullCache) -> float:
        """Of one verification of so many nodes, as the first process of those that share the model measures it."""
        # All below the root: a deeper tree might look beyond the model's last position.
        tree = TokenTree(0)
        for token in range(nodes - 1):
            tree.add(0, token, "measure")
        tree.tokens = [0] * nodes
        self.target.wait()
        start = time.perf_counter()
        self.target.forward([tree], [cache])
        self.target.wait()
        return self.target.ranks.agree(time.perf_counter() - start)


def _share(measured: list[float], texts: int) -> list[float]:
    """The cost of each text's tree where ``texts`` have one of n nodes each; wider passes follow the last slope."""
    slope = (measured[WIDEST] - measured[WIDEST // 2]) / (WIDEST // 2)
    totals = (texts * nodes for nodes in range(WIDEST + 1))
    return [(measured[min(total, WIDEST)] + max(0, total - WIDEST) * slope) / texts for total in totals]
