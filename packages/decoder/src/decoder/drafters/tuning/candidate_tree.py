"""The candidates of a step, and how likely the text goes through each."""

from collections.abc import Hashable

from decoder.drafters.tuning.acceptance_estimate import AcceptanceEstimate
from decoder.sampling.token_tree import TokenTree

Kind = tuple[Hashable, ...]


class CandidateTree:
    """A tree that sources of drafts add candidates to; a token that several of them offer is one node.

    Args:
        tree: to add them to, the root alone.
        depth: how deep candidates may go.
        floor: a candidate that is less likely than this is left out.
        size: nodes at most.
        estimate: of how often candidates of a kind are accepted.

    Attributes:
        chances: how likely the text goes through each node.
    """

    def __init__(self, tree: TokenTree, depth: int, floor: float, size: int, estimate: AcceptanceEstimate):
        self.tree, self.chances = tree, [1.0]
        self._depth, self._floor, self._size, self._estimate = depth, floor, size, estimate
        self._rates = [1.0]  # how likely the text goes on with each node, once it has come to its parent
        self._offers: list[list[tuple[Kind, int, float]]] = [[]]  # behind each node: kind, token and rate

    def offer(self, parent: int, token: int, kind: Kind, prior: float) -> int | None:
        """``token`` may follow the node ``parent``; its node, None where it is left out.

        Args:
            kind: what its acceptance rate is estimated by; begins with the name of the source.
            prior: its acceptance rate as long as none of this kind was seen.
        """
        if self.tree.depths[parent] >= self._depth:
            return None
        rate = self._estimate.rate(kind, prior)
        # What is left out is observed, too: else a kind that is unlucky at first would never be drafted again.
        self._offers[parent].append((kind, token, rate))
        full = len(self.tree) >= self._size and self.tree.child(parent, token) is None
        if full or self.chances[parent] * rate < self._floor:
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
        """Where two sources were asked, what both offer and what one offers alone have acceptance rates of their own.

        To be called once, when all of them were asked.
        """
        for parent, offers in enumerate(self._offers):
            if len({kind[0] for kind, _, _ in offers}) < 2:
                continue
            names: dict[int, set[Hashable]] = {}
            for kind, token, _ in offers:
                names.setdefault(token, set()).add(kind[0])
            rates: dict[int, float] = {}
            for kind, token, rate in list(offers):
                kind = *kind, len(names[token]) > 1
                rate = self._estimate.rate(kind, rate)
                offers.append((kind, token, rate))
                rates[token] = max(rate, rates.get(token, 0.0))
            for token, rate in rates.items():
                node = self.tree.child(parent, token)
                if node is not None:
                    self._rates[node] = rate
        for node in range(1, len(self.chances)):
            self.chances[node] = self.chances[self.tree.parents[node]] * self._rates[node]

    def likeliest(self) -> list[int]:
        """All nodes, the likeliest first, each behind its parent."""
        return sorted(range(len(self.chances)), key=self.chances.__getitem__, reverse=True)

    def observe(self, node: int, token: int) -> None:
        """The text went through ``node`` and on with ``token``."""
        for kind, offered, _ in self._offers[node]:
            self._estimate.observe(kind, offered == token)
