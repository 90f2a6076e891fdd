"""Acceptance: which path of a verified tree becomes text. The exact rule, and the paper's own one, which is biased."""

from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile

import torch

from decoder.sampling.filters import first_argmax
from decoder.sampling.sampler import Drawn, Sampler
from decoder.sampling.token_tree import TokenTree

Step = tuple[int, Drawn]
"""A node of the accepted path, with the token that follows it in the text."""

Walk = Iterator[Step]
"""The accepted path, the root first.

Nodes are drawn as the iterator comes to them, so its user must append each token to the text before taking the next.
"""

AcceptanceRule = Callable[[TokenTree, torch.Tensor, Sampler], Walk]
"""A rule that accepts a path of a tree, given the target's logits [T, V] of its T nodes."""


def walk(tree: TokenTree, draw: Callable[[int], Drawn]) -> Walk:
    """Follow the target's own choices from the root on, as long as they were drafted.

    ``draw`` gives the token that the target chooses at a node, from that node's own context. That is what plain
    decoding would choose there, so the walk is plain decoding; the drafts only save its forward passes.
    """
    node: int | None = 0
    while node is not None:
        drawn = draw(node)
        yield node, drawn
        node = tree.child(node, drawn.token)


def exact(tree: TokenTree, logits: torch.Tensor, sampler: Sampler) -> Walk:
    """The lossless rule: `walk`, with the token of each node drawn when the walk comes there."""
    return walk(tree, lambda node: sampler.draw(logits[node]))


class Independent:
    """The paper's Algorithm 1 as written; for reproduction only, since it is biased.

    Every candidate path draws a token of its own at each of its nodes, always with the root's penalty window. A path is
    accepted as far as its drafted tokens equal its draws. The longest accepted path wins, one at random if there are
    several, and its next draw is the additional token. So a drafted token has as many chances as there are paths
    through it: one of probability p comes out with 1 - (1 - p)^paths. The text depends on the seed and the tree, and so
    on the method too.
    """

    def __init__(self, seed: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, tree: TokenTree, logits: torch.Tensor, sampler: Sampler) -> Walk:
        filtered = torch.stack(
            [
                sampler.filtered(row, [tree.tokens[n] for n in tree.path(node)[1:]])
                for node, row in enumerate(logits[: len(tree)])
            ]
        )
        paths = [tree.path(leaf) for leaf in tree.leaves()]
        if sampler.params.greedy:
            draws = first_argmax(filtered)[:, None].expand(-1, len(paths)).tolist()
        else:
            # Behind an end token nothing may follow, and nothing is taken.
            chances = filtered.softmax(-1).nan_to_num(nan=1.0)
            draws = torch.multinomial(chances, len(paths), replacement=True, generator=self.generator).tolist()
        accepted = []
        for number, path in enumerate(paths):
            matches = (tree.tokens[child] == draws[node][number] for node, child in pairwise(path))
            accepted.append(sum(1 for _ in takewhile(bool, matches)))
        winners = [number for number, count in enumerate(accepted) if count == max(accepted)]
        winner = winners[int(torch.randint(len(winners), (), generator=self.generator, device=filtered.device))]
        for node in paths[winner][: accepted[winner] + 1]:
            token = draws[node][winner]
            yield node, sampler.chosen(filtered[node], token, float(filtered[node, token]))
