"""The token tree: the draft candidates of one step, as a trie below the newest committed token."""

from collections.abc import Iterable, Sequence

import torch

RankPath = tuple[int, ...]
"""A node by the rank of the candidate at each depth on the way to it: (0, 2) is the third behind the best one."""


def rank_paths(tree: Sequence[int] | Sequence[Sequence[int]], depth: int) -> list[RankPath]:
    """All nodes of a tree in the form of `TokenSwiftOptions.tree`, cut off at ``depth``; prefixes come first.

    The branching (1, 3) gives (0,), (0, 0), (0, 1), (0, 2). To explicit paths their missing prefixes are added.
    """
    branching = [count for count in tree if isinstance(count, int)]
    if branching:
        paths: list[RankPath] = []
        level: list[RankPath] = [()]
        for count in branching[:depth]:
            level = [(*path, rank) for path in level for rank in range(count)]
            paths += level
        return paths
    given = [tuple(path) for path in tree if not isinstance(path, int)]
    prefixes = {path[:length] for path in given for length in range(1, min(len(path), depth) + 1)}
    return sorted(prefixes, key=lambda path: (len(path), path))


class TokenTree:
    """Draft candidates as flat lists with an entry per node: a prefix that two candidates share is one node.

    Node 0 is the root, the newest committed token. Every other node comes after its parent.

    Attributes:
        tokens: the token of each node.
        parents: the parent of each node, -1 for the root.
        depths: how many drafted tokens each node's path has, 0 for the root.
        sources: the names of the sources that proposed each node.
    """

    def __init__(self, root: int):
        self.tokens: list[int] = [root]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.sources: list[set[str]] = [set()]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """How many drafted tokens the longest path has."""
        return max(self.depths)

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that holds ``token``, if any."""
        return self._children[node].get(token)

    def add(self, parent: int, token: int, source: str) -> int:
        """The child of ``parent`` that holds ``token``, which is added if there is none yet."""
        node = self._children[parent].get(token)
        if node is None:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.sources.append(set())
            self._children.append({})
            self._children[parent][token] = node
        self.sources[node].add(source)
        return node

    def add_path(self, tokens: Iterable[int], source: str) -> int:
        """Merge a chain of tokens below the root; returns the node of the last one."""
        node = 0
        for token in tokens:
            node = self.add(node, token, source)
        return node

    def add_ranked(self, candidates: Sequence[Sequence[int]], paths: Iterable[RankPath], source: str) -> None:
        """Merge a tree of fixed shape: at each depth i of a path, rank r stands for the token ``candidates[i][r]``.

        Prefixes of a path must come before it. Where a level has too few candidates, the paths through the missing ones
        are left out.
        """
        nodes: dict[RankPath, int] = {(): 0}
        for path in paths:
            parent = nodes.get(path[:-1])
            if parent is not None and len(path) <= len(candidates) and path[-1] < len(candidates[len(path) - 1]):
                nodes[path] = self.add(parent, candidates[len(path) - 1][path[-1]], source)

    def prune(self, depth: int, most: int | None = None) -> None:
        """Remove nodes deeper than ``depth``, then all but the first ``most``; the order stays the same."""
        if self.depth > depth or (most is not None and len(self) > most):
            self.select([node for node, own in enumerate(self.depths) if own <= depth][:most])

    def select(self, nodes: Sequence[int]) -> None:
        """Remove all other nodes and number these anew in the given order: the root first, parents before children."""
        number = {node: new for new, node in enumerate(nodes)}
        self.parents = [-1, *(number[self.parents[node]] for node in nodes[1:])]
        self.tokens, self.depths = [self.tokens[n] for n in nodes], [self.depths[n] for n in nodes]
        self.sources = [self.sources[n] for n in nodes]
        children = [self._children[n] for n in nodes]
        self._children = [{t: number[n] for t, n in found.items() if n in number} for found in children]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``."""
        nodes = [node]
        while nodes[-1]:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def leaves(self) -> list[int]:
        """The nodes without children, at which candidate paths end."""
        return [node for node, children in enumerate(self._children) if not children]

    def ancestor_mask(self, width: int | None = None) -> torch.Tensor | None:
        """Whether the node of a row sees that of a column, itself or an ancestor: bool [T, T], None for a chain.

        A chain needs only the usual causal mask. With a ``width`` of at least T the mask is [width, width] and never
        None; the rows beyond the tree, which are padding, see themselves alone.
        """
        if width is None and all(parent == node - 1 for node, parent in enumerate(self.parents)):
            return None
        width = width or len(self)
        # Made of Python's own byte arrays, which for a small tree take a quarter of the time of tensors.
        rows: list[bytearray] = []
        for node in range(width):
            row = rows[self.parents[node]].copy() if 0 < node < len(self) else bytearray(width)
            row[node] = True
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(width, width)
