"""From a verified tree to the tokens it gives: the exact walk, and the paper's own rule, which is biased."""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise, takewhile
from typing import NamedTuple, Protocol

import torch

from decoder.kernels.transfers import download, upload
from decoder.sampling.sampler import Ahead, Sampler, first_argmax
from decoder.sampling.token_tree import TokenTree

_LEVELS = 8  # of a walk on the device before the host looks how far it has come


class Ending:
    """Where a walk ended, as far as the device knows; computed when asked for.

    Args:
        walked: what `walk` returned; one of its levels must be the last.
        sampler: of the text before the walk.
        node: where the walk began.
    """

    def __init__(self, walked: torch.Tensor, sampler: Sampler, node: int):
        self._children, self._tokens = walked[0].long(), walked[1].long()
        self._sampler, self._node = sampler, node

    @cached_property
    def _steps(self) -> torch.Tensor:
        """From the first level visited to the last, int64 [1]; the last is the first without a child."""
        return (self._children > 0).cumprod(0).sum(0, keepdim=True)

    @cached_property
    def node(self) -> torch.Tensor:
        """The last accepted one, int64 [1]."""
        nodes = torch.cat((torch.full_like(self._steps, self._node), self._children))
        return nodes.index_select(0, self._steps)

    @cached_property
    def ahead(self) -> Ahead:
        """What comes behind the token that was drawn there."""
        return self._sampler.ahead().after(self._tokens, self._steps + 1)


class Question(NamedTuple):
    """Numbers that the device was asked for: a vector, and who is told its values once the host reads."""

    numbers: torch.Tensor
    told: Callable[[list[float]], None]


LookAhead = Callable[[Ending], Question | None]
"""Asks the device for what the next step needs, behind the ending of this one; None when nothing is needed."""


class Acceptance(Protocol):
    """Chooses the accepted path, and appends its tokens to the sampler's text."""

    def __call__(
        self,
        tree: TokenTree,
        logits: torch.Tensor,
        sampler: Sampler,
        ends: Callable[[int], bool],
        look_ahead: LookAhead | None = None,
    ) -> tuple[list[int], list[int]]:
        """Accept a path of ``tree`` by the target's ``logits`` [T, V].

        Args:
            ends: called with every token in turn; True ends the text with it.
            look_ahead: may be called before the host knows the path; what it asks for comes in the same read. Where
                that saves no read it is left alone.

        Returns:
            The path, the root first, and one token per node of it: what follows that node in the text.
        """


def exact(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    ends: Callable[[int], bool],
    look_ahead: LookAhead | None = None,
) -> tuple[list[int], list[int]]:
    """Walk from the root along the target's own choices, as long as they were drafted.

    Each visited node draws one token from its own context, exactly as AR would there, so the walk is AR; a draft only
    saves it the forward pass.
    """
    path, tokens = [0], []
    while True:
        tokens.append(sampler.choose(logits[path[-1]]))
        done = ends(tokens[-1])
        child = tree.child(path[-1], tokens[-1])
        if done or child is None:
            return path, tokens
        path.append(child)


def exact_on_device(
    tree: TokenTree,
    logits: torch.Tensor,
    sampler: Sampler,
    ends: Callable[[int], bool],
    look_ahead: LookAhead | None = None,
) -> tuple[list[int], list[int]]:
    """`exact` for a device that is slow to answer: it finds its way by itself, and is asked once for 8 levels.

    It goes on for all of them, as if there were no end; what it draws behind the end of the walk is forgotten. A
    logits_hook is not called. ``logits`` may have more rows than the tree has nodes. The last question includes what
    the next step needs.
    """
    if len(tree) == 1 and look_ahead is None:
        return exact(tree, logits, sampler, ends)
    path, tokens = [0], []
    while True:
        rest = tree.depth - tree.depths[path[-1]] + 1
        levels = min(_LEVELS, rest)
        walked = walk(tree, logits, sampler, path[-1], levels)
        question = None
        if look_ahead is not None and levels == rest:
            question = look_ahead(Ending(walked, sampler, path[-1]))
        rows, answer = _ask(walked, question)
        for child, *drawn in zip(*rows, strict=True):
            tokens.append(sampler.settle(*drawn))
            if ends(tokens[-1]):
                return path, tokens
            if not child:
                if question is not None:
                    question.told(answer)
                return path, tokens
            path.append(int(child))


def _ask(walked: torch.Tensor, question: Question | None) -> tuple[list[list[float]], list[float]]:
    """The numbers of both, in one read."""
    if question is None:
        return download(walked), []
    told = download(torch.cat((walked.flatten(), question.numbers)))
    rows, levels = walked.shape
    return [told[row * levels : (row + 1) * levels] for row in range(rows)], told[walked.numel() :]


def walk(tree: TokenTree, logits: torch.Tensor, sampler: Sampler, node: int, levels: int) -> torch.Tensor:
    """Walk ``levels`` levels from ``node`` on, without waiting for the device.

    Returns:
        Per level the child of the node that holds the token drawn there, 0 where there is none, in the first row; what
        `Sampler.settle` takes in the others, float64 [3 or 4, levels]. Behind a 0 nothing means anything.
    """
    vocab = logits.shape[-1]
    # No token drawn has the key of the root, which is negative.
    keys = [parent * vocab + token for parent, token in zip(tree.parents, tree.tokens, strict=True)]
    plan = upload([*keys, node], logits.device)
    keys, at = plan[:-1], plan[-1:]
    numbers = torch.arange(len(tree), device=logits.device)
    ahead, seen = sampler.ahead(), []
    for level in range(levels):
        token, *told = sampler.draw(logits.index_select(0, at)[0], ahead)
        at = ((keys == torch.add(token, at, alpha=vocab)) * numbers).amax(-1, keepdim=True)
        seen.append((at, token, *told))
        if level + 1 < levels:
            ahead.push(token)
    columns = list(zip(*seen, strict=True))
    whole = torch.cat([*columns[0], *columns[1]]).double()
    return torch.cat([whole, *(number for column in columns[2:] for number in column)]).view(-1, levels)


class Independent:
    """The paper's Algorithm 1 as written; for reproduction only, since it is biased.

    Every candidate path draws a token of its own at each of its nodes, all from the root's penalty window, and is
    accepted as far as its drafted tokens equal its draws; the longest one wins, ties at random, and its next draw is
    the one more token. A drafted token thus gets as many chances as there are paths through it: of probability p, it
    comes out with 1 - (1 - p)^paths. The text follows from the seed and the tree, and so from the method too.
    """

    def __init__(self, seed: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(
        self,
        tree: TokenTree,
        logits: torch.Tensor,
        sampler: Sampler,
        ends: Callable[[int], bool],
        look_ahead: LookAhead | None = None,
    ) -> tuple[list[int], list[int]]:
        filtered = torch.stack(
            [sampler.filtered(row, [tree.tokens[n] for n in tree.path(node)[1:]]) for node, row in enumerate(logits)]
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
        visited, tokens = paths[winner][: accepted[winner] + 1], []
        for node in visited:
            tokens.append(draws[node][winner])
            sampler.take(tokens[-1], filtered[node])
            if ends(tokens[-1]):
                break
        return visited[: len(tokens)], tokens
