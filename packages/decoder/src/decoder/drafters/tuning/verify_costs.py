"""What a verification costs on this machine, by its number of nodes and the length of the sequence."""

import time
from collections import Counter
from itertools import accumulate

import numpy as np
import torch

from decoder.cache.full import FullCache
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree
from decoder.work import Progress, Work, finish

WIDEST = 64
_SLOW = 0.01  # seconds of a plain step, from which on few passes of a width tell enough: more delay the first token
_DEAR = 2.0  # in plain steps; from there on a node costs about as much as any other
_AGAIN = 0.05  # seconds by which the first token of a sequence is delayed for measuring again
_SEQUENCES = 16  # that do so
_SHORTEST = 1024  # tokens below which the length of the sequence hardly matters


class VerifyCosts:
    """Seconds per forward pass, measured once whenever the sequence is twice as long, and kept for all generations.

    Other work on the machine may have disturbed all passes of one measurement. So some numbers of nodes are measured
    again when the next sequences begin, in turn; the shortest times count.

    Measuring writes behind the committed tokens of a full cache and commits nothing.
    """

    def __init__(self, target: Target):
        self.target = target
        self._tables: dict[tuple, list[float]] = {}
        self._seconds: dict[tuple, dict[int, float]] = {}  # by number of nodes, the shortest time seen
        self._begun: Counter[tuple] = Counter()  # sequences

    def begin(self, cache: FullCache) -> Work[None] | None:
        """A sequence begins, verified alone: the work of measuring, where it is due, for the first time or again."""
        key = self._key(cache, 1)
        self._begun[key] += 1
        return self._filling(key, cache) if key not in self._tables or self._begun[key] <= _SEQUENCES else None

    def missing(self, cache: FullCache) -> Work[None] | None:
        """The work of measuring what `at` needs for a sequence of this length, unless that is there."""
        key = self._key(cache, 1)
        return None if key in self._tables else self._filling(key, cache)

    def at(self, cache: FullCache, sequences: int = 1) -> list[float]:
        """Seconds of verifying n nodes, for n up to the widest tree; entry 0 is unused. The model must be patched.

        Where ``sequences`` are verified in one pass, with a tree of n nodes each, it is the share of one of them. What
        has not been measured yet is measured at once.
        """
        if not self.target.flattens:
            sequences = 1  # each has a pass of its own
        key = self._key(cache, sequences)
        if key not in self._tables:
            if sequences > 1:
                self._tables[key] = _share(self.at(cache), sequences)
            else:
                finish(self._filling(key, cache))
        return self._tables[key]

    def _filling(self, key: tuple, cache: FullCache) -> Work[None]:
        """Measure the table ``key``. The model must be patched whenever this goes on."""
        table = yield from self._measure(cache, self._seconds.setdefault(key, {}))
        # Those of several sequences follow from this one.
        self._tables = {other: old for other, old in self._tables.items() if other[1:] != key[1:]}
        self._tables[key] = table

    def _key(self, cache: FullCache, sequences: int) -> tuple:
        """What costs depend on."""
        target = self.target
        # With the root, which is not committed: a prompt of 2,048 tokens is measured once, and not again a step later.
        length = max(cache.length + 1, _SHORTEST).bit_length()
        return sequences, length, target.dtype, target.device, torch.get_num_threads(), target.width(1), cache.form

    def _measure(self, cache: FullCache, seconds: dict[int, float]) -> Work[list[float]]:
        """Powers of two are measured as far as trees may pay, others interpolated; more nodes never cost less.

        ``seconds``, by number of nodes, keeps the shortest, the one that was measured last at the end. Where there are
        some, those come first that have waited longest, for as long as one sequence is to be delayed. Each pass is a
        part of the work, behind which the cache is as it was.
        """
        target = self.target
        narrowest, most = target.width(1), target.most_nodes or WIDEST
        wanted = sorted({min(nodes, most) for nodes in (1, 2, 4, 8, 16, 32, WIDEST, narrowest)})
        # The first pass of a width prepares it, and on CUDA the second is recorded.
        prepares = target.backend.warm_up_runs > 1
        fast, slow = (5 if prepares and cache.recordable else 3), (2 if prepares else 1)

        def measure(widths: list[int]) -> Work[None]:
            """A pass of each width."""
            for nodes in widths:
                seconds[nodes] = min(seconds.pop(nodes, float("inf")), self._time(nodes, cache))
                yield Progress(nodes, sum(wanted))

        if again := bool(seconds):
            spent = zip(seconds, accumulate(seconds.values()), strict=True)
            yield from measure(
                [nodes for number, (nodes, so_far) in enumerate(spent) if so_far <= _AGAIN or not number]
            )
        for nodes in wanted:
            if nodes not in seconds:
                yield from measure([nodes] * (fast if seconds.get(1, 0) < _SLOW else slow))
            if nodes > max(4, narrowest) and seconds[nodes] > _DEAR * seconds[1]:
                break
        # A machine that is slow for a moment would else be slow at one width.
        for _ in range(0 if again or seconds[1] >= _SLOW else 2):
            yield from measure(list(seconds))
        return self._table(seconds)

    def _table(self, seconds: dict[int, float]) -> list[float]:
        """The seconds of each number of nodes, from those that were measured."""
        target, narrowest = self.target, self.target.width(1)
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


def _share(measured: list[float], sequences: int) -> list[float]:
    """The cost of a tree where so many ``sequences`` have one of n nodes each; wider passes follow the last slope."""
    slope = (measured[WIDEST] - measured[WIDEST // 2]) / (WIDEST // 2)
    totals = (sequences * nodes for nodes in range(WIDEST + 1))
    return [(measured[min(total, WIDEST)] + max(0, total - WIDEST) * slope) / sequences for total in totals]
