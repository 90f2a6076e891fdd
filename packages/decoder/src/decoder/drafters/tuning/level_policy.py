"""How many levels of draft heads to run: a bandit whose arms are the numbers of levels, none among them."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_FIRST = 4  # steps for which a number of levels is run when it is tried first
_TRIAL = 48  # steps in which each number next to the best one is run once, to see whether it has become the best
_CHOOSE = 8  # steps after which the numbers are compared again; to do so takes as long as all else here together
_LEARN = 0.02  # weight of the newest observation in an average
_LEARN_GAP = 0.15  # and of the newest comparison of a step without levels with those before it
# Steps from a comparison of a rest to the next trial of one, where looking for drafts brings up to so many times what a
# rest brings in its time. The last one takes some comparisons: one alone may have been disturbed.
_REST_TRIALS = ((1.1, 48), (1.3, 384), (float("inf"), 1536))
_SURE = 3
# Where looking brings less than the first, rests begin to pay, and from the second on they no longer do. One bound
# would be crossed by chance, to and fro.
_BEGINS, _ENDS = 1.0, 1.06
_LEARN_REST = 0.25  # weight of the newest comparison in their average; each is of some steps
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

    def observe(self, value: float, learn: float = _LEARN) -> None:
        self.seen += 1
        self.value += max(learn, 1 / self.seen) * (value - self.value)


class LevelPolicy:
    """Chooses the number of levels that gives most tokens per second, of none to ``most``.

    A step with some levels also tells what fewer would have brought: the best tree without the candidates of the
    others. So numbers are compared by what each level adds to the tokens and to the cost of verification. The time
    spent on drafts is averaged for each number. The rest of a step's time, of which the machine disturbs most, depends
    little on it and is averaged over all steps. That of a step without levels is compared with the steps just before
    it: where memory becomes faster, steps of many nodes gain less. The best number's neighbours, and none, are run for
    single steps now and then: in many steps in a row a number would be judged by how busy a shared machine was then.

    Where looking for drafts brings nothing, a text rests (`rest_pays`): a plain step takes longer where drafts were
    looked for and none found, with a small model by a fifth. It is tried now and then.

    ``levels`` is how many are to be run now, and ``best`` the number that gives most by all that was seen.
    """

    def __init__(self, most: int, first: int = 1, texts: int = 1):
        """For steps that about so many ``texts`` take together, each telling of them; ``first`` levels at first."""
        self.levels = self.best = min(first, most)
        self._tokens, self._cost, self._drafting = ([Average() for _ in range(most + 1)] for _ in range(3))
        self._rest = Average()  # of all steps, as if they ran levels
        self._gap = Average()  # what it takes more without levels
        self._newest: deque[float] = deque(maxlen=4)  # of the newest steps with levels
        self._rest_pays = False
        self._rest_due = 0  # the step from which on a rest is tried
        self._looking = Average()  # what steps that look for drafts bring, of what resting brings in their time
        self._texts, self._told = texts, 0

    @property
    def steps(self) -> int:
        """How many were observed."""
        return self._told // self._texts

    def tokens(self, first: int, levels: int) -> float:
        """What the levels from ``first`` to ``levels`` add to a step; level 0 stands for a step without any."""
        return sum(level.value for level in self._tokens[first : levels + 1])

    def overhead(self, levels: int) -> float:
        """Seconds of a step with so many levels beyond its verification; no time for drafts where not tried yet."""
        return self._drafting[levels].value + self._rest.value + (0.0 if levels else self._gap.value)

    def seconds(self, levels: int) -> float:
        """Of usual steps with so many levels."""
        return sum(level.value for level in self._cost[: levels + 1]) + self.overhead(levels)

    def rate(self, levels: int) -> float:
        """Tokens per second of usual steps with so many levels; 0 before any step was seen."""
        return self.tokens(0, levels) / seconds if (seconds := self.seconds(levels)) else 0.0

    @property
    def rest_pays(self) -> bool:
        """Whether steps that rest gave more tokens per second than those that look for drafts, and still do."""
        return self._rest_pays

    @property
    def tries_rest(self) -> bool:
        """Whether it is time to try a rest, and no other number of levels is on trial in the steps behind it."""
        behind_trials, before_trials = 3 * _CHOOSE, _TRIAL - _CHOOSE
        return self.steps >= self._rest_due and behind_trials <= self.steps % _TRIAL < before_trials

    def observe_rest(self, share: float) -> bool:
        """The steps behind a rest brought this ``share`` of the tokens that it would have brought in their time.

        Returns:
            Whether rests would end if all comparisons were like this one.
        """
        self._looking.observe(share, _LEARN_REST)
        brings = self._looking.value
        self._rest_pays = brings < (_ENDS if self._rest_pays else _BEGINS)
        known = _REST_TRIALS if self._looking.seen >= _SURE else _REST_TRIALS[:-1]
        self._rest_due = self.steps + next((steps for bound, steps in known if brings < bound), known[-1][1])
        return share >= _ENDS

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
        rest *= credible
        if level:
            self._newest.append(rest)
        else:
            if self._newest:
                self._gap.observe(rest - median(self._newest), _LEARN_GAP)
                self._newest.popleft()  # a comparison for each at most
            rest -= self._gap.value
        self._rest.observe(rest)
        self._told += 1
        # Where heads draft ahead, the step that follows a choice still runs the number before.
        if level == self.levels and self._drafting[level].seen >= _FIRST:
            self._choose()

    def _choose(self) -> None:
        if self._told % (_CHOOSE * self._texts):
            self.levels = self.best  # a trial is over
            return
        seen = [number for number, tokens in enumerate(self._tokens) if tokens.seen]
        self.levels = self.best = best = max(seen, key=self.rate)
        others = [number for number in {best + 1, best - 1, 0} - {best} if 0 <= number < len(self._tokens)]
        if (trial := self.steps % _TRIAL // _CHOOSE) < len(others):
            self.levels = others[trial]
