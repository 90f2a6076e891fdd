"""The tokens of all nodes of a tree, chosen at once on the device."""

from collections.abc import Sequence

import torch

from decoder.backends.transfers import upload
from decoder.sampling.conditions import Conditions
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.filters import active, first_argmax
from decoder.sampling.sampler import Drawn, Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.timings import stage


class TreeDraws:
    """The tokens of all nodes of a tree, each drawn from its node's own context, in one launch and without waiting.

    Reading from a GPU takes long, so the host reads once, the tokens of all nodes, and then walks the tree. The device
    finds the end of that walk too, by going from each node to the child that holds the node's token. So it can draft
    for the next step (`last_node`, `draft_context`) before the host has read anything. No logits_hook is called.

    Args:
        tree: the candidates, T nodes.
        logits: the target's logits [T or more, V], a row per node.
        sampler: the sampler of the sequence, whose last token is the tree's root.
        apart: whether sums over the vocabulary are made node by node. On a device, their order may follow from the
            number of rows and where they lie.

    Attributes:
        sampler: as given.
        numbers: the vector on the device whose values `read` takes, float64: tokens [T], scores [T] and each of the
            columns [T] of `Sampler.collected`.
    """

    @stage("sampling")
    def __init__(self, tree: TokenTree, logits: torch.Tensor, sampler: Sampler, apart: bool = False):
        self._tree, self.sampler, self._apart = tree, sampler, apart
        nodes, device = len(tree), logits.device
        self._depths = upload(tree.depths, device) if nodes > 1 else None
        self._leaving: list[int | None] = [None] * nodes
        self._counts = self._window_counts(device) if sampler.window.size else None
        in_window = None if self._counts is None else self._counts > 0
        filtered = self._filtered(logits[:nodes].double(), in_window)
        scores = filtered
        if not sampler.params.greedy:
            noise = sampler.noise.rows(len(sampler.context), tree.depth + 1)
            scores = filtered + (noise if self._depths is None else noise.index_select(0, self._depths))
        best = scores.amax(-1, keepdim=True)
        self._tokens = first_argmax(scores, best)
        self.numbers = torch.cat([self._tokens.double(), best[:, 0], *self._collected(filtered)])
        self._last: torch.Tensor | None = None
        self._drawn: list[Drawn] = []

    def _filtered(self, logits: torch.Tensor, in_window: torch.Tensor | None) -> torch.Tensor:
        process = self.sampler.processed
        if not self._apart or not any(own.sums for own in active(self.sampler.params)):
            return process(logits, Conditions(in_window))
        windows = [None] * len(logits) if in_window is None else in_window.split(1)
        rows = zip(logits.split(1), windows, strict=True)
        return torch.cat([process(row.clone(), Conditions(own)) for row, own in rows])

    def _collected(self, filtered: torch.Tensor) -> list[torch.Tensor]:
        if not self._apart:
            return self.sampler.collected(filtered, self._tokens)
        rows = zip(filtered.split(1), self._tokens.split(1), strict=True)
        return [
            torch.cat(column)
            for column in zip(*(self.sampler.collected(row.clone(), token) for row, token in rows), strict=True)
        ]

    def _window_counts(self, device: torch.device) -> torch.Tensor:
        """How often each token occurs in the penalty window of each node, int32 [T, V].

        A node's window is the sequence's, with the tokens of the node's path added and the oldest ones dropped to make
        room for them. This also finds, for `draft_context`, the token that leaves the window when one more enters.
        """
        tree, window = self._tree, self.sampler.window
        changes: list[tuple[int, int]] = []  # a flat index into the counts, and what to add there
        for node in range(len(tree)):
            path = [tree.tokens[n] for n in tree.path(node)[1:]]
            first = node * len(window.counts)

            def oldest(index: int, path: list[int] = path) -> int:
                return window.tokens[index] if index < len(window.tokens) else path[index - len(window.tokens)]

            gone = max(0, len(window.tokens) + len(path) - window.size)
            changes += [(first + token, 1) for token in path]
            changes += [(first + oldest(index), -1) for index in range(gone)]
            # When the token drawn at this node enters a full window, one more token leaves it.
            full = len(window.tokens) + len(path) - gone == window.size
            self._leaving[node] = oldest(gone) if full else None
        counts = window.counts.expand(len(tree), -1)
        if not changes:
            return counts
        indices, values = upload(list(zip(*changes, strict=True)), device)
        counts = counts.clone()
        counts.view(-1).index_add_(0, indices, values.int())
        return counts

    def read(self, numbers: Sequence[float]) -> None:
        """Receive the values of ``numbers`` on the host."""
        count = len(self._tree)
        columns = [numbers[start : start + count] for start in range(0, len(numbers), count)]
        self._drawn = [self.sampler.drawn(*row) for row in zip(*columns, strict=True)]

    def __call__(self, node: int) -> Drawn:
        """What was drawn at ``node``; `read` must have been called before."""
        return self._drawn[node]

    @property
    def last_node(self) -> torch.Tensor:
        """The node at which the walk ends, int64 [1] on the device: no child of it holds the token drawn there."""
        if self._last is None:
            tree, device = self._tree, self._tokens.device
            nodes = torch.arange(len(tree), device=device)
            parents, tokens = upload([[0, *tree.parents[1:]], tree.tokens], device)
            # The walk goes on from a node to its child that holds the node's token, and stays where there is none.
            drawn = self._tokens.index_select(0, parents) == tokens
            onward = nodes.scatter_reduce(0, parents, torch.where(drawn, nodes, 0), "amax")
            node = nodes[:1]
            for _ in range(tree.depth):
                node = onward.index_select(0, node)
            self._last = node
        return self._last

    @property
    def draft_context(self) -> DraftContext:
        """The draft context of the next step: the sequence with the walk's tokens, which the host need not know yet."""
        node, base = self.last_node, self.sampler.draft_context()
        newest = self._tokens.index_select(0, node)
        added = node.new_ones(1) if self._depths is None else self._depths.index_select(0, node) + 1
        counts = None
        if self._counts is not None:
            counts = self._counts.index_select(0, node)[0]
            counts.index_add_(0, newest, counts.new_ones(1))
            if any(token is not None for token in self._leaving):
                leaving = [(token or 0, -(token is not None)) for token in self._leaving]
                tokens, change = upload(list(zip(*leaving, strict=True)), node.device).index_select(1, node)
                counts.index_add_(0, tokens, change.int())
        return DraftContext.behind_verification(base, added, self._tree.depth + 1, newest, counts)
