"""What steps really cost, by the number of nodes they verify."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

_LEARN = 0.05  # how fast costs follow what steps really took
_DRIFT = 0.01  # how fast the costs of other trees follow
_TRUST = 4  # observations that the first guess is worth
_WORST = 1.5  # a step that took longer than so many times its cost was disturbed


class RunningCosts:
    """Measured verification costs, corrected by how much dearer steps turned out: 1, 2-8, 9-16, 17-32, ... nodes apart.

    A step in its place finds other things in the processor's caches than a verification measured alone, it samples,
    and the text grows.

    Args:
        measured: seconds of verifying n nodes, for n from 1 on; entry 0 is unused.
    """

    def __init__(self, measured: Sequence[float]):
        self.measured = measured
        kinds = _kind(len(measured) - 1) + 1
        self._dearer = [1.0] * kinds
        self._seen = [0] * kinds

    def seconds(self, most: int) -> list[float]:
        """What a step that verifies n nodes takes, for n up to ``most``; entry 0 is unused. It never falls with n."""
        factors: list[float] = []
        for kind in range(_kind(most) + 1):
            factors += [self._factor(kind)] * (_widest(kind) - len(factors) + 1)
        return list(accumulate(map(mul, self.measured[: most + 1], factors), max))

    def observe(self, nodes: int, seconds: float) -> None:
        """A step that verified ``nodes`` took ``seconds``."""
        kind = _kind(nodes)
        factor, measured = self._factor(kind), self.measured[nodes]
        seconds = min(seconds, _WORST * factor * measured)
        self._seen[kind] += 1
        learn = max(_LEARN, 1 / (self._seen[kind] + _TRUST))
        self._dearer[kind] = factor + learn * (seconds / measured - factor)
        # Widths that are hardly ever tried any more must not keep what once disturbed them.
        for other in range(1, len(self._seen) if kind else 0):
            self._dearer[other] += _DRIFT * (self._dearer[kind] - self._dearer[other])

    def _factor(self, kind: int) -> float:
        """Of widths not tried yet it is that of the next ones tried below, or above."""
        if self._seen[kind]:
            return self._dearer[kind]
        tried = [other for other, seen in enumerate(self._seen) if seen]
        like = max((other for other in tried if other <= kind), default=min(tried, default=kind))
        return self._dearer[like]


def _kind(nodes: int) -> int:
    return 0 if nodes == 1 else max(1, (nodes - 1).bit_length() - 2)


def _widest(kind: int) -> int:
    return 1 if not kind else 4 << kind
