"""Draft heads as a source: levels of a tree from the verification's hidden state."""

import math
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch

from decoder.acceptance import Ending, Question
from decoder.draft_heads import DraftHeads
from decoder.drafters.tuned import Offer
from decoder.odds import Calibration, Odds
from decoder.sampler import Ahead, Sampler
from decoder.target import Target, Verification
from decoder.transfers import download

Path = tuple[int, ...]

_WIDTH = 6  # candidates per node of a level of heads
_BEAM = 4  # nodes of a level that the next one goes on from
_DEEPEST = 8  # levels of conditioned heads
_RETRY = 64  # steps after which a level that did not pay is tried again
_FAR = 4.0  # in score: what trails the best candidate by more is hardly ever right
_LEARN = 0.05  # how fast the usual chance to come to a level follows
_WORST = 1.5  # a level that took longer than so many times the usual was disturbed


class _Branches(NamedTuple):
    """What a level of heads goes on from, one row per branch, as the device knows it.

    Attributes:
        states: of the head before, or the verification's own, [n, d].
        drafted: the tokens of each branch, int64 [n, depth].
        scores: how likely each is, as a logarithm, [n, 1].
    """

    states: torch.Tensor
    drafted: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def at_root(cls, hidden: torch.Tensor) -> "_Branches":
        """The one branch without any token yet, from ``hidden`` [1, d]."""
        nothing = torch.empty(1, 0, dtype=torch.long, device=hidden.device)
        return cls(hidden, nothing, torch.zeros(1, 1, device=hidden.device))


