"""How many levels of draft heads to run: a bandit whose arms are the numbers of levels, none among them."""

import math
from collections.abc import Sequence

_PERIOD = 32  # steps between two choices
_TRIAL = 12  # steps for which another number of levels is tried
_STALE = 512  # steps after which a number next to the best one is tried again
_COLD = 2  # steps at the beginning of a period that do not count: their caches are as other steps have left them
_LEARN = 0.02  # weight of the newest observation in an average
_DISTURBED = 3.0  # a step that took more than so many times the expected counts as that


class LevelPolicy:
    """Chooses the number of levels that gives most tokens per second, and tries its neighbours now and then.

    Expected tokens are those that come without heads and, for each level, how often a token that heads alone had
    drafted there was accepted. Expected seconds are the verification's and an average of what a step takes beyond it.
    There are ``most`` levels; ``levels`` of them are to be run now.
    """

    def __init__(self, most: int):
        self.levels = min(1, most)
        self._others = 1.0
        self._gains = [0.0] * most
        self._nodes = [1.0] * (most + 1)
        self._overhead = [0.0] * (most + 1)
        self._steps = [0] * (most + 1)  # that were counted
        self._last = [-math.inf] * (most + 1)  # when each number was tried last
        # Steps so far, those of this period still to come, and those of them that do not count.
        self._now, self._left, self._cold = 0, _TRIAL, _COLD

    def gain(self, levels: int) -> float:
        """Tokens per step that so many levels add."""
        return sum(self._gains[:levels])

    def overhead(self, levels: int) -> float:
        """Seconds of a step with so many levels beyond its verification; where not tried yet, as with the nearest."""
        tried = [number for number, steps in enumerate(self._steps) if steps]
        return self._overhead[min(tried, key=lambda number: abs(number - levels), default=0)]

    def seconds(self, levels: int, costs: Sequence[float]) -> float:
        """The seconds of a usual step with so many levels, where verifying n nodes takes ``costs[n]``."""
        return step_seconds(costs[round(self._nodes[levels])], self.overhead(levels))

    def observe(
        self, levels: int, gained: Sequence[bool], others: int, nodes: int, overhead: float, costs: Sequence[float]
    ) -> None:
        """A step with ``levels`` levels and so many ``nodes`` took ``overhead`` seconds beyond verifying them.

        ``gained`` says for each level whether a token that heads alone had drafted was accepted there; ``others`` are
        all other tokens of the step. A number of levels that is not to be run now says nothing: another text that is
        decoded at the same time has made the next choice, or there was no state for heads to begin with.
        """
        if levels != self.levels:
            return
        self._last[levels] = self._now
        if self._cold <= 0:
            expected = costs[nodes] + max(0.0, self.overhead(levels))
            self._average(levels, gained, others, nodes, min(overhead, _DISTURBED * expected - costs[nodes]))
        self._now, self._left, self._cold = self._now + 1, self._left - 1, self._cold - 1
        if not self._left:
            self._choose(costs)

    def _average(self, levels: int, gained: Sequence[bool], others: int, nodes: int, overhead: float) -> None:
        self._steps[levels] += 1
        self._others += self._weight(0) * (others - self._others)
        for level, right in enumerate(gained):
            self._gains[level] += self._weight(level + 1) * (right - self._gains[level])
        weight = max(_LEARN, 1 / self._steps[levels])
        self._nodes[levels] += weight * (nodes - self._nodes[levels])
        change = weight * (overhead - self._overhead[levels])
        # Once the average has settled, a change is the machine's or the text's, and holds for other numbers, too.
        for number in range(len(self._steps)) if weight == _LEARN else (levels,):
            self._overhead[number] += change

    def _weight(self, level: int) -> float:
        """The weight of a new observation among those of all steps that ran at least ``level`` levels."""
        return max(_LEARN, 1 / sum(self._steps[level:]))

    def _choose(self, costs: Sequence[float]) -> None:
        tried = [number for number, steps in enumerate(self._steps) if steps]
        best = max(tried, key=lambda number: (self._others + self.gain(number)) / self.seconds(number, costs))
        beside = [number for number in (best + 1, best - 1) if 0 <= number < len(self._steps)]
        stale = min(beside, key=self._last.__getitem__, default=best)
        trial = self._now - self._last[stale] > _STALE
        self.levels, self._left, self._cold = (stale, _TRIAL, _COLD) if trial else (best, _PERIOD, _COLD)


def step_seconds(cost: float, overhead: float) -> float:
    """The seconds of a step whose verification costs ``cost``: more than nothing, however wrong the cost turned out."""
    return max(cost + overhead, 0.1 * cost)
