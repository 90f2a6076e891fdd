"""Levels of candidates from a draft model: a small model of the same vocabulary that reads the sequence itself."""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from decoder.cache.full import FullCache
from decoder.drafters.base import DrafterContext
from decoder.drafters.levels import Filling, Level, Levels
from decoder.model.target import Target
from decoder.model.vocabularies import known
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.timings import stage

_GROWTH = 1024  # slots beyond the prompt that the cache has at first
_PREFILLED = 16  # tokens from which on all but the newest are read without logits
_MOST_BEHIND = 2048  # tokens of a sequence that are not caught up with in one step

GoesOn = Callable[[int, list[tuple[int, float]]], bool]
"""Told how many levels there were before this one, and its candidates: whether another level is worth its pass."""


class DraftModelLevels(Levels):
    """Gives levels of the best tokens of a draft model, each behind the best token of the level before.

    The draft model has a cache of its own with the whole sequence. It keeps the tokens that it has drafted from; those
    that the sequence did not go on with are taken back when the next levels are drafted, and the sequence's newest
    tokens are read then, in the pass of the first level. So steps that draft nothing cost nothing.

    Args:
        context: the target, the draft model and the prompt.
        width: how many candidates a level gets.

    Attributes:
        goes_on: asked behind each level but the last; None always goes on.
        behind_seconds: spent on tokens that steps without drafts had left unread, which steps that draft do not.
    """

    source = "draft model"
    drafts_ahead = False
    stops_early = True

    def __init__(self, context: DrafterContext, width: int):
        assert context.draft_model is not None
        self.target, self.small, self.coupled = context.target, context.draft_model, context.options.coupled
        self.width = min(width, self.target.vocab_size, self.small.vocab_size)
        self.goes_on: GoesOn | None = None
        self.behind_seconds = 0.0
        self.positions: int = self.small.model.config.max_position_embeddings
        slots = min(context.longest_text, len(context.prompt) + _GROWTH) + 1
        self.cache = FullCache(slots, growable=True, takes_back=True)
        if self.small.has_two_forms:
            self.cache.prompt_tokens = len(context.prompt)
        self._prompt, self._running = context.prompt, context.running
        self._read = 0  # tokens of the sequence whose entries are in the cache
        self._drafted: list[int] = []  # those behind them

    @property
    def reads_prompt(self) -> bool:
        """Whether the draft model can read the prompt: it has enough positions."""
        return len(self._prompt) < self.positions

    def read_prompt(self, end: int) -> None:
        """Read the prompt up to its token ``end``, as far as it has not been read yet."""
        if not self._read and self._running() == 1:
            # As the engine does with the target where a sequence begins: the user may have changed the model.
            self.small.refresh_weights()
        if tokens := known(self._prompt[self._read : end], self.small.vocab_size):
            with self.small.patched():
                self.small.prefill(tokens, self.cache)
            self._read = end

    def most(self, own_level: bool) -> int | None:
        return None

    def state_behind(self, cache: FullCache, sampler: Sampler) -> "DraftModelLevels | None":
        length = len(sampler.context)
        return self if length < self.positions and length - self._read <= _MOST_BEHIND else None

    def filling(
        self, state: object, sampler: Sampler, context: DraftContext, count: int, own_level: bool = False
    ) -> Filling:
        ranks, numbers = self.target.ranks, []
        tokens = self._unread(sampler.context)
        tokens += self._forced(sampler, context)
        for level in range(count):
            (logits,) = yield ModelPass((self.small, "levels"), self, tokens)
            row = ranks.agree(sampler.best_drafts(logits[0], self.coupled, context, self.width))
            numbers += [number for candidate in row for number in candidate]
            last = level + 1 == count or not self._room(sampler) > 0
            if last or (self.goes_on is not None and not ranks.agree(self.goes_on(level, row))):
                break
            self._drafted.append(row[0][0])
            context.push(row[0][0])
            tokens = [row[0][0], *self._forced(sampler, context)]
        return [torch.tensor(numbers, dtype=torch.float64)]

    def _forced(self, sampler: Sampler, context: DraftContext) -> list[int]:
        """Draft the tokens that the constraint forces next, where those who take the levels know them, too."""
        if (path := sampler.constraint) is None or self.goes_on is None:
            return []
        place = path.find(context.drafted)
        forced = list(() if place is None else path.forced(place)[: self._room(sampler)])
        self._drafted += forced
        for token in forced:
            context.push(token)
        return known(forced, self.small.vocab_size)

    def _room(self, sampler: Sampler) -> int:
        """How many more tokens it may draft and read: one position is for what it then predicts."""
        return self.positions - 1 - len(sampler.context) - len(self._drafted)

    def read(self, numbers: Sequence[float]) -> list[Level]:
        row = list(zip(map(int, numbers[::2]), numbers[1::2], strict=True))
        return [Level([row[start : start + self.width]], [0]) for start in range(0, len(row), self.width)]

    def _unread(self, sequence: Sequence[int]) -> list[int]:
        """Take back the drafts that the sequence did not go on with; its tokens that are not in the cache."""
        for token in self._drafted:
            # The newest token is read in any case, since its logits are wanted.
            if self._read + 1 >= len(sequence) or sequence[self._read] != token:
                break
            self._read += 1
        unread, self._drafted = sequence[self.cache.rewind(self._read) :], []
        self._read = len(sequence)
        return known(unread, self.small.vocab_size)


class ModelPass(NamedTuple):
    """A pass of a draft model over the next ``tokens`` of a sequence, whose last logits [1, V] are the result."""

    key: Hashable
    levels: DraftModelLevels
    tokens: list[int]

    @staticmethod
    @stage("draft")
    def together(passes: Sequence["ModelPass"]) -> list[tuple[torch.Tensor, ...]]:
        """The results of several sequences, whose tokens are read in one pass."""
        small: Target = passes[0].levels.small
        caches, trees = [], []
        with small.patched():
            for one in passes:
                cache, tokens = one.levels.cache, one.tokens
                if len(tokens) > _PREFILLED:
                    start = time.perf_counter()
                    small.prefill(tokens[:-1], cache)
                    one.levels.behind_seconds += time.perf_counter() - start
                    tokens = tokens[-1:]
                tree = TokenTree(tokens[0])
                tree.add_path(tokens[1:], one.levels.source)
                caches.append(cache)
                trees.append(tree)
            verifications = small.forward(trees, caches)
        for tree, cache in zip(trees, caches, strict=True):
            cache.keep(range(len(tree)))
        return [(one.logits[len(tree) - 1 : len(tree)],) for one, tree in zip(verifications, trees, strict=True)]
