"""From a hidden state to the tokens of a full tree, level by level."""

from collections.abc import Sequence
from itertools import islice

import torch

from decoder.draft_heads import DraftHeads
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.kernels.transfers import download
from decoder.model.target import Target
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import RankPath


def ranked(
    scores: torch.Tensor, count: int, vocabulary: DraftVocabulary | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best tokens, fewer in a smaller vocabulary, of ``scores`` [..., V], and what to tell the host.

    Both are int64 [..., count], the best first. The host is told -1 where a token was dropped by a filter and is no
    candidate, so that one read is enough. Scores of a draft ``vocabulary`` give target ids likewise.
    """
    values, tokens = scores.topk(min(count, scores.shape[-1]), dim=-1)
    tokens = tokens if vocabulary is None else vocabulary.token_ids(tokens)
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
        self.vocabulary = DraftVocabulary.of(target, heads)
        self.widths = [0] * max((len(path) for path in paths), default=0)
        for path in paths:
            self.widths[len(path) - 1] = max(self.widths[len(path) - 1], path[-1] + 1)

    def candidates(self, hidden: torch.Tensor, sampler: Sampler, own_level: bool) -> list[list[int]]:
        """Token ids per level from ``hidden`` [d], a state before the final norm (paper equations 1 to 3).

        With ``own_level`` the first level is what the state itself predicts (l_0), and head 1 fills the second;
        without it head 1 fills the first.
        """
        return self.read(download(self.ask(hidden, sampler, sampler.draft_context(), own_level)), own_level)

    def ask(self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, own_level: bool) -> torch.Tensor:
        """`candidates` behind ``context``, without waiting for the device: a vector whose values `read` takes."""
        fill = self._in_turn if self.heads.conditioned else self._at_once
        return torch.cat(fill(hidden, sampler, context, own_level))

    def read(self, told: Sequence[float], own_level: bool) -> list[list[int]]:
        """The candidates that the numbers of `ask` stand for."""
        numbers, levels = iter(told), []
        for level, width in enumerate(self.widths):
            known = self.target.vocab_size if own_level and not level else self.vocabulary.size
            row = islice(numbers, min(width, known))
            levels.append([int(token) for token in row if token >= 0])
            # What follows was drafted behind a token that is no candidate.
            if self.heads.conditioned and not levels[-1]:
                break
        return levels

    def _at_once(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, own_level: bool
    ) -> list[torch.Tensor]:
        levels, first = [], int(own_level)
        if own_level:
            levels.append(self._own_level(hidden, sampler, context)[1])
        if len(self.widths) > first:
            states = torch.stack(self.heads(hidden, count=len(self.widths) - first))
            scores = self.vocabulary.scores(states, sampler, self.coupled, context, skip=first)
            _, told = ranked(scores, max(self.widths[first:]), self.vocabulary)
            levels += [row[:width] for width, row in zip(self.widths[first:], told, strict=True)]
        return levels

    def _own_level(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the state itself predicts, of all tokens: no head guesses there, so none but the model's own counts."""
        logits = self.target.head(self.target.norm(hidden)[None])
        return ranked(sampler.draft_scores(logits, self.coupled, context)[0], self.widths[0])

    def _in_turn(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, own_level: bool
    ) -> list[torch.Tensor]:
        """Conditioned heads: each reads the best token of the level before, with coupling mostly the true one."""
        levels = []
        for level, width in enumerate(self.widths):
            if own_level and not level:
                tokens, told = self._own_level(hidden, sampler, context)
            else:
                newest = self.target.embed(context.newest()[0])
                hidden, normalised = self.heads.advance(level - own_level, hidden, newest)
                scores = self.vocabulary.scores(normalised[None], sampler, self.coupled, context)
                tokens, told = ranked(scores[0], width, self.vocabulary)
            levels.append(told)
            context.push(tokens[:1])
        return levels
