"""From a hidden state to candidate tokens: the levels that draft heads fill."""

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
    """The best candidates of a level, as the host reads them.

    Attributes:
        rows: (token, score) behind each branch, the best first; the score is -inf or NaN where there is no candidate.
        parents: for each row the candidate of the level before that it stands behind, counted row by row; None where
            there is one row, which may stand behind any of them.
    """

    rows: list[list[tuple[int, float]]]
    parents: list[int] | None


class HeadLevels:
    """Fills levels with the best tokens of draft heads.

    Heads that look at no tokens fill all levels at once. Conditioned ones read the token drafted before, with coupling
    mostly the true one, and run behind the ``beam`` likeliest branches of the level before at once; the last one goes
    on drafting deeper than it was trained for.

    Args:
        target: its final norm, embeddings and language-model head serve the heads.
        coupled: rank by log q plus the position's noise.
        width: candidates behind each branch.
        beam: branches of a level that the next one goes on from.
    """

    def __init__(self, target: Target, heads: DraftHeads, coupled: bool, width: int, beam: int = 1):
        self.target, self.heads, self.coupled = target, heads, coupled
        self.vocabulary = DraftVocabulary.of(target, heads)
        self.width, self.beam = min(width, self.vocabulary.size), beam

    def levels(self, hidden: torch.Tensor, sampler: Sampler, count: int, own_level: bool = False) -> list[Level]:
        """``count`` levels from ``hidden`` [1, d], a state before the final norm (paper equations 1 to 3).

        With ``own_level`` the first level is what the state itself predicts (l_0), and head 1 fills the second;
        without it head 1 fills the first.
        """
        return self.read(download(self.ask(hidden, sampler, sampler.draft_context(), count, own_level)))

    def ask(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool = False
    ) -> torch.Tensor:
        """`levels` behind ``context``, without waiting for the device: a vector whose values `read` takes."""
        fill = self._in_turn if self.heads.conditioned else self._at_once
        return torch.cat([part.flatten() for part in fill(hidden, sampler, context, count, own_level)])

    def read(self, numbers: Sequence[float]) -> list[Level]:
        """The levels that the numbers of `ask` stand for."""
        levels, left = [], iter(numbers)
        branches, parents = 1, None
        while True:
            if levels and self.heads.conditioned and self.beam > 1:
                branches = min(self.beam, branches * self.width)
                parents = [int(place) for place in islice(left, branches)]
            scores, tokens = (list(islice(left, branches * self.width)) for _ in range(2))
            if not scores:
                return levels
            pairs = iter(zip(map(int, tokens), scores, strict=True))
            levels.append(Level([list(islice(pairs, self.width)) for _ in range(branches)], parents))

    def _own(self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The best scores and tokens, both [1, width], of what the state itself predicts, among all tokens."""
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

        Without ``drafted`` these are of n positions one behind the other, the first of them ``skip`` behind the next
        one, else of the position behind each branch, whose tokens are ``drafted`` int64 [n, depth].
        """
        if drafted is None:
            scores = self.vocabulary.scores(normalised, sampler, self.coupled, context, skip)
        else:
            scores = self.vocabulary.branch_scores(normalised, sampler, self.coupled, context, drafted)
        values, places = scores.topk(self.width)
        return values, self.vocabulary.token_ids(places)

    def _at_once(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool
    ) -> Iterator[torch.Tensor]:
        if own_level:
            yield from self._own(hidden, sampler, context)
        if count > own_level:
            states = torch.cat(self.heads(hidden, count=count - own_level))
            for level in zip(*self._best(states, sampler, context, skip=int(own_level)), strict=True):
                yield from level

    def _in_turn(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool
    ) -> Iterator[torch.Tensor]:
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
            # Among scores with noise in them, too, one far above the others is mostly right.
            likely = (likely + scores.log_softmax(-1)).flatten()
            likely, places = likely.topk(min(self.beam, len(likely)))
            likely, rows = likely[:, None], places // self.width
            newest = tokens.flatten().index_select(0, places)[:, None]
            hidden = hidden.index_select(0, rows)
            drafted = newest if drafted is None else torch.cat((drafted.index_select(0, rows), newest), dim=1)
            yield places


def ranked_tokens(levels: Sequence[Level]) -> list[list[int]]:
    """The tokens of each level's first row, the best first: for trees whose shape is fixed."""
    return [[token for token, score in level.rows[0] if score > -torch.inf] for level in levels]