class _Level(NamedTuple):
    """A level of heads that was run on n branches.

    Attributes:
        states: of its head, [n, d].
        drafted: the tokens before it, int64 [n, depth].
        tokens: the best ones behind each branch, int64 [n, width].
        likely: how likely the branches are that the next level goes on from, as logarithms, [m].
        onward: their places among the n * width ``tokens``, int64 [m].
    """

    states: torch.Tensor
    drafted: torch.Tensor
    tokens: torch.Tensor
    likely: torch.Tensor
    onward: torch.Tensor

    def branches(self) -> _Branches:
        """Those of the next level."""
        rows = self.onward // self.tokens.shape[1]
        newest = self.tokens.flatten().index_select(0, self.onward)[:, None]
        drafted = torch.cat((self.drafted.index_select(0, rows), newest), dim=1)
        return _Branches(self.states.index_select(0, rows), drafted, self.likely[:, None])


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
    """

    name = "heads"

    def __init__(self, target: Target, heads: DraftHeads, coupled: bool, odds: Odds):
        self.target, self.heads, self.coupled, self.odds = target, heads, coupled, odds
        self.hidden: torch.Tensor | None = None
        self.deepest = self._most = _DEEPEST if heads.conditioned else heads.num_heads
        self.looking_seconds = 0.0
        self._width = min(_WIDTH, target.vocab_size)
        self._gains = [Calibration() for _ in range(self.deepest)]
        self._seconds = 0.0  # of one level, lately
        self._looked = 0  # times
        self._idle = [0] * self.deepest  # steps since each level was last run
        self._usual = [1.0] * (self.deepest + 1)  # the chance to come to each level, lately
        self._met = [0] * (self.deepest + 1)  # steps in which that chance was known
        self._levels: list[dict[Path | None, list[Offer]]] = []  # by what they follow; None where that is all the same
        self._reach: list[float] = []  # the chance to come to each level of this step, as it was thought to be
        self._beam: list[tuple[float, Path] | None] = []  # chances and paths of the branches; None where there is none
        self._last: _Level | None = None  # that was run
        self._answer: tuple[int, list[float]] = 0, []  # what levels that were looked ahead for told, at which length
        self._sampler: Sampler | None = None
        self._explored = False
        self._price = 0.0  # of one level, in tokens

    def root(self, sampler: Sampler, rate: float, node_seconds: float, levels: int) -> object | None:
        self._most = min(levels, self.deepest)
        self._sampler = sampler
        self._levels, self._reach, self._beam, self._explored = [], [], [(1.0, ())], False
        self._price = rate * (self._seconds + _BEAM * node_seconds)
        self._idle = [steps + 1 for steps in self._idle]
        length, told = self._answer
        if told and length == len(sampler.context):
            numbers = iter(told)
            while (level := self._told_of_level(numbers))[0]:
                self._take(*level)
            self._most = len(self._levels)
        return None if self.hidden is None or not self._most else ()

    def offers(self, place: object) -> list[Offer]:
        depth = len(place)
        if depth == len(self._levels):
            if depth >= self._most or not self._pays(depth, self._chance_of_beam()):
                return []
            ahead = self._sampler.ahead()
            if self.coupled and not self._sampler.params.greedy:
                ahead.noise(depth + 1)  # made for many positions at a time
            start = time.perf_counter()
            branches = self._last.branches() if depth else _Branches.at_root(self.hidden)
            self._last, numbers = self._level(depth, branches, self._sampler, ahead)
            self._take(*self._told_of_level(iter(download(numbers))))
            self._took(time.perf_counter() - start)
        if depth > len(self._levels):
            return []
        return self._levels[depth].get(place if self.heads.conditioned else None, [])

    def look_ahead(self, verification: Verification, sampler: Sampler, ending: Ending, levels: int) -> Question | None:
        most = min(levels, self.deepest)
        count = next((depth for depth in range(most) if not self._pays(depth, self._usual[depth])), most)
        self.looking_seconds = count * self._seconds
        if not count:
            return None
        # The host does not see how long the device takes, unless it waits; so it does now and then. The first time much
        # is prepared that later ones find.
        self._looked += 1
        timed = self._looked % _RETRY in (2, 3)
        level, told = None, []
        for depth in range(count):
            start = self._clock() if timed else 0.0
            if level is None:
                branches = _Branches.at_root(verification.hidden.index_select(0, ending.node))
            else:
                branches = level.branches()
            level, numbers = self._level(depth, branches, sampler, ending.ahead)
            told.append(numbers)
            if timed:
                self._took(self._clock() - start)
        return Question(torch.cat(told), lambda numbers: self._answered(len(sampler.context), numbers))

    def _clock(self) -> float:
        self.target.wait()
        return time.perf_counter()

    def _answered(self, length: int, numbers: list[float]) -> None:
        self._answer = length, numbers

    def _pays(self, depth: int, chance: float) -> bool:
        """Whether a level is worth its price where the text comes to it with that chance."""
        if self._gains[depth].corrected(chance) > self._price:
            return True
        # Now and then one level more, to see whether it still does not pay.
        explore, self._explored = not self._explored and self._idle[depth] >= _RETRY, True
        return explore

    def _took(self, seconds: float) -> None:
        """A level's time; one that was disturbed, or the first one with all its preparations, counts little."""
        if self._seconds:
            self._seconds = min(self._seconds, _WORST * seconds)
            seconds = min(seconds, _WORST * self._seconds)
        self._seconds += (seconds - self._seconds) * (0.1 if self._seconds else 1.0)

    def _chance_of_beam(self) -> float:
        return sum(branch[0] for branch in self._beam if branch is not None)

    def _level(self, depth: int, branches: _Branches, sampler: Sampler, ahead: Ahead) -> tuple[_Level, torch.Tensor]:
        """Run a level of heads on n branches, and give a vector for `_told_of_level`."""
        head = min(depth, self.heads.num_heads - 1)
        embeddings = None
        if self.heads.conditioned:
            embeddings = self.target.embed(branches.drafted[:, -1] if depth else ahead.newest())
        states, normalised = self.heads.advance(head, branches.states, embeddings)
        if self.heads.kind == "independent":
            states = branches.states
        scores = sampler.branch_scores(self.target.head(normalised), self.coupled, ahead, branches.drafted)
        best = scores.topk(self._width)
        # Among scores with noise in them, too, one far above the others is mostly right.
        likely = (branches.scores + best.values.log_softmax(-1)).flatten()
        onward = likely.topk(min(_BEAM if self.heads.conditioned else 1, len(likely)))
        # Single precision is exact for ids below 16 million.
        told = torch.cat((best.values.flatten(), best.indices.flatten(), onward.indices))
        return _Level(states, branches.drafted, best.indices, onward.values, onward.indices), told

    def _told_of_level(self, numbers: Iterator[float]) -> tuple[list[float], list[float], list[float]]:
        """The next level's scores, their tokens, and the places among them that the level behind it goes on from.

        One after the other, of n branches n * width, n * width, and as many as that level has branches.
        """
        count = len(self._beam) * self._width
        onward = min(_BEAM if self.heads.conditioned else 1, count)
        return tuple(list(islice(numbers, part)) for part in (count, count, onward))

    def _take(self, values: list[float], tokens: list[float], onward: list[float]) -> None:
        """The best candidates behind each branch are another level, and what it goes on from is the next beam."""
        depth, width = len(self._levels), self._width
        chance = self._chance_of_beam()
        self._reach.append(chance)
        self._idle[depth] = 0
        found: list[list[Offer]] = []
        level: dict[Path | None, list[Offer]] = {}
        for row, branch in enumerate(self._beam):
            found.append([])
            if branch is not None:
                row = slice(row * width, (row + 1) * width)
                found[-1] = self._ranked(depth, values[row], map(int, tokens[row]), branch[1])
                level[branch[1] if self.heads.conditioned else None] = found[-1]
        beam: list[tuple[float, Path] | None] = []
        for place in onward:
            row, rank = divmod(int(place), width)
            branch = None
            if rank < len(found[row]):
                offer = found[row][rank]
                branch = self._beam[row][0] * self.odds.chance(offer.kind, offer.guess), offer.place
            beam.append(branch)
        self._beam = beam
        self._levels.append(level)
        # The chance to come to a level is known whether it is run or not.
        self._met[depth + 1] += 1
        learn = max(_LEARN, 1 / self._met[depth + 1])
        self._usual[depth + 1] += learn * (self._chance_of_beam() - self._usual[depth + 1])

    def _ranked(self, depth: int, values: list[float], tokens: Iterable[int], path: Path) -> list[Offer]:
        """The tokens of one row of scores, each with the margin by which it leads or trails the best other one."""
        found = []
        for rank, (value, token) in enumerate(zip(values, tokens, strict=True)):
            # Behind a filter that leaves one token there is no rival.
            lead = value - values[rank == 0] if len(values) > 1 else math.inf
            if not value > -math.inf or lead < -_FAR:
                break
            margin = int(2 * min(_FAR, lead)) if lead == lead else 0
            guess = 0.6 if rank == 0 else 0.1
            if depth:
                guess = self.odds.chance((self.name, depth - 1, rank == 0, margin), guess)
            found.append(Offer(token, (self.name, depth, rank == 0, margin), guess, (*path, token)))
        return found

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        # The next verification may write over its own.
        self.hidden = verification.hidden[path[-1] : path[-1] + 1].clone()
        for depth, hoped in enumerate(self._reach):
            self._gains[depth].observe(hoped, depth + 1 < len(path))
        self._reach = []
