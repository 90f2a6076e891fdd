"""The candidates of a step, and how likely the text goes through each."""

from collections.abc import Hashable
from typing import Any

from decoder.drafters.tuning.acceptance_estimate import AcceptanceEstimate
from decoder.sampling.token_tree import TokenTree

Kind = tuple[Any, ...]
"""What drafts have in common that share an acceptance rate; the first entry is the source's name."""


class CandidateTree:
    """A tree that sources of drafts add candidates to; a token that several of them offer is one node.

    They go below the root of ``tree``, up to ``depth``; those less likely than ``floor`` are left out. ``chances`` says
    how likely the text goes through each node, by the ``estimate`` of how often such candidates are accepted.
    """

    def __init__(self, tree: TokenTree, depth: int, floor: float, estimate: AcceptanceEstimate):
        self.tree, self.chances = tree, [1.0]
        self._depth, self._floor, self._estimate = depth, floor, estimate
        self._rates = [1.0]  # how likely the text goes on with each node, once it has come to its parent
        self._offers: list[list[tuple[Kind, int, float]]] = [[]]  # behind each node: kind, token and rate

    def offer(self, parent: int, token: int, kind: Kind, prior: float) -> int | None:
        """``token`` may follow the node ``parent``; its node, None where it is left out.

        Its acceptance rate is that of its ``kind``, which begins with the source's name, and ``prior`` at first.
        """
        if self.tree.depths[parent] >= self._depth:
            return None
        rate = self._estimate.rate(kind, prior)
        # What is left out is observed, too: else a kind that is unlucky at first would never be drafted again.
        self._offers[parent].append((kind, token, rate))
        if self.chances[parent] * rate < self._floor:
            return None
        node = self.tree.add(parent, token, kind[0])
        if node == len(self.chances):
            self.chances.append(0.0)
            self._rates.append(0.0)
            self._offers.append([])
        self._rates[node] = max(self._rates[node], rate)
        self.chances[node] = self.chances[parent] * self._rates[node]
        return node

    def weigh_agreement(self) -> None:
        """Where two sources have offered, tokens of both and tokens of one alone have acceptance rates of their own."""
        for parent, offers in enumerate(self._offers):
            if len({kind[0] for kind, _, _ in offers}) < 2:
                continue
            names: dict[int, set[Hashable]] = {}
            for kind, token, _ in offers:
                names.setdefault(token, set()).add(kind[0])
            nodes = {token: self.tree.child(parent, token) for token in names}
            self._rates = [0.0 if node in nodes.values() else rate for node, rate in enumerate(self._rates)]
            for kind, token, rate in list(offers):
                kind = *kind, len(names[token]) > 1
                offers.append((kind, token, self._estimate.rate(kind, rate)))
                if nodes[token] is not None:
                    self._rates[nodes[token]] = max(self._rates[nodes[token]], offers[-1][2])
        for node in range(1, len(self.chances)):
            self.chances[node] = self.chances[self.tree.parents[node]] * self._rates[node]

    def likeliest(self) -> list[int]:
        """All nodes, the likeliest first, each behind its parent."""
        return sorted(range(len(self.chances)), key=self.chances.__getitem__, reverse=True)

    def observe(self, node: int, token: int) -> None:
        """The text went through ``node`` and on with ``token``."""
        for kind, offered, _ in self._offers[node]:
            self._estimate.observe(kind, offered == token)
