"""Log-probabilities of a prompt's tokens, from the passes that read it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from decoder.backends.base import PassOutput
from decoder.backends.transfers import upload
from decoder.sampling.filters import highest

_ROWS = 64  # positions whose logits are normalised together, in double precision


class PromptLogprob(NamedTuple):
    """A token of a prompt under the model's own distribution behind the tokens before it.

    There is no temperature, penalty or filter in it, which are for tokens that are drawn.

    Attributes:
        logprob: its log-probability.
        rank: its place among all tokens, the most likely one at 1; equally likely ones share the first place of theirs.
        top_logprobs: the most likely tokens there as (token id, log-probability), in the order of `GenerationOutput`'s.
    """

    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]]


class PromptScores:
    """Collects them for one prompt.

    Args:
        prompt: its token ids.
        most_likely: how many of the most likely tokens are collected at every position.
    """

    def __init__(self, prompt: Sequence[int], most_likely: int):
        self._prompt, self._most_likely = list(prompt), most_likely
        self.begin()

    def begin(self) -> None:
        """Forget what has been collected: the prompt is read from its beginning."""
        self.found: list[PromptLogprob | None] = [None]
        """By token; None for the first one, before which there is nothing."""

    @property
    def complete(self) -> bool:
        """Whether all tokens have theirs."""
        return len(self.found) == len(self._prompt)

    def read(self, output: PassOutput) -> None:
        """Take the logits of the pass over the next tokens.

        Raises:
            ValueError: there is a NaN among them.
        """
        for logits in output.logits.split(_ROWS):
            following = self._prompt[len(self.found) :][: len(logits)]
            if following:
                self._take(logits[: len(following)].double(), following)

    def _take(self, logits: torch.Tensor, following: Sequence[int]) -> None:
        tokens = upload(following, logits.device)[:, None]
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, tokens)[:, 0].tolist()
        ranks = ((logits > logits.gather(-1, tokens)).sum(-1) + 1).tolist()
        if any(map(math.isnan, own)):
            raise ValueError("the logits hold NaN: the model's dtype overflows")
        likely: list[list[tuple[int, float]]] = [[] for _ in following]
        if self._most_likely:
            ids = highest(logits, self._most_likely)
            pairs = zip(ids.tolist(), logprobs.gather(-1, ids).tolist(), strict=True)
            likely = [[one for one in zip(*row, strict=True) if one[1] > -math.inf] for row in pairs]
        self.found += map(PromptLogprob, own, ranks, likely)
