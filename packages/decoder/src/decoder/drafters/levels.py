"""From a hidden state to candidate tokens: the levels that draft heads fill, of one sequence or of many together."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from decoder.backends.base import PassOutput
from decoder.backends.native.levels import NativeLevels
from decoder.backends.native.structures import MOST_LEVELS
from decoder.backends.transfers import download
from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHeads
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.heads import Heads
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


class Work(Protocol):
    """What a level needs of the weights; the work of sequences whose keys are equal is done at once, by `together`."""

    @property
    def key(self) -> Hashable: ...

    @staticmethod
    def together(works: Sequence[Any]) -> list[tuple[torch.Tensor, ...]]:
        """The results of each."""


class Product(NamedTuple):
    """`Work` on rows: sequences that need the same send their rows through the weights together.

    Attributes:
        key: equal where the same is needed.
        run: takes tensors of n rows each and gives such tensors.
        inputs: what this sequence gives it.
    """

    key: Hashable
    run: Callable[..., tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, ...]

    @staticmethod
    def together(products: Sequence["Product"]) -> list[tuple[torch.Tensor, ...]]:
        inputs = [torch.cat(parts) for parts in zip(*(product.inputs for product in products), strict=True)]
        rows = [len(product.inputs[0]) for product in products]
        return list(zip(*(output.split(rows) for output in products[0].run(*inputs)), strict=True))


Filling = Generator[Work, tuple[torch.Tensor, ...], list[torch.Tensor]]
"""Asks for work and is sent its results; returns the tensors that `Levels.read` takes, flattened."""

Advancing = Generator[Work, tuple[torch.Tensor, ...], tuple[Any, torch.Tensor]]
"""Asks for products likewise; returns the state and the logits [n, v] of a level."""


State = Any
"""What a level is drafted from, in a form of the heads' own: a hidden state [n, d] of n branches, or more than that.

It has ``index_select(0, rows)`` wherever branches have been drafted.
"""


class Levels(ABC):
    """A source of levels for one sequence, which may draft together with those of other sequences.

    Attributes:
        source: its name, under which drafts are counted.
        target: the model that is decoded.
    """

    source: ClassVar[str]
    drafts_ahead: ClassVar[bool]
    """Whether levels can be drafted behind a walk whose end only the device knows."""
    stops_early: ClassVar[bool] = False
    """Whether there may be fewer levels than were asked for."""
    at_once: ClassVar[bool] = False
    """Whether all levels come with one pass, which costs about the same for any number of them."""
    target: Target

    def follow(self, verification: PassOutput, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Take in that a step has accepted ``path`` and added ``tokens`` to the sequence."""
        return

    def native(self) -> NativeLevels | None:
        """The same levels by the native library, if it can fill them. The model must be patched."""
        return None

    @abstractmethod
    def most(self, own_level: bool) -> int | None:
        """How many levels there are at most; None where there is no end to them."""

    @abstractmethod
    def state_behind(self, cache: FullCache, sampler: Sampler) -> State | None:
        """What levels behind the sequence are drafted from; None where that is not known, or no level can be."""

    @abstractmethod
    def filling(self, state: State, sampler: Sampler, context: DraftContext, count: int, own_level: bool) -> Filling:
        """Draft up to ``count`` levels, one at least, behind ``context``."""

    @abstractmethod
    def read(self, numbers: Sequence[float]) -> list[Level]:
        """The levels from the values of the tensors that `filling` has returned, in a row."""


