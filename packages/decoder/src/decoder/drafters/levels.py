"""From a hidden state to the tokens of a full tree, level by level."""

from collections.abc import Iterable, Sequence
from itertools import islice

import torch

from decoder.draft_heads import DraftHeads
from decoder.sampler import Sampler
from decoder.target import Target
from decoder.token_tree import RankPath
from decoder.transfers import download, upload


def best_tokens(scores: torch.Tensor, widths: Sequence[int]) -> list[list[int]]:
    """The ``widths[i]`` highest-scoring token ids of row i of ``scores`` [levels, V], the best first.

    Tokens that the filters dropped (-inf) are no candidates.
    """
    _, told = _ranked(scores, max(widths))
    return [_candidates(row[:count]) for count, row in zip(widths, download(told), strict=True)]


def _ranked(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of each row of ``scores`` [..., V], int64 [..., count], and what to tell the host of them.

    That is the same with -1 where a token is no candidate, so that one transfer is enough.
    """
    values, tokens = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return tokens, tokens.masked_fill(~(values > -torch.inf), -1)


def _candidates(told: Iterable[int]) -> list[int]:
    return [token for token in told if token >= 0]


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
        fill = self._in_turn if self.heads.conditioned else self._at_once
        return fill(hidden, sampler, own_level)

    def _at_once(self, hidden: torch.Tensor, sampler: Sampler, own_level: bool) -> list[list[int]]:
        states = [self.target.norm(hidden)] if own_level else []
        states += self.heads(hidden, count=len(self.widths) - len(states))
        logits = self.target.head(torch.stack(states))
        return best_tokens(sampler.draft_scores(logits, self.coupled), self.widths)

    def _in_turn(self, hidden: torch.Tensor, sampler: Sampler, own_level: bool) -> list[list[int]]:
        """Conditioned heads: each reads the best token of the level before, with coupling mostly the true one."""
        newest, ahead = upload(sampler.context[-1:], hidden.device), sampler.ahead()
        ranked = []
        for level, count in enumerate(self.widths):
            if own_level and not level:
                normalised = self.target.norm(hidden)
            else:
                hidden, normalised = self.heads.advance(level - own_level, hidden, self.target.embed(newest[0]))
            scores = sampler.draft_scores(self.target.head(normalised[None]), self.coupled, ahead)
            tokens, told = _ranked(scores[0], count)
            ranked.append(told)
            newest = tokens[:1]
            ahead.push(newest)
        told = iter(download(torch.cat(ranked)))
        levels: list[list[int]] = []
        for row in ranked:
            levels.append(_candidates(islice(told, len(row))))
            # What follows was drafted behind a token that is no candidate.
            if not levels[-1]:
                break
        return levels
