"""The candidates of a step, and how likely the text goes through each, by how often drafts of a kind were accepted."""

from typing import Any

from decoder.sampling.token_tree import TokenTree

_PRIOR_WEIGHT = 4  # observations that a prior is worth
_HALF_LIFE = 200  # observations of a kind after which an old one counts half

Kind = tuple[Any, ...]
"""What drafts have in common that share an acceptance rate; the first entry is the source's name."""


class AcceptanceEstimate:
    """Running acceptance rates by kind of draft; each starts from a prior and forgets slowly, since texts change."""

    def __init__(self) -> None:
        self._decay = 0.5 ** (1 / _HALF_LIFE)
        self._seen: dict[Kind, tuple[float, float]] = {}  # accepted drafts and all drafts

    def rate(self, kind: Kind, prior: float) -> float:
        """How likely a draft of this kind is right; ``prior`` is what is assumed before any was seen."""
        accepted, seen = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)

    def observe(self, kind: Kind, right: bool) -> None:
        """A draft of this kind stood where the text has gone on, and was ``right`` or not."""
        accepted, seen = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = accepted * self._decay + right, seen * self._decay + 1


class CandidateTree:
    """A tree that sources of drafts add candidates to; a token that several of them offer is one node.

    They go below the root of ``tree``, up to ``depth``; those less likely than ``floor`` are left out. ``chances`` says
    how likely the text goes through each node, by the ``estimate`` of how often such candidates are accepted; of
    several offers of one token, the surest counts.
    """

    def __init__(self, tree: TokenTree, depth: int, floor: float, estimate: AcceptanceEstimate):
        self.tree, self.chances = tree, [1.0]
        self._depth, self._floor, self._estimate = depth, floor, estimate
        self._offers: list[list[tuple[Kind, int]]] = [[]]  # behind each node

    def offer(self, parent: int, token: int, kind: Kind, prior: float) -> int | None:
        """``token`` may follow the node ``parent``; its node, None where it is left out.

        Its acceptance rate is that of its ``kind``, which begins with the source's name, and ``prior`` at first.
        """
        if self.tree.depths[parent] >= self._depth:
            return None
        # What is left out is observed, too: else a kind that is unlucky at first would never be drafted again.
        self._offers[parent].append((kind, token))
        chance = self.chances[parent] * self._estimate.rate(kind, prior)
        if chance < self._floor:
            return None
        node = self.tree.add(parent, token, kind[0])
        if node == len(self.chances):
            self.chances.append(0.0)
            self._offers.append([])
        self.chances[node] = max(self.chances[node], chance)
        return node

    def likeliest(self) -> list[int]:
        """All nodes, the likeliest first, each behind its parent."""
        return sorted(range(len(self.chances)), key=self.chances.__getitem__, reverse=True)

    def observe(self, node: int, token: int) -> None:
        """The text went through ``node`` and on with ``token``."""
        for kind, offered in self._offers[node]:
            self._estimate.observe(kind, offered == token)
