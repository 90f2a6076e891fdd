"""What a verification costs on this machine, by its number of nodes and the length of the text."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch

from decoder.cache.full import FullCache
from decoder.kernels.bitwise_attention import tail_start
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree

WIDEST = 64
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_RECORDING = 2  # passes of a width before it is replayed: one runs as it is, one is recorded
_PATIENCE = 0.5  # seconds of one pass of each width, after which wider ones are left out if they cost too much
_DEAR = 2.0  # in plain steps; from there on a node costs about as much as any other
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
        narrowest, threads = self.target.width(1), torch.get_num_threads()
        key = (length.bit_length(), weight.dtype, weight.device, threads, narrowest, cache.form)
        if key not in self._tables:
            with self._beside_borders(cache):
                self._tables[key] = {1: self._measure(cache)}
        tables = self._tables[key]
        if not self.target.flattens or self.target.most_nodes is not None:
            texts = 1  # each has a pass of its own
        if texts not in tables:
            tables[texts] = _share(tables[1], texts)
        return tables[texts]

    def _measure(self, cache: FullCache) -> list[float]:
        """The seconds of 1 to 64 nodes: powers of two are measured, others interpolated; more nodes never cost less.

        Of a model whose passes take long, wide trees are not measured: their cost goes on with the last slope.
        """
        target = self.target
        widths = [min(nodes, target.most_nodes or WIDEST) for nodes in _WIDTHS]
        best: list[float] = []
        for width in widths:
            for _ in range(_RECORDING if target.recorder is not None and cache.recordable else 0):
                self._seconds(width, cache)
            # Two passes, since the first of a width also prepares it.
            best.append(min(self._agreed_seconds(width, cache) for _ in range(2)))
            wider = target.width(width) > target.width(1)
            if wider and sum(best) > _PATIENCE and best[-1] > _DEAR * best[0]:
                break
        del widths[len(best) :]
        # In turn, since a machine that is slow for a moment would else be slow at one width. Long passes vary less.
        for _ in range(1 if sum(best) > _PATIENCE else 2):
            best = [min(least, self._agreed_seconds(width, cache)) for least, width in zip(best, widths, strict=True)]
        # What a tree is padded with costs as much as its nodes. Only in the narrowest pass, which plain steps have, the
        # nodes count: of padding no attention is computed.
        padded = [nodes if nodes < target.width(1) else target.width(nodes) for nodes in range(1, WIDEST + 1)]
        known = dict(zip((padded[width - 1] for width in widths), accumulate(best, max), strict=True))
        if len(widths) < len(_WIDTHS):
            (near, less), (far, more) = list(known.items())[-2:]
            known[padded[-1]] = more + (padded[-1] - far) * (more - less) / (far - near)
        # The last numbers of nodes in the narrowest pass, where none of them was measured, cost what those before do.
        narrowest = target.width(1)
        known.setdefault(narrowest, max(cost for width, cost in known.items() if width <= narrowest))
        at, seconds = zip(*sorted(known.items()), strict=True)
        return [0.0, *np.interp(padded, at, seconds).tolist()]

    @contextmanager
    def _beside_borders(self, cache: FullCache) -> Iterator[None]:
        """A block with one more token in the cache if a tail begins right below the root.

        There attention takes two products for one, but only in one of `STRIDE` places.
        """
        length = cache.length
        try:
            if tail_start(length) != tail_start(length + 1):
                self.target.forward([TokenTree(0)], [cache])
                cache.keep([0])
            yield
        finally:
            cache.length = length

    def _agreed_seconds(self, width: int, cache: FullCache) -> float:
        """`_seconds` as the first process of those that share the model has measured it."""
        return self.target.ranks.agree(self._seconds(width, cache))

    def _seconds(self, width: int, cache: FullCache) -> float:
        """Of one verification of so many nodes."""
        # All below the root: a deeper tree might look beyond the model's last position.
        tree = TokenTree(0)
        for token in range(width - 1):
            tree.add(0, token, "measure")
        tree.tokens = [0] * width
        self.target.wait()
        start = time.perf_counter()
        self.target.forward([tree], [cache])
        self.target.wait()
        return time.perf_counter() - start


def _share(measured: list[float], texts: int) -> list[float]:
    """The cost of each text's tree where ``texts`` have one of n nodes each; wider passes follow the last slope."""
    slope = (measured[WIDEST] - measured[WIDEST // 2]) / (WIDEST // 2)
    totals = (texts * nodes for nodes in range(WIDEST + 1))
    return [(measured[min(total, WIDEST)] + max(0, total - WIDEST) * slope) / texts for total in totals]
