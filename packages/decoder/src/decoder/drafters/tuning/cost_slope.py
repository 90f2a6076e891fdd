"""What a node costs in the steps of a sequence, beside what was measured when sequences began."""

from collections.abc import Sequence

_LEARN = 0.01  # weight of the newest comparison
_PRIOR = 0.16  # weight of "as measured": 16 comparisons of steps whose costs are a tenth of a plain step apart
_MOST = 4.0
_DISTURBED = 1.0  # in plain steps: two steps that are further apart were disturbed


class CostSlope:
    """By how much to multiply the measured cost of further nodes, 1 at least, for what they cost in a sequence's steps.

    A machine whose memory becomes faster does plain steps faster, and not steps of many nodes, which compute; and the
    shortest of some passes in a row, which count when costs are measured, are shorter than those of a sequence. So each
    step is compared with the one just before it: of both, what they were measured to cost, and what they took. Whatever
    changes slowly is the same in both.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._products = self._squares = 0.0

    def observe(self, of_cost: float, of_time: float, plain: float) -> None:
        """Two steps in a row differ by this much in measured cost and in time; ``plain`` is what one node costs."""
        if abs(of_time) >= _DISTURBED * plain:
            return
        self._products += of_cost * of_time - _LEARN * self._products
        self._squares += of_cost**2 - _LEARN * self._squares
        prior = _PRIOR * plain**2
        self.factor = min(_MOST, max(1.0, (self._products + prior) / (self._squares + prior)))

    def applied(self, costs: Sequence[float]) -> list[float]:
        """The costs of n nodes, by n; entry 0 is unused."""
        return [costs[1] + self.factor * (cost - costs[1]) for cost in costs]
