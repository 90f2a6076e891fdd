"""Which of several policies to follow: a bandit whose arms are policies of their own."""

import math
from collections.abc import Sequence

from decoder.drafters.tuning.level_policy import LevelPolicy

_TRIAL = 64  # steps for which a policy is tried, in which it finds its number of levels
_STALE = 1024  # steps after which a policy is tried again


class PolicyChoice:
    """Chooses between policies: the one that gives most tokens per second, the others again now and then."""

    def __init__(self, policies: Sequence[LevelPolicy]):
        self.policies = policies
        self._last = [-math.inf] * len(policies)  # when each was chosen last
        self._now = 0  # steps so far
        self._chosen = 0

    def choose(self) -> int:
        """The place of the policy for the next step."""
        if self._now % _TRIAL == 0:
            stale = min(range(len(self.policies)), key=self._last.__getitem__)
            self._chosen = stale if self._now - self._last[stale] > _STALE else self._fastest()
        self._last[self._chosen] = self._now
        self._now += 1
        return self._chosen

    def _fastest(self) -> int:
        return max(range(len(self.policies)), key=lambda place: self.policies[place].rate(self.policies[place].best))
