"""Drafts from heads: the levels of candidate tokens that draft heads give for a hidden state."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from decoder.draft_heads import DraftHeads
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.kernels.transfers import download
from decoder.model.target import Target
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler


class Level(NamedTuple):
    """The best candidates for one position.

    A level has a row of candidates for each branch, a sequence of candidates from the levels before.

    Attributes:
        rows: the candidates of each branch as (token, score), the best first. The score is -inf or NaN if there is no
            candidate.
        parents: for each row, the last candidate of its branch, as an index into the candidates of the level before,
            counted row by row. None if there is only one row, which may follow any of them.
    """

    rows: list[list[tuple[int, float]]]
    parents: list[int] | None


class HeadLevels:
    """Gives levels of the best tokens of draft heads.

    Heads that are not conditioned give all levels at once. A conditioned head also reads the token drafted before it,
    so levels are made one after the other; each head is run once for the ``beam`` likeliest branches so far. Below the
    last head's own level it is applied again, deeper than it was trained for.

    Args:
        target: the model, whose final norm, embeddings and language-model head the heads share.
        coupled: whether to rank by log q plus the position's noise instead of log q.
        width: how many candidates a branch gets.
        beam: how many branches of a level the next one continues.
    """

    def __init__(self, target: Target, heads: DraftHeads, coupled: bool, width: int, beam: int = 1):
        self.target, self.heads, self.coupled = target, heads, coupled
        self.vocabulary = DraftVocabulary.of(target, heads)
        self.width, self.beam = min(width, self.vocabulary.size), beam

    def levels(self, hidden: torch.Tensor, sampler: Sampler, count: int, own_level: bool = False) -> list[Level]:
        """``count`` levels from ``hidden`` [1, d], a hidden state before the final norm (paper equations 1 to 3).

        With ``own_level`` the first level is what the hidden state itself predicts (l_0 in the paper) and head 1 gives
        the second one. Without it head 1 gives the first.
        """
        return self.read(download(self.ask(hidden, sampler, sampler.draft_context(), count, own_level)))

    def ask(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool = False
    ) -> torch.Tensor:
        """Launch `levels` behind ``context`` without waiting: returns the vector on the device that `read` decodes."""
        fill = self._in_turn if self.heads.conditioned else self._at_once
        return torch.cat([part.flatten() for part in fill(hidden, sampler, context, count, own_level)])

    def read(self, numbers: Sequence[float]) -> list[Level]:
        """The levels from the values of the vector that `ask` has returned."""
        levels, left = [], iter(numbers)
        branches, parents = 1, None
        while True:
            if levels and self.heads.conditioned and self.beam > 1:
                branches = min(self.beam, branches * self.width)
                parents = [int(index) for index in islice(left, branches)]
            scores, tokens = (list(islice(left, branches * self.width)) for _ in range(2))
            if not scores:
                return levels
            pairs = iter(zip(map(int, tokens), scores, strict=True))
            levels.append(Level([list(islice(pairs, self.width)) for _ in range(branches)], parents))

    def _own(self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The best scores and tokens, both [1, width], of what the hidden state itself predicts, among all tokens."""
        logits = self.target.head(self.target.norm(hidden))
        return tuple(sampler.draft_scores(logits, self.coupled, context).topk(self.width))

    def _best(
        self,
        normalised: torch.Tensor,
        sampler: Sampler,
        context: DraftContext,
        skip: int = 0,
        drafted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best scores of heads and their tokens, both [n, width], from normalised states [n, d].

        Without ``drafted`` the rows are n positions in a row, the first of them ``skip`` behind the next one. Otherwise
        row i is the position behind branch i, whose tokens are ``drafted[i]``, int64 [n, depth].
        """
        if drafted is None:
            scores = self.vocabulary.scores(normalised, sampler, self.coupled, context, skip)
        else:
            scores = self.vocabulary.branch_scores(normalised, sampler, self.coupled, context, drafted)
        values, indices = scores.topk(self.width)
        return values, self.vocabulary.token_ids(indices)

    def _at_once(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool
    ) -> Iterator[torch.Tensor]:
        """`levels` of heads that are not conditioned: scores, then tokens, of each level."""
        if own_level:
            yield from self._own(hidden, sampler, context)
        if count > own_level:
            states = torch.cat(self.heads(hidden, count=count - own_level))
            for level in zip(*self._best(states, sampler, context, skip=int(own_level)), strict=True):
                yield from level

    def _in_turn(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool
    ) -> Iterator[torch.Tensor]:
        """`levels` of conditioned heads: scores and tokens of each, and between two levels of a beam the parents."""
        drafted, likely = None, 0.0
        for level in range(count):
            if own_level and not level:
                scores, tokens = self._own(hidden, sampler, context)
            else:
                newest = context.newest() if drafted is None else drafted[:, -1]
                head = min(level - own_level, self.heads.num_heads - 1)
                hidden, normalised = self.heads.advance(head, hidden, self.target.embed(newest))
                scores, tokens = self._best(normalised, sampler, context, drafted=drafted)
            yield scores
            yield tokens
            if level + 1 == count:
                return
            if self.beam == 1:
                context.push(tokens[0, :1])
                continue
            # Scores that hold noise can be compared like this, too: one far above the others is mostly right.
            likely = (likely + scores.log_softmax(-1)).flatten()
            likely, indices = likely.topk(min(self.beam, len(likely)))
            likely, rows = likely[:, None], indices // self.width
            newest = tokens.flatten().index_select(0, indices)[:, None]
            hidden = hidden.index_select(0, rows)
            drafted = newest if drafted is None else torch.cat((drafted.index_select(0, rows), newest), dim=1)
            yield indices


def ranked_tokens(levels: Sequence[Level]) -> list[list[int]]:
    """The tokens of each level's first row, the best first, as `TokenTree.add_ranked` takes them."""
    return [[token for token, score in level.rows[0] if score > -torch.inf] for level in levels]
