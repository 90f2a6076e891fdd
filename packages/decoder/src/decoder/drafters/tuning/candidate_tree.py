"""The candidates of a step, and how likely each is accepted, by how often drafts of its kind were."""

from typing import Any

from decoder.sampling.constraint_path import ConstraintNode, ConstraintPath
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
        """A draft of this kind stood where the sequence has gone on, and was ``right`` or not."""
        accepted, seen = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = accepted * self._decay + right, seen * self._decay + 1


class CandidateTree:
    """A tree that sources of drafts add candidates to; a token that several of them offer is one node.

    They go below the root of ``tree``, up to ``depth``; those less likely than ``floor`` are left out. ``chances`` says
    how likely the sequence goes through each node, by the ``estimate`` of how often such candidates are accepted; of
    several offers of one token, the surest counts.

    Under a constraint, where the sequence stands at ``path``, offers that leave it are left out, and behind each node
    the tokens that it forces are added, as sure as the node itself.
    """

    def __init__(
        self,
        tree: TokenTree,
        depth: int,
        floor: float,
        estimate: AcceptanceEstimate,
        path: ConstraintPath | None = None,
    ):
        self.tree, self.chances = tree, [1.0]
        self._depth, self._floor, self._estimate = depth, floor, estimate
        self._offers: list[list[tuple[Kind, int]]] = [[]]  # behind each node
        self._path = path
        self._places: list[ConstraintNode | None] = [None if path is None else path.end]
        self._ends: dict[int, int | None] = {}  # of chains of forced tokens, None where they go too deep
        self._force(0)

    def offer(self, parent: int, token: int, kind: Kind, prior: float) -> int | None:
        """``token`` may follow the node ``parent``; its node, None where it is left out.

        Its acceptance rate is that of its ``kind``, which begins with the source's name, and ``prior`` at first.
        """
        if self.tree.depths[parent] >= self._depth or not self._may_follow(parent, token):
            return None
        if parent in self._ends:
            return self.tree.child(parent, token)
        # What is left out is observed, too: else a kind that is unlucky at first would never be drafted again.
        self._offers[parent].append((kind, token))
        chance = self.chances[parent] * self._estimate.rate(kind, prior)
        if chance < self._floor:
            return None
        node = self._add(parent, token, kind[0], chance)
        self._force(node)
        return node

    def end(self, node: int | None) -> int | None:
        """The end of the forced tokens behind a node, itself where there are none; None where it is too deep."""
        return self._ends.get(node, node) if node is not None else None

    def _add(self, parent: int, token: int, source: str, chance: float) -> int:
        node = self.tree.add(parent, token, source)
        if node == len(self.chances):
            self.chances.append(0.0)
            self._offers.append([])
            place = self._places[parent]
            self._places.append(None if self._path is None or place is None else self._path.child(place, token))
        self.chances[node] = max(self.chances[node], chance)
        return node

    def _may_follow(self, parent: int, token: int) -> bool:
        if self._path is None:
            return True
        place = self._places[parent]
        return place is not None and self._path.child(place, token) is not None

    def _force(self, node: int) -> None:
        """Add the tokens that are forced behind a node, or make them as sure as it has become."""
        place = self._places[node]
        if self._path is None or place is None:
            return
        chain = self._path.forced(place)
        nodes = [node]
        for token in chain[: self._depth - self.tree.depths[node]]:
            nodes.append(self._add(nodes[-1], token, "constraint", self.chances[node]))
        # An offer within the chain finds it there.
        whole = len(nodes) > len(chain)
        self._ends.update((each, nodes[-1] if whole else None) for each in nodes[: len(chain)])

    def likeliest(self) -> list[int]:
        """All nodes, the likeliest first, each behind its parent."""
        return sorted(range(len(self.chances)), key=self.chances.__getitem__, reverse=True)

    def observe(self, node: int, token: int) -> None:
        """The sequence went through ``node`` and on with ``token``."""
        for kind, offered in self._offers[node]:
            self._estimate.observe(kind, offered == token)
