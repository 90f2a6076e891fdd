"""From a hidden state to the tokens of a full tree, level by level."""

from collections.abc import Sequence
from itertools import islice

import torch

from decoder.draft_heads import DraftHeads
from decoder.kernels.transfers import download
from decoder.model.target import Target
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import RankPath


def ranked(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best tokens, fewer in a smaller vocabulary, of ``scores`` [..., V], and what to tell the host.

    Both are int64 [..., count], the best first. The host is told -1 where a token was dropped by a filter and is no
    candidate, so that one read is enough.
    """
    values, tokens = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return tokens, tokens.masked_fill(~(values > -torch.inf), -1)


class HeadLevels:
    """Fills the levels of a tree with the best tokens of draft heads.

    Args:
        target: its final norm, embeddings and language-model head serve the heads.
        paths: the nodes of the tree, as `token_tree.rank_paths` gives them.
        coupled: rank by log q plus the position's noise.
    """

    def __init__(self, target: Target, heads: DraftHeads, paths: Sequence[RankPath], coupled: bool):
        self.target, self.heads, self.paths, self.coupled = target, heads, paths, coupled
        self.widths = [0] * max((len(path) for path in paths), default=0)
        for path in paths:
            self.widths[len(path) - 1] = max(self.widths[len(path) - 1], path[-1] + 1)

    def candidates(self, hidden: torch.Tensor, sampler: Sampler, own_level: bool) -> list[list[int]]:
        """Token ids per level from ``hidden`` [d], a state before the final norm (paper equations 1 to 3).

        With ``own_level`` the first level is what the state itself predicts (l_0), and head 1 fills the second;
        without it head 1 fills the first.
        """
        return self.read(download(self.ask(hidden, sampler, sampler.draft_context(), own_level)))

    def ask(self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, own_level: bool) -> torch.Tensor:
        """`candidates` behind ``context``, without waiting for the device: a vector whose values `read` takes."""
        fill = self._in_turn if self.heads.conditioned else self._at_once
        return torch.cat(fill(hidden, sampler, context, own_level))

    def read(self, told: Sequence[float]) -> list[list[int]]:
        """The candidates that the numbers of `ask` stand for."""
        numbers, levels = iter(told), []
        for width in self.widths:
            row = islice(numbers, min(width, self.target.vocab_size))
            levels.append([int(token) for token in row if token >= 0])
            # What follows was drafted behind a token that is no candidate.
            if self.heads.conditioned and not levels[-1]:
                break
        return levels

    def _at_once(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, own_level: bool
    ) -> list[torch.Tensor]:
        states = [self.target.norm(hidden)] if own_level else []
        states += self.heads(hidden, count=len(self.widths) - len(states))
        logits = self.target.head(torch.stack(states))
        _, told = ranked(sampler.draft_scores(logits, self.coupled, context), max(self.widths))
        return [row[:width] for width, row in zip(self.widths, told, strict=True)]

    def _in_turn(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, own_level: bool
    ) -> list[torch.Tensor]:
        """Conditioned heads: each reads the best token of the level before, with coupling mostly the true one."""
        levels = []
        for level, width in enumerate(self.widths):
            if own_level and not level:
                normalised = self.target.norm(hidden)
            else:
                newest = self.target.embed(context.newest()[0])
                hidden, normalised = self.heads.advance(level - own_level, hidden, newest)
            scores = sampler.draft_scores(self.target.head(normalised[None]), self.coupled, context)
            tokens, told = ranked(scores[0], width)
            levels.append(told)
            context.push(tokens[:1])
        return levels
