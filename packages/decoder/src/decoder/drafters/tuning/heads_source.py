"""Draft heads as a source: levels of a tree from the verification's hidden state."""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

import torch

from decoder.draft_heads import DraftHeads
from decoder.drafters.base import DeferredRead
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.drafters.tuning.level_worth import LevelWorth
from decoder.drafters.tuning.odds import Odds
from decoder.drafters.tuning.tuned import Offer
from decoder.kernels.transfers import download
from decoder.model.target import Target, Verification
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler, TreeDraws

Path = tuple[int, ...]

_WIDTH = 6  # candidates per node of a level of heads
_BEAM = 4  # nodes of a level that the next one goes on from
_DEEPEST = 8  # levels of conditioned heads
_GUESSES = (0.6, 0.15, 0.1, 0.05)  # chances of the best candidate, the next ones and all others, at first
_TIMED = 64  # looks ahead between two that are timed
_FAR = 4.0  # in score: what trails the best candidate by more is hardly ever right


class _Branches(NamedTuple):
    """What a level of heads goes on from, one row per branch, as the device knows it.

    Attributes:
        places: where they stand among the candidates of the level before, row by row, int64 [n]; at the root none, [0].
        states: of the head before, or the verification's own, [n, d].
        drafted: the tokens of each branch, int64 [n, depth].
        scores: how likely each is, as a logarithm, [n, 1] or one for all.
    """

    places: torch.Tensor
    states: torch.Tensor
    drafted: torch.Tensor
    scores: torch.Tensor | float


class _Level(NamedTuple):
    """A level of heads that was run on n branches.

    Attributes:
        branches: those.
        states: of its head, [n, d].
        values, tokens: the best scores behind each branch and whose they are, [n, width] and int64 [n, width].
    """

    branches: _Branches
    states: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor

    @property
    def told(self) -> torch.Tensor:
        """What the host takes in, a vector: the candidates' scores, their tokens, and the places of the branches."""
        # Single precision is exact for ids below 16 million.
        return torch.cat((self.values.flatten(), self.tokens.flatten(), self.branches.places))

    def likeliest(self, count: int) -> _Branches:
        """``count`` branches, or all there are, for the next level to go on from."""
        # Among scores with noise in them, too, one far above the others is mostly right.
        likely = (self.branches.scores + self.values.log_softmax(-1)).flatten()
        best = likely.topk(min(count, len(likely)))
        rows = best.indices // self.tokens.shape[1]
        newest = self.tokens.flatten().index_select(0, best.indices)[:, None]
        drafted = torch.cat((self.branches.drafted.index_select(0, rows), newest), dim=1)
        return _Branches(best.indices, self.states.index_select(0, rows), drafted, best.values[:, None])


