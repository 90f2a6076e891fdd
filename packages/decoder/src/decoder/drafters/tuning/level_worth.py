"""Whether levels of draft heads are worth what they cost."""

from decoder.drafters.tuning.odds import Calibration

_RETRY = 64  # steps after which a level that did not pay is tried again
_LEARN = 0.05  # how fast the usual chance to come to a level follows
_UNLIKE = 3.0  # no level takes more than so many times what another does
_WORST = 1.5  # a level that took longer than so many times the usual was disturbed


class LevelWorth:
    """What a level of heads takes, how likely the text comes to each one, and how often it then went through.

    Args:
        deepest: number of levels.
    """

    def __init__(self, deepest: int):
        self._seconds = [0.0] * deepest  # of each level, lately
        self._gains = [Calibration() for _ in range(deepest)]
        self._idle = [0] * deepest  # steps since each level was last run
        self._usual = [1.0] * (deepest + 1)
        self._met = [0] * (deepest + 1)  # steps in which the chance to come to each level was known
        self._explored = False

    def begin_step(self) -> None:
        self._idle = [steps + 1 for steps in self._idle]
        self._explored = False

    def pays(self, depth: int, price: float, chance: float | None = None) -> bool:
        """Whether a level is worth ``price`` tokens where the text comes to it with ``chance``, or the usual one."""
        chance = self._usual[depth] if chance is None else chance
        if self._gains[depth].corrected(chance) > price:
            return True
        # Now and then one level more, to see whether it still does not pay.
        explore, self._explored = not self._explored and self._idle[depth] >= _RETRY, True
        return explore

    def ran(self, depth: int, onward: float | None = None) -> None:
        """A level was run, behind which the text comes to the next one with the chance ``onward``, if that is known."""
        self._idle[depth] = 0
        if onward is not None:
            self._met[depth + 1] += 1
            learn = max(_LEARN, 1 / self._met[depth + 1])
            self._usual[depth + 1] += learn * (onward - self._usual[depth + 1])

    def observe(self, depth: int, chance: float, right: bool) -> None:
        """The text was thought to come to this level with that chance; whether one of its tokens was right."""
        self._gains[depth].observe(chance, right)

    def took(self, depth: int, seconds: float) -> None:
        """A level's time; one that was disturbed, or the first one with all its preparations, counts little."""
        # One stall must not make a level look so dear that it is not tried again for long.
        self._seconds = [min(known, _UNLIKE * seconds) for known in self._seconds]
        usual = self._seconds[depth]
        if usual:
            usual = min(usual, _WORST * seconds)
            seconds = min(seconds, _WORST * usual)
        self._seconds[depth] = usual + (seconds - usual) * (0.1 if usual else 1.0)

    def seconds(self, depth: int) -> float:
        """What a level takes; one that was not timed yet as long as that above it."""
        return next((seconds for seconds in self._seconds[depth::-1] if seconds), 0.0)
