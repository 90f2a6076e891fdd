"""The candidates of one step: a trie of tokens under the newest committed token."""

from collections.abc import Iterable, Sequence

import torch


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

    def add_levels(self, candidates: Sequence[Sequence[int]], source: str) -> None:
        """Merge a full tree: every token of ``candidates[i]`` under every one of ``candidates[i - 1]``."""
        level = [0]
        for tokens in candidates:
            level = [self.add(parent, token, source) for parent in level for token in tokens]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``."""
        nodes = [node]
        while nodes[-1]:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def leaves(self) -> list[int]:
        """The nodes without children: each ends a candidate path."""
        return [node for node, children in enumerate(self._children) if not children]

    def ancestor_mask(self, device: torch.device) -> torch.Tensor | None:
        """Which node sees which, bool [T, T]: itself and its ancestors; None for a chain, which is plain causal."""
        if all(parent == node - 1 for node, parent in enumerate(self.parents)):
            return None
        mask = torch.eye(len(self), dtype=torch.bool)
        rows = mask.numpy()
        for node, parent in enumerate(self.parents[1:], start=1):
            rows[node] |= rows[parent]
        return mask.to(device)
