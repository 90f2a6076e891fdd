"""From a hidden state to the tokens of a full tree, level by level."""

from collections.abc import Sequence

import torch

from decoder.draft_heads import DraftHeads
from decoder.sampler import Sampler
from decoder.target import Target
from decoder.token_tree import RankPath


def best_tokens(scores: torch.Tensor, widths: Sequence[int]) -> list[list[int]]:
    """The ``widths[i]`` highest-scoring token ids of row i of ``scores`` [levels, V], the best first.

    Tokens that the filters dropped (-inf) are no candidates.
    """
    values, tokens = scores.topk(min(max(widths), scores.shape[-1]), dim=-1)
    levels = []
    for count, row, ids in zip(widths, values.tolist(), tokens.tolist(), strict=True):
        levels.append([token for token, value in zip(ids[:count], row, strict=False) if value > float("-inf")])
    return levels


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
        levels: list[list[int]] = []
        drafted: list[int] = []
        for level, count in enumerate(self.widths):
            if own_level and not level:
                normalised = self.target.norm(hidden)
            else:
                before = drafted[-1] if drafted else sampler.context[-1]
                hidden, normalised = self.heads.advance(level - own_level, hidden, self.target.embed(before))
            scores = sampler.draft_scores(self.target.head(normalised[None]), self.coupled, drafted)
            levels += best_tokens(scores, [count])
            if not levels[-1]:
                break
            drafted.append(levels[-1][0])
        return levels