class HeadsSource:
    """Fused drafting: heads run on the hidden state of the last accepted node, which the verification has computed.

    That state belongs to the position before the root, so head 1 offers what may follow the root. A level costs a
    pass of one head and of the language-model head, so each is run only where its expected gain pays; conditioned
    heads are run for the most promising nodes of the level before at once, each on its own token's embedding. The
    last head goes on drafting deeper than it was trained for.

    Levels are run one by one as they are asked for, or all at once when the source looks ahead.

    Args:
        target: its embeddings and language-model head serve the heads.
        coupled: rank by log q plus the position's noise.
        odds: what the chances of offers are learnt in.
        learnt: where it finds what earlier texts have taught (`DrafterContext.learnt`).
    """

    name = "heads"

    def __init__(self, target: Target, heads: DraftHeads, coupled: bool, odds: Odds, learnt: dict[Hashable, object]):
        self.target, self.heads, self.coupled, self.odds = target, heads, coupled, odds
        self.hidden: torch.Tensor | None = None
        self.deepest = self._most = self._limit = _DEEPEST if heads.conditioned else heads.num_heads
        self.worth: LevelWorth = learnt.setdefault(("levels", self.deepest), LevelWorth(self.deepest))
        self.looking_seconds = 0.0
        self.vocabulary = DraftVocabulary.of(target, heads)
        self._width = min(_WIDTH, self.vocabulary.size)
        self._looked = 0  # times
        self._beam = _BEAM if heads.conditioned else 1
        nothing = torch.empty(0, dtype=torch.long, device=target.device)
        self._root = nothing, nothing[None]
        self._levels: list[dict[Path | None, list[Offer]]] = []  # by what they follow; None where that is all the same
        self._reach: list[float] = []  # the chance to come to each level of this step, as it was thought to be
        # Of the last level its branches, chance and path, None where there is none, and what it offers behind them.
        self._branches: list[tuple[float, Path] | None] = []
        self._found: list[list[Offer]] = []
        self._onward: float | None = 1.0  # the chance to come to the next level; None where there is none
        self._last: _Level | None = None  # that was run
        self._answer: list[float] = []  # what levels that were drafted ahead gave
        self._sampler: Sampler | None = None
        self._rate: Callable[[], float] = lambda: 0.0
        self._rate_without = 0.0  # what that was before any level was run
        self._node_seconds = 0.0

    def root(self, sampler: Sampler, rate: Callable[[], float], node_seconds: float, levels: int) -> object | None:
        self._most = self._limit = min(levels, self.deepest)
        self._sampler = sampler
        self._levels, self._reach, self._onward = [], [], 1.0
        self._rate, self._rate_without, self._node_seconds = rate, rate(), node_seconds
        self.worth.begin_step()
        told, self._answer = self._answer, []
        if told:
            numbers = iter(told)
            while (level := self._told_of_level(numbers))[0]:
                self._take(*level)
            self._most = len(self._levels)
        return None if self.hidden is None or not self._most else ()

    def offers(self, place: object) -> list[Offer]:
        depth = len(place)
        if depth == len(self._levels):
            if depth >= self._most or not self.worth.pays(depth, self._price(depth, self._rate()), self._onward):
                return []
            ahead = self._sampler.draft_context()
            if self.coupled and not self._sampler.params.greedy:
                ahead.noise(depth + 1)  # made for many positions at a time
            start = time.perf_counter()
            branches = self._last.likeliest(self._beam) if depth else self._at_root(self.hidden)
            self._last = self._level(depth, branches, self._sampler, ahead)
            self._take(*self._told_of_level(iter(download(self._last.told))))
            self.worth.took(depth, time.perf_counter() - start)
        if depth > len(self._levels):
            return []
        return self._levels[depth].get(place if self.heads.conditioned else None, [])

    def draft_ahead(self, verification: Verification, draws: TreeDraws, levels: int) -> DeferredRead | None:
        most = min(levels, self.deepest)
        # The next step is thought to be like this one.
        prices = (self._price(depth, self._rate_without) for depth in range(most))
        count = next((depth for depth, price in enumerate(prices) if not self.worth.pays(depth, price)), most)
        self.looking_seconds = sum(map(self.worth.seconds, range(count)))
        if not count:
            return None
        # The host does not see how long the device takes, unless it waits; so it does now and then. The first time much
        # is prepared that later ones find.
        self._looked += 1
        timed = self._looked % _TIMED in (2, 3)
        level, told = None, []
        for depth in range(count):
            start = self._clock() if timed else 0.0
            if level is None:
                branches = self._at_root(verification.hidden.index_select(0, draws.last_node))
            else:
                branches = level.likeliest(self._beam)
            level = self._level(depth, branches, draws.sampler, draws.draft_context)
            told.append(level.told)
            if timed:
                self.worth.took(depth, self._clock() - start)
        return DeferredRead(torch.cat(told), self._receive)

    def _price(self, depth: int, rate: float) -> float:
        """Of a level, in tokens: what would come in its time, and in that of the nodes it adds."""
        return rate * (self.worth.seconds(depth) + self._beam * self._node_seconds)

    def _clock(self) -> float:
        self.target.wait()
        return time.perf_counter()

    def _receive(self, numbers: list[float]) -> None:
        self._answer = numbers

    def _at_root(self, hidden: torch.Tensor) -> _Branches:
        """The one branch without any token yet, from ``hidden`` [1, d]."""
        places, drafted = self._root
        return _Branches(places, hidden, drafted, 0.0)

    def _level(self, depth: int, branches: _Branches, sampler: Sampler, ahead: DraftContext) -> _Level:
        """Run a level of heads on n branches."""
        head = min(depth, self.heads.num_heads - 1)
        embeddings = None
        if self.heads.conditioned:
            embeddings = self.target.embed(branches.drafted[:, -1] if depth else ahead.newest())
        states, normalised = self.heads.advance(head, branches.states, embeddings)
        if self.heads.kind == "independent":
            states = branches.states
        scores = self.vocabulary.branch_scores(normalised, sampler, self.coupled, ahead, branches.drafted)
        values, places = scores.topk(self._width)
        return _Level(branches, states, values, self.vocabulary.token_ids(places))

    def _told_of_level(self, numbers: Iterator[float]) -> tuple[list[float], list[float], list[float]]:
        """What `_Level.told` is of the next level, from the numbers of all levels one after the other."""
        rows, places = 1, 0
        if self._levels:
            rows = places = min(self._beam, len(self._branches) * self._width)
        return tuple(list(islice(numbers, count)) for count in (rows * self._width, rows * self._width, places))

    def _take(self, values: list[float], tokens: list[float], places: list[float]) -> None:
        """The best candidates behind each branch, one row after the other, are another level."""
        depth, width = len(self._levels), self._width
        self._branches = [self._branch(int(place)) for place in places] if depth else [(1.0, ())]
        self._reach.append(sum(branch[0] for branch in self._branches if branch is not None))
        self._found = []
        level: dict[Path | None, list[Offer]] = {}
        for row, branch in enumerate(self._branches):
            self._found.append([])
            if branch is not None:
                row = slice(row * width, (row + 1) * width)
                self._found[-1] = self._ranked(depth, values[row], map(int, tokens[row]), branch[1])
                level[branch[1] if self.heads.conditioned else None] = self._found[-1]
        self._levels.append(level)
        # The chance to come to a level is known whether it is run or not, if one may be.
        self._onward = self._chance_onward() if depth + 1 < self._limit else None
        self.worth.ran(depth, self._onward)

    def _branch(self, place: int) -> tuple[float, Path] | None:
        """Chance and path of the candidate at that place of the last level."""
        row, rank = divmod(place, self._width)
        if rank >= len(self._found[row]):
            return None
        offer = self._found[row][rank]
        return self._joint(row, offer), offer.place

    def _joint(self, row: int, offer: Offer) -> float:
        """How likely the text goes through a branch and then what is offered behind it."""
        return self._branches[row][0] * self.odds.chance(offer.kind, offer.guess)

    def _chance_onward(self) -> float:
        """How likely the text goes through one of the candidates that another level would go on from."""
        chances = (self._joint(row, offer) for row, offers in enumerate(self._found) for offer in offers)
        return sum(nlargest(self._beam, chances))

    def _ranked(self, depth: int, values: list[float], tokens: Iterable[int], path: Path) -> list[Offer]:
        """The tokens of one row of scores, each with the margin by which it leads or trails the best other one."""
        found = []
        for rank, (value, token) in enumerate(zip(values, tokens, strict=True)):
            # Behind a filter that leaves one token there is no rival.
            lead = value - values[rank == 0] if len(values) > 1 else math.inf
            if not value > -math.inf or lead < -_FAR:
                break
            margin = int(2 * min(_FAR, lead)) if lead == lead else 0
            standing = min(rank, len(_GUESSES) - 1)
            guess = _GUESSES[standing]
            if depth:
                guess = self.odds.chance((self.name, depth - 1, standing, margin), guess)
            found.append(Offer(token, (self.name, depth, standing, margin), guess, (*path, token)))
        return found

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        # The next verification may write over its own.
        self.hidden = verification.hidden[path[-1] : path[-1] + 1].clone()
        for depth, hoped in enumerate(self._reach):
            self.worth.observe(depth, hoped, depth + 1 < len(path))
        self._reach = []
