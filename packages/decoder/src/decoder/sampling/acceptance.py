"""From a verified tree to the tokens it gives: the exact walk, and the paper's own rule, which is biased."""

from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile

import torch

from decoder.sampling.filters import first_argmax
from decoder.sampling.sampler import Drawn, Sampler, log_prob
from decoder.sampling.token_tree import TokenTree

Walk = Iterator[tuple[int, Drawn]]
"""The accepted path, the root first: each node with the token that follows it in the text.

Whoever goes along appends a token to the text before asking for the next; whoever stops early has drawn no more.
"""

AcceptanceRule = Callable[[TokenTree, torch.Tensor, Sampler], Walk]
"""A rule that accepts a path of a tree by the target's logits [T, V]."""


def walk(tree: TokenTree, draw: Callable[[int], Drawn]) -> Walk:
    """Follow the target's own choices from the root on, as long as they were drafted.

    Each visited node draws one token from its own context, exactly as plain decoding would there, so the walk is plain
    decoding; a draft only saves it the forward pass.
    """
    node: int | None = 0
    while node is not None:
        drawn = draw(node)
        yield node, drawn
        node = tree.child(node, drawn.token)


def exact(tree: TokenTree, logits: torch.Tensor, sampler: Sampler) -> Walk:
    """`walk`, where each visited node's token is drawn as the walk comes there."""
    return walk(tree, lambda node: sampler.draw(logits[node]))


class Independent:
    """The paper's Algorithm 1 as written; for reproduction only, since it is biased.

    Every candidate path draws a token of its own at each of its nodes, all from the root's penalty window, and is
    accepted as far as its drafted tokens equal its draws; the longest one wins, ties at random, and its next draw is
    the one more token. A drafted token thus gets as many chances as there are paths through it: of probability p, it
    comes out with 1 - (1 - p)^paths. The text follows from the seed and the tree, and so from the method too.
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
            chances = filtered.softmax(-1)
            draws = torch.multinomial(chances, len(paths), replacement=True, generator=self.generator).tolist()
        accepted = []
        for number, path in enumerate(paths):
            matches = (tree.tokens[child] == draws[node][number] for node, child in pairwise(path))
            accepted.append(sum(1 for _ in takewhile(bool, matches)))
        winners = [number for number, count in enumerate(accepted) if count == max(accepted)]
        winner = winners[int(torch.randint(len(winners), (), generator=self.generator, device=filtered.device))]
        for node in paths[winner][: accepted[winner] + 1]:
            token = draws[node][winner]
            logprob = None if sampler.logprobs is None else log_prob(filtered[node], token)
            yield node, Drawn(token, float(filtered[node, token]), logprob)
