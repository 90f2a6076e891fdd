"""How many levels of draft heads to run: a bandit whose arms are the numbers of levels, none among them."""

from collections.abc import Sequence
from typing import NamedTuple

_FIRST = 4  # steps for which a number of levels is run when it is tried first
_TRIAL = 48  # steps in which each number next to the best one is run once, to see whether it has become the best
_CHOOSE = 8  # steps after which the numbers are compared again; to do so takes as long as all else here together
_LEARN = 0.02  # weight of the newest observation in an average
_DISTURBED = 3.0  # a step that took more than so many times the expected counts as that


class Expected(NamedTuple):
    """What the best tree of a step is expected to bring and to cost: tokens, and the seconds of verifying it."""

    tokens: float
    cost: float


class Average:
    """Of all observations at first, then of the newest ones."""

    def __init__(self) -> None:
        self.value, self.seen = 0.0, 0

    def forget(self) -> None:
        """The next observation is the first one."""
        self.seen = 0

    def observe(self, value: float) -> None:
        self.seen += 1
        self.value += max(_LEARN, 1 / self.seen) * (value - self.value)


class LevelPolicy:
    """Chooses the number of levels that gives most tokens per second, of none to ``most``.

    A step with some levels also tells what fewer would have brought: the best tree without the candidates of the
    others. So numbers are compared by what each level adds to the tokens and to the cost of verification. The time
    spent on drafts is averaged for each number. The rest of a step's time, of which the machine disturbs most, depends
    little on it and is averaged over all steps. The best number's neighbours, and none, are run for single steps now
    and then: in many steps in a row a number would be judged by how busy a shared machine was then.

    ``levels`` is how many are to be run now, and ``best`` the number that gives most by all that was seen.
    """

    def __init__(self, most: int, first: int = 1, sequences: int = 1, at_once: bool = False):
        """For steps that about so many ``sequences`` take together, each telling of them; ``first`` levels at first.

        Levels that come ``at_once`` cost about the same in any number: one that was not tried yet costs at most what
        the next greater one does; half as many as the best number and twice as many are tried, and beside none all.
        """
        self.levels = self.best = min(first, most)
        self._tokens, self._cost, self._drafting = ([Average() for _ in range(most + 1)] for _ in range(3))
        self._rest = Average()  # of all steps
        self._sequences, self._told, self._at_once = sequences, 0, at_once

    @property
    def steps(self) -> int:
        """How many were observed."""
        return self._told // self._sequences

    def tokens(self, first: int, levels: int) -> float:
        """What the levels from ``first`` to ``levels`` add to a step; level 0 stands for a step without any."""
        return sum(level.value for level in self._tokens[first : levels + 1])

    def overhead(self, levels: int) -> float:
        """Seconds of a step with so many levels beyond its verification; no time for drafts where not tried yet."""
        if self._at_once and levels:
            levels = next((more for more in range(levels, len(self._drafting)) if self._drafting[more].seen), levels)
        return self._drafting[levels].value + self._rest.value

    def whole(self, cost: float, levels: int) -> float:
        """Seconds of a step with so many levels whose verification costs ``cost``.

        What steps took beyond that may be less than nothing, where verifications are cheaper than they were measured to
        be, or where steps of several sequences became those of one. No step is taken to be ten times as fast.
        """
        return max(cost + self.overhead(levels), 0.1 * cost)

    def seconds(self, levels: int) -> float:
        """Of usual steps with so many levels."""
        return self.whole(sum(level.value for level in self._cost[: levels + 1]), levels)

    def rate(self, levels: int) -> float:
        """Tokens per second of usual steps with so many levels; 0 before any step was seen."""
        return self.tokens(0, levels) / seconds if (seconds := self.seconds(levels)) else 0.0

    def observe(self, expected: Sequence[Expected], cost: float, drafting: float, rest: float = 0.0) -> None:
        """A step whose verification costs ``cost`` took ``drafting`` seconds for drafts and ``rest`` for all else.

        ``expected`` is what it would have been with no levels, with one, and so on up to those that it ran.
        """
        before = Expected(0.0, 0.0)
        for level, now in enumerate(expected):
            self._tokens[level].observe(now.tokens - before.tokens)
            self._cost[level].observe(now.cost - before.cost)
            before = now
        most = _DISTURBED * (cost + max(0.0, self.overhead(level))) - cost
        credible = min(1.0, most / max(most, drafting + rest))
        self._drafting[level].observe(credible * drafting)
        self._rest.observe(credible * rest)
        self._told += 1
        # Where heads draft ahead, the step that follows a choice still runs the number before.
        if level == self.levels and self._drafting[level].seen >= _FIRST:
            self._choose()

    def _choose(self) -> None:
        if self._told % (_CHOOSE * self._sequences):
            self.levels = self.best  # a trial is over
            return
        seen = [number for number, tokens in enumerate(self._tokens) if tokens.seen]
        self.levels = self.best = best = max(seen, key=self.rate)
        most = len(self._tokens) - 1
        near = {best + 1, best - 1, 0}
        if self._at_once:
            near = {best // 2, min(2 * best + 1, most), 0} if best else {most}
        others = [number for number in near - {best} if 0 <= number <= most]
        if (trial := self.steps % _TRIAL // _CHOOSE) < len(others):
            self.levels = others[trial]
