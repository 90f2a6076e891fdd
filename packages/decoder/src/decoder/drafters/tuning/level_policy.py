"""How many levels of draft heads to run: a bandit whose arms are the numbers of levels, none among them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_FIRST = 4  # observations until which a number of levels is run when it is tried first
_TRIAL = 48  # steps after which a number of levels is run for one step, to see whether it has become the best
_CHOOSE = 8  # steps after which the numbers are compared again; to do so takes as long as all else here together
_LEARN = 0.02  # weight of the newest observation in an average
_DISTURBED = 3.0  # a step that took more than so many times the expected counts as that


class Expected(NamedTuple):
    """What the best tree of a step is expected to bring and to cost: tokens, and the seconds of verifying it."""

    tokens: float
    cost: float


class LevelPolicy:
    """Chooses the number of levels that gives most tokens per second.

    Every so often a single step tries one of the numbers next to the best one, or none; a number that is new is tried
    for a few steps, so that something is known of how often its drafts are accepted. Trials are single steps (two where
    heads draft ahead), since a machine that others share is slower or faster for many steps in a row: a number that ran
    for as long would be judged by how busy the machine was then.

    A step with some levels also tells what fewer would have brought: the best tree without the candidates of the
    others. So what is kept is what each level adds to the tokens and to the cost of verification, on average of the
    steps that ran it, and for each number of levels the time spent on drafts. The rest of a step's time, of which the
    machine disturbs most, hardly depends on the number: it is averaged over all steps with levels, and over those
    without any. There are ``most`` levels; ``levels`` of them are to be run now, ``first`` in the beginning. ``best``
    is the number that gives most by all that was seen.
    """

    def __init__(self, most: int, first: int = 1):
        self.levels = self.best = min(first, most)
        self._added = [Expected(1.0, 0.0)] + [Expected(0.0, 0.0)] * most  # by each level; entry 0: without levels
        self._seen = [0] * (most + 1)  # steps that are averaged in each of these
        self._drafting = [0.0] * (most + 1)  # seconds, by numbers of levels
        self._steps = [0] * (most + 1)  # that ran this number
        self._rest = [0.0, 0.0]  # seconds beyond verification and drafts, of steps without levels and with some
        self._last = [-math.inf] * (most + 1)  # when this number was run last
        self._now = 0  # steps so far
        self._told: set[int] = set()  # the texts that have told of this step

    def overhead(self, levels: int) -> float:
        """Seconds of a step with so many levels beyond its verification; where not tried yet, as with the nearest.

        Plain steps are thought to take no more than their verification until they are tried. So they are tried as soon
        as they could pay.
        """
        if levels and not self._steps[levels]:
            tried = [number for number, steps in enumerate(self._steps) if steps or not number]
            levels = min(tried, key=lambda number: abs(number - levels))
        return self._drafting[levels] + self._rest[levels > 0]

    def tokens(self, first: int, levels: int) -> float:
        """What the levels from ``first`` to ``levels`` add to a step; level 0 stands for a step without any."""
        return sum(level.tokens for level in self._added[first : levels + 1])

    def rate(self, levels: int) -> float:
        """Tokens per second of usual steps with so many levels; 0 before any step was seen."""
        return self.tokens(0, levels) / seconds if (seconds := self.seconds(levels)) else 0.0

    def seconds(self, levels: int) -> float:
        """Of usual steps with so many levels."""
        return step_seconds(sum(level.cost for level in self._added[: levels + 1]), self.overhead(levels))

    def observe(
        self, expected: Sequence[Expected], cost: float, drafting: float, rest: float = 0.0, text: int = 0
    ) -> None:
        """A step whose verification costs ``cost`` took ``drafting`` and ``rest`` seconds beyond it.

        Args:
            expected: what the step would have been with no levels, with one, and so on up to those that it ran.
            drafting: seconds spent on drafts.
            rest: all others; 0 where they are those of other texts, too.
            text: a number of the text that tells, where several take steps together. A step is over when one of them
                tells again.
        """
        levels = len(expected) - 1
        before = Expected(0.0, 0.0)
        for level, now in enumerate(expected):
            self._seen[level] += 1
            weight, mean = max(_LEARN, 1 / self._seen[level]), self._added[level]
            self._added[level] = Expected(
                mean.tokens + weight * (now.tokens - before.tokens - mean.tokens),
                mean.cost + weight * (now.cost - before.cost - mean.cost),
            )
            before = now
        most = _DISTURBED * (cost + max(0.0, self.overhead(levels))) - cost
        credible = most / (drafting + rest) if drafting + rest > most else 1.0
        self._take_time(levels, credible * drafting, credible * rest)
        if text in self._told:
            self._now += 1
            self._told.clear()
        self._told.add(text)
        self._last[levels] = self._now
        self._choose()

    def _take_time(self, levels: int, drafting: float, rest: float) -> None:
        self._steps[levels] += 1
        some, seen = levels > 0, (self._steps[0], sum(self._steps[1:]))
        self._drafting[levels] += max(_LEARN, 1 / self._steps[levels]) * (drafting - self._drafting[levels])
        weight = max(_LEARN, 1 / seen[some])
        change = weight * (rest - self._rest[some])
        # Once the average has settled, a change is the machine's or the text's: other steps become as much slower.
        if weight == _LEARN and seen[not some]:
            self._rest[not some] += change / self.seconds(levels) * self.seconds(0 if some else max(1, self.best))
        self._rest[some] += change

    def _choose(self) -> None:
        if self._steps[self.levels] < _FIRST:
            return
        if self._steps[self.levels] > _FIRST and self._now % _CHOOSE:
            # Where heads draft ahead, the step that follows a choice still runs the number before.
            if self._last[self.levels] == self._now:
                self.levels = self.best  # a trial is over
            return
        self.best = best = max(
            (number for number, steps in enumerate(self._seen) if steps or not number), key=self.rate
        )
        others = [number for number in {best + 1, best - 1, 0} - {best} if 0 <= number < len(self._steps)]
        stale = min(others, key=self._last.__getitem__, default=best)
        self.levels = stale if self._now - self._last[stale] >= _TRIAL else best


def step_seconds(cost: float, overhead: float) -> float:
    """The seconds of a step whose verification costs ``cost``: more than nothing, however wrong the cost turned out."""
    return max(cost + overhead, 0.1 * cost)
