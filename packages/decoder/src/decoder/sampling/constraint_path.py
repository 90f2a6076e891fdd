"""Where a sequence, and drafts behind it, stand in the sequence's constraint."""

from collections.abc import Iterable, Sequence
from weakref import ref

import numpy as np
import torch

from decoder.constraints.base import ConstraintState, Vocabulary
from decoder.sampling.token_tree import TokenTree

_LONGEST_CHAIN = 64  # forced tokens that are looked for behind one place


class ConstraintNode:
    """A place in a constraint: the end of a sequence, or of a path of tokens behind it."""

    __slots__ = ("__weakref__", "_parent", "chain", "children", "depth", "mask", "token")

    def __init__(self, parent: "ConstraintNode | None", token: int, depth: int):
        # Weakly, so that masks, of a byte for each token, go at once with the places behind which nothing follows any
        # more, and do not wait for the collector of cycles.
        self._parent = None if parent is None else ref(parent)
        self.token, self.depth = token, depth
        self.children: dict[int, ConstraintNode | None] = {}  # None for tokens that may not follow
        self.mask: torch.Tensor | None = None
        self.chain: Sequence[int] | None = None

    @property
    def parent(self) -> "ConstraintNode | None":
        """The place before; None once the sequence has gone on from there."""
        return None if self._parent is None else self._parent()


class ConstraintPath:
    """The places of one sequence in its constraint, each found out at most once, by moving one state to and fro.

    Args:
        state: the state at the beginning of the output.
        vocabulary: that of the sequence.
        output: the tokens of the output so far.

    Attributes:
        end: the place at the end of the sequence.
    """

    def __init__(self, state: ConstraintState, vocabulary: Vocabulary, output: Iterable[int] = ()):
        self._state, self._size, self._ends = state, vocabulary.size, vocabulary.end_ids
        self.end = self._at = ConstraintNode(None, -1, 0)
        for token in output:
            self.push(token)

    def push(self, token: int) -> None:
        """The sequence goes on with this token, behind which nothing is asked if it is an end token.

        Raises:
            ValueError: the token may not follow.
        """
        node = self.child(self.end, token)
        if node is None:
            raise ValueError(f"token {token} may not follow in the text's constraint")
        if token not in self._ends:
            self._move(node)
            self._state.settle()
        self.end = node

    def child(self, node: ConstraintNode, token: int) -> ConstraintNode | None:
        """The place behind a token; None where it may not follow."""
        if token not in node.children:
            found = ConstraintNode(node, token, node.depth + 1) if self._allows(node, token) else None
            # To find that out may have found the place already, with those behind it.
            node.children.setdefault(token, found)
        return node.children[token]

    def find(self, tokens: Iterable[int]) -> ConstraintNode | None:
        """The place behind these tokens at the end of the sequence; None where they leave the constraint."""
        node = self.end
        for token in tokens:
            found = self.child(node, token)
            if found is None:
                return None
            node = found
        return node

    def mask(self, node: ConstraintNode) -> torch.Tensor:
        """Which tokens may follow, bool [V] on the host; none behind an end token.

        Raises:
            ValueError: the state has no such mask.
        """
        if node.mask is None:
            if node.token in self._ends or node.chain:
                # PyTorch would write so many zeros with threads, which then wait on the cores that passes need.
                node.mask = torch.from_numpy(np.zeros(self._size, np.bool_))
                node.mask[list(node.chain or ())[:1]] = True
            else:
                self._move(node)
                node.mask = self._state.mask()
                if node.mask.shape != (self._size,) or node.mask.dtype != torch.bool:
                    raise ValueError(f"a constraint's mask must be a bool tensor of the shape [{self._size}]")
        return node.mask

    def forced(self, node: ConstraintNode) -> Sequence[int]:
        """The tokens that follow in any case, as far as the constraint tells."""
        if node.chain is None:
            chain: list[int] = []
            place: ConstraintNode | None = node
            while place is not None and place.token not in self._ends and len(chain) < _LONGEST_CHAIN:
                self._move(place)
                # Behind some patterns 100,000 are forced.
                if not (found := self._state.forced()[: _LONGEST_CHAIN - len(chain)]):
                    break
                for index, token in enumerate(found):
                    if place is not None:
                        place.chain = found[index:]
                        place = self.child(place, token)
                    chain.append(token)
            node.chain = chain
        return node.chain

    @property
    def finished(self) -> bool:
        """Whether the sequence must end here, without any end token."""
        return not self._ends and not bool(self.mask(self.end).any())

    def _allows(self, node: ConstraintNode, token: int) -> bool:
        if node.token in self._ends:
            return False
        if node.mask is not None:
            return bool(node.mask[token])
        if chain := self.forced(node):
            return token == chain[0]
        self._move(node)
        return self._state.allows(token)

    def _move(self, node: ConstraintNode) -> None:
        """Move the state to a place, by way of the last one that both have in common."""
        back, down = _to_common(self._at, node)
        if back:
            self._state.rewind(back)
        for token in down:
            self._state.advance(token)
        self._at = node


def _to_common(at: ConstraintNode, node: ConstraintNode) -> tuple[int, list[int]]:
    """How many tokens ``at`` is behind the last place that it shares with ``node``, and the tokens from there on."""
    one: ConstraintNode | None = at
    other: ConstraintNode | None = node
    back, onward = 0, []
    while one is not other:
        assert one is not None and other is not None
        if other.depth >= one.depth:
            onward.append(other.token)
            other = other.parent
        else:
            back, one = back + 1, one.parent
    return back, onward[::-1]


def keep_within(tree: TokenTree, path: ConstraintPath, depth: int, most: int) -> None:
    """Remove the nodes that leave the constraint; add forced tokens behind the root and all leaves.

    They go down to ``depth`` and up to ``most`` nodes in all.
    """
    places: list[ConstraintNode | None] = [path.end]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        before = places[parent]
        places.append(None if before is None else path.child(before, token))
    kept = [node for node, place in enumerate(places) if place is not None]
    if len(kept) < len(tree):
        tree.select(kept)
    known = [place for place in places if place is not None]
    for node in [0, *tree.leaves()]:
        end = node
        for token in path.forced(known[node]):
            if tree.depths[end] >= depth or (len(tree) >= most and tree.child(end, token) is None):
                break
            end = tree.add(end, token, "constraint")