class HeadLevels(Levels):
    """Gives levels of the best tokens of draft heads.

    Heads that are not conditioned give all levels at once. A conditioned head also reads the token drafted before it,
    so levels are made one after the other; each head is run once for the ``beam`` likeliest branches so far. Below the
    last head's own level it is applied again, deeper than it was trained for.

    Args:
        target: the model, whose final norm, embeddings and language-model head the heads share.
        coupled: whether to rank by log q plus the position's noise instead of log q.
        width: how many candidates a branch gets.
        beam: how many branches of a level the next one continues.

    Attributes:
        state: what levels are drafted from; None where nothing is known yet.
    """

    source = "heads"
    drafts_ahead = True

    def __init__(self, target: Target, heads: Heads, coupled: bool, width: int, beam: int = 1):
        self.target, self.heads, self.coupled = target, heads, coupled
        self.vocabulary = DraftVocabulary.of(target, heads)
        self.width, self.beam = min(width, self.vocabulary.size), beam
        self.state: State = None

    def native(self) -> NativeLevels | None:
        return self.vocabulary.native(self.heads)

    def most(self, own_level: bool) -> int | None:
        # A conditioned head is applied again below its own level.
        return None if self.heads.conditioned else self.heads.num_heads + own_level

    def state_behind(self, cache: FullCache, sampler: Sampler) -> State | None:
        return self.state

    def follow(self, verification: PassOutput, path: Sequence[int], tokens: Sequence[int]) -> None:
        # The next verification may write over its own.
        self.state = verification.hidden[path[-1] : path[-1] + 1].clone()

    def ask(
        self, state: State, sampler: Sampler, context: DraftContext, count: int, own_level: bool = False
    ) -> torch.Tensor:
        """Launch ``count`` levels behind ``context`` without waiting; returns the vector on the device for `read`.

        They are drafted from ``state``, which is a hidden state before the final norm [1, d] (paper equations 1 to 3).
        With ``own_level`` the first level is what the hidden state itself predicts (l_0 in the paper) and head 1 gives
        the second one. Without it head 1 gives the first.
        """
        filling = self.filling(state, sampler, context, count, own_level)
        work = next(filling)
        while True:
            try:
                work = filling.send(work.together([work])[0])
            except StopIteration as done:
                return _flat(done.value)

    def filling(self, state: State, sampler: Sampler, context: DraftContext, count: int, own_level: bool) -> Filling:
        fill = self._in_turn if self.heads.conditioned else self._at_once
        return fill(state, sampler, context, count, own_level)

    def read(self, numbers: Sequence[float]) -> list[Level]:
        """The levels from the values of the vector that `ask` has returned."""
        levels: list[Level] = []
        left, branches = iter(numbers), 1
        parents: list[int] | None = None
        while True:
            if levels and self.heads.conditioned and self.beam > 1:
                branches = min(self.beam, branches * self.width)
                parents = [int(index) for index in islice(left, branches)]
            scores, tokens = (list(islice(left, branches * self.width)) for _ in range(2))
            if not scores:
                return levels
            pairs = iter(zip(map(int, tokens), scores, strict=True))
            levels.append(Level([list(islice(pairs, self.width)) for _ in range(branches)], parents))

    def _own(self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext) -> Filling:
        """The best scores and tokens, both [1, width], of what the state itself predicts, among all tokens."""
        key = self.target, "own"
        (logits,) = yield Product(key, lambda hidden: (self.target.head(self.target.norm(hidden)),), (hidden,))
        return list(sampler.draft_scores(logits, self.coupled, context).topk(self.width))

    def _best(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """The best scores of heads and their tokens, both [n, width], from all scores [n, v]."""
        values, indices = scores.topk(self.width)
        return [values, self.vocabulary.token_ids(indices)]

    def _at_once(
        self, hidden: torch.Tensor, sampler: Sampler, context: DraftContext, count: int, own_level: bool
    ) -> Filling:
        parts = (yield from self._own(hidden, sampler, context)) if own_level else []
        if (heads := count - own_level) > 0:
            (logits,) = yield self._all(hidden, heads)
            scores = self.vocabulary.scores(logits[0], sampler, self.coupled, context, skip=int(own_level))
            for level in zip(*self._best(scores), strict=True):
                parts += level
        return parts

    def _all(self, state: State, count: int) -> Work:
        """What gives the logits [1, count, v] of all levels."""

        def run(hidden: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.vocabulary.logits(torch.stack(self.heads(hidden, count=count), 1)),)

        return Product((self.heads, "all", count), run, (state,))

    def _in_turn(self, state: State, sampler: Sampler, context: DraftContext, count: int, own_level: bool) -> Filling:
        parts: list[torch.Tensor] = []
        drafted: torch.Tensor | None = None
        likely: torch.Tensor | float = 0.0
        for level in range(count):
            if own_level and not level:
                scores, tokens = yield from self._own(state, sampler, context)
            else:
                newest = context.newest() if drafted is None else drafted[:, -1]
                state, logits = yield from self._advance(level - own_level, state, newest)
                scores, tokens = self._best(self._conditioned_scores(logits, sampler, context, drafted))
            parts += [scores, tokens]
            if level + 1 == count:
                break
            if self.beam == 1:
                context.push(tokens[0, :1])
                continue
            # Scores that hold noise can be compared like this, too: one far above the others is mostly right.
            # A branch behind which nothing may follow has no numbers, and is the last to go on from.
            likely = (likely + scores.log_softmax(-1)).flatten().nan_to_num(nan=-torch.inf)
            likely, indices = likely.topk(min(self.beam, len(likely)))
            likely, rows = likely[:, None], indices // self.width
            newest = tokens.flatten().index_select(0, indices)[:, None]
            state = state.index_select(0, rows)
            drafted = newest if drafted is None else torch.cat((drafted.index_select(0, rows), newest), dim=1)
            parts.append(indices)
        return parts

    def _advance(self, level: int, state: State, newest: torch.Tensor) -> Advancing:
        """The next states [n, d] and logits [n, v] behind each branch, of which ``newest`` [n] are the last tokens.

        The last head serves deeper levels.
        """
        assert isinstance(self.heads, DraftHeads)  # a layer's levels override this
        heads, head = self.heads, min(level, self.heads.num_heads - 1)

        def run(hidden: torch.Tensor, newest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state, normalised = heads.advance(head, hidden, self.target.embed(newest))
            return state, self.vocabulary.logits(normalised)

        state, logits = yield Product((heads, head), run, (state, newest))
        return state, logits

    def _conditioned_scores(
        self, logits: torch.Tensor, sampler: Sampler, context: DraftContext, drafted: torch.Tensor | None
    ) -> torch.Tensor:
        """[n, v] of the position behind each branch, whose tokens are ``drafted`` int64 [n, depth]."""
        if drafted is None:
            return self.vocabulary.scores(logits, sampler, self.coupled, context)
        return self.vocabulary.branch_scores(logits, sampler, self.coupled, context, drafted)


class LevelsWanted(NamedTuple):
    """What a drafter needs before it can propose; the arguments of `Levels.filling`.

    Attributes:
        receive: called with the levels, and with this sequence's share of the seconds that they took.
    """

    levels: Levels
    state: State
    sampler: Sampler
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    own_level: bool
    receive: Callable[[list[Level], float], None]


def fill_together(wanted: Sequence[LevelsWanted]) -> None:
    """Fill the levels that several sequences want: the weights are read once for all and not once for each."""
    if not wanted:
        return
    start = time.perf_counter()
    numbers = _by_library(wanted)
    others = [sequence for sequence in range(len(wanted)) if sequence not in numbers]
    if others:
        ranks = wanted[0].levels.target.ranks
        parts = _by_operators([wanted[sequence] for sequence in others])
        numbers |= zip(others, ranks.agree([download(_flat(one)) for one in parts]), strict=True)
    levels = [one.levels.read(numbers[sequence]) for sequence, one in enumerate(wanted)]
    seconds = time.perf_counter() - start
    for one, own in zip(wanted, levels, strict=True):
        one.receive(own, seconds / len(wanted))


def _by_library(wanted: Sequence[LevelsWanted]) -> dict[int, list[float]]:
    """What `Levels.read` takes of those sequences whose levels the native library can fill."""
    groups: dict[tuple[NativeLevels, bool], list[int]] = {}
    for sequence, one in enumerate(wanted):
        can = one.sampler.native_drafts is not None and one.count <= MOST_LEVELS
        found = one.levels.native() if can else None
        if found is not None:
            groups.setdefault((found, one.own_level), []).append(sequence)
    numbers: dict[int, list[float]] = {}
    for (levels, _), sequences in groups.items():
        numbers |= zip(sequences, levels.fill([wanted[sequence] for sequence in sequences]), strict=True)
    return numbers


def _by_operators(wanted: Sequence[LevelsWanted]) -> list[list[torch.Tensor]]:
    """The same by PyTorch's operators, as tensors."""
    running: dict[int, tuple[Filling, Work]] = {}
    parts: dict[int, list[torch.Tensor]] = {}
    for sequence, one in enumerate(wanted):
        filling = one.levels.filling(one.state, one.sampler, one.sampler.draft_context(), one.count, one.own_level)
        running[sequence] = filling, next(filling)
    while running:
        groups: dict[Hashable, list[int]] = {}
        for sequence, (_, work) in running.items():
            groups.setdefault(work.key, []).append(sequence)
        for group in groups.values():
            works = [running[sequence][1] for sequence in group]
            for sequence, results in zip(group, works[0].together(works), strict=True):
                filling = running[sequence][0]
                try:
                    running[sequence] = filling, filling.send(results)
                except StopIteration as done:
                    parts[sequence] = done.value
                    del running[sequence]
    return [parts[sequence] for sequence in range(len(wanted))]


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


def ranked_tokens(levels: Sequence[Level]) -> list[list[int]]:
    """The tokens of each level's first row, the best first, as `TokenTree.add_ranked` takes them."""
    return [[token for token, score in level.rows[0] if score > -torch.inf] for level in levels]
