"""Which of several ways of going on gives more tokens per second, told by trying them."""

import math

_TRIAL = 12  # steps for which another way is tried
_REMEMBERED = 24  # steps on each way that what was learnt from earlier texts is worth
_STAY, _LONGEST_STAY = 64, 256  # steps on the best way between trials: at first, and after it has won again and again
_COLD = 2  # steps at the beginning of a stretch that do not count
_KEPT = 0.99  # of old tokens and seconds against those of the next step
_TIE = 0.02  # a way must be faster by so much than the one before it
_WORST = 2.0  # a step that took longer than so many times the usual was disturbed


class Ways:
    """The best way mostly, and each other one now and then, in stretches of steps.

    Single steps would not do: each finds the processor's caches as the step before has left them, and many tokens in
    one are luck.

    Args:
        count: of ways, the preferred one first: it wins where they are about as fast. The first stretch takes it, the
            next ones the others in turn.
    """

    def __init__(self, count: int):
        self.now = 0
        self._tokens, self._squares = [0.0] * count, [0.0] * count
        self._seconds, self._steps = [0.0] * count, [0.0] * count
        self._best = 0
        self._next = 1 % count
        self._done = 0  # steps of this stretch
        self._length = _TRIAL
        self._stay = _STAY

    def begin(self) -> None:
        """Another text begins, which may be of another kind."""
        for way, steps in enumerate(self._steps):
            for sums in (self._tokens, self._squares, self._seconds, self._steps):
                sums[way] *= min(1.0, _REMEMBERED / max(1.0, steps))
        self._stay = _STAY
        self._length = min(self._length, self._done + _STAY)

    def observe(self, way: int, tokens: int, seconds: float) -> None:
        """A step on ``way`` gave ``tokens`` in ``seconds``; the next step goes by ``now`` as it is then."""
        if way != self.now:  # of another text, which is generated at the same time
            return
        self._done += 1
        if self._done > _COLD:
            if self._steps[way]:
                seconds = min(seconds, _WORST * self._seconds[way] / self._steps[way])
            sums = (self._tokens, tokens), (self._squares, tokens**2), (self._seconds, seconds), (self._steps, 1)
            for kept, new in sums:
                kept[way] = kept[way] * _KEPT + new
        if self._done >= self._length:
            self._turn()

    def _rate(self, way: int) -> float:
        return self._tokens[way] / self._seconds[way] if self._seconds[way] else 0.0

    def _sure_rate(self, way: int) -> float:
        """The rate less its standard error: few steps prove little, since how many tokens one gives is luck."""
        steps, tokens = self._steps[way], self._tokens[way]
        variance = self._squares[way] / steps - (tokens / steps) ** 2
        return self._rate(way) * (1 - math.sqrt(max(0.0, variance) / steps) * steps / tokens)

    def _turn(self) -> None:
        """The next stretch: a trial after the best way, the best way after a trial."""
        ways = range(len(self._steps))
        untried = [way for way in ways if not self._steps[way]]
        self._done = 0
        if untried:
            self.now, self._length = untried[0], _TRIAL
            return
        best = max(ways, key=lambda way: self._sure_rate(way) * (1 - _TIE * way))
        if best != self._best:
            self._best, self._stay = best, _STAY
        if self.now != best or len(ways) == 1:
            self.now, self._length = best, self._stay
            self._stay = min(2 * self._stay, _LONGEST_STAY)
        else:
            others = [way for way in ways if way != best]
            self._next = (self._next + 1) % len(others)
            self.now, self._length = others[self._next], _TRIAL
