"""The candidates of one step: a trie of tokens under the newest committed token."""

from collections.abc import Iterable, Sequence

import torch

RankPath = tuple[int, ...]
"""The way to a node by the rank of the candidate taken at each depth: (0, 2) is the best one, then the third."""


def rank_paths(tree: Sequence[int] | Sequence[Sequence[int]], depth: int) -> list[RankPath]:
    """The nodes of a tree as `TokenSwiftOptions.tree` gives it, cut at ``depth``, every path behind its prefixes.

    Branching (1, 3) gives (0,), (0, 0), (0, 1), (0, 2); of explicit paths the missing prefixes are filled in.
    """
    if isinstance(tree[0], int):
        paths: list[RankPath] = []
        level: list[RankPath] = [()]
        for count in tree[:depth]:
            level = [(*path, rank) for path in level for rank in range(count)]
            paths += level
        return paths
    prefixes = {tuple(path[:length]) for path in tree for length in range(1, min(len(path), depth) + 1)}
    return sorted(prefixes, key=lambda path: (len(path), path))


class TokenTree:
    """Flat record of draft candidates: ``tokens``, ``parents``, and what derives from them.

    Node 0 is the root, the newest committed token (parent -1). Nodes stand after their parents. Candidates of
    several sources merge as a trie: a prefix that two of them share is one node.
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
        """Drafted tokens on the longest path."""
        return max(self.depths)

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that holds ``token``, if any."""
        return self._children[node].get(token)

    def add(self, parent: int, token: int, source: str) -> int:
        """The child of ``parent`` that holds ``token``, made if there is none yet."""
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
        """Merge a chain of tokens below the root; the node of its last token."""
        node = 0
        for token in tokens:
            node = self.add(node, token, source)
        return node

    def add_ranked(self, candidates: Sequence[Sequence[int]], paths: Iterable[RankPath], source: str) -> None:
        """Merge the tree of ``paths``, of which rank r at depth i stands for the token ``candidates[i][r]``.

        A path stands behind its prefixes. Where a level has too few candidates, the paths through the missing ones
        are left out.
        """
        nodes = {(): 0}
        for path in paths:
            parent = nodes.get(path[:-1])
            if parent is not None and len(path) <= len(candidates) and path[-1] < len(candidates[len(path) - 1]):
                nodes[path] = self.add(parent, candidates[len(path) - 1][path[-1]], source)

    def prune(self, depth: int, most: int | None = None) -> None:
        """Forget the nodes deeper than ``depth``, and all behind the first ``most``; the others keep their order."""
        if self.depth > depth or (most is not None and len(self) > most):
            self.select([node for node, at in enumerate(self.depths) if at <= depth][:most])

    def select(self, nodes: Sequence[int]) -> None:
        """Forget all other nodes; these, the root first and each behind its parent, are numbered anew in this order."""
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
        """The nodes without children: each ends a candidate path."""
        return [node for node, children in enumerate(self._children) if not children]

    def ancestor_mask(self, width: int | None = None) -> torch.Tensor | None:
        """Which node sees which, bool [T, T]: itself and its ancestors; None for a chain, which is plain causal.

        With a ``width`` of at least T it is [width, width] and never None; what lies beyond the tree sees itself.
        """
        if width is None and all(parent == node - 1 for node, parent in enumerate(self.parents)):
            return None
        width = width or len(self)
        # Bytes of the host's own: with tensors or arrays the rows of a small tree take four times as long.
        rows: list[bytearray] = []
        for node in range(width):
            row = rows[self.parents[node]].copy() if 0 < node < len(self) else bytearray(width)
            row[node] = True
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(width, width)
