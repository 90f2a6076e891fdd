"""What a node costs in the steps of a text, beside what was measured when texts began."""

from collections.abc import Sequence

_LEARN = 0.01  # weight of the newest comparison
_PRIOR = 0.16  # weight of "as measured": 16 comparisons of steps whose costs are a tenth of a plain step apart
_MOST = 4.0
_DISTURBED = 1.0  # in plain steps: two steps that are further apart were disturbed


class CostSlope:
    """How many times as much further nodes cost in steps as was measured, or as much.

    A machine whose memory becomes faster does plain steps faster, and not steps of many nodes, which compute; and the
    shortest of some passes in a row, which count when costs are measured, are shorter than those of a text. So each
    step is compared with the one just before it: of both, what they were measured to cost, and what they took. Whatever
    changes slowly is the same in both.

    ``factor`` is what the cost of further nodes is multiplied by.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._products = self._squares = 0.0
        self._before: tuple[float, float] | None = None

    def forget_step(self) -> None:
        """The next step does not follow the one that was observed last."""
        self._before = None

    def observe(self, measured: float, seconds: float, plain: float) -> None:
        """A step of a tree that was measured to cost so much took so many ``seconds``; ``plain`` is one of one node."""
        if self._before is not None:
            of_cost, of_time = measured - self._before[0], seconds - self._before[1]
            if abs(of_time) < _DISTURBED * plain:
                self._products += of_cost * of_time - _LEARN * self._products
                self._squares += of_cost**2 - _LEARN * self._squares
                prior = _PRIOR * plain**2
                factor = (self._products + prior) / (self._squares + prior)
                self.factor = min(_MOST, max(1.0, factor))
        self._before = measured, seconds

    def applied(self, costs: Sequence[float]) -> list[float]:
        """The costs of n nodes, by n; entry 0 is unused."""
        return [costs[1] + self.factor * (cost - costs[1]) for cost in costs]
