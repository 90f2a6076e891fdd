"""How often a kind of draft was right lately, and how far hopes were from what came."""

from collections.abc import Hashable


class Odds:
    """Running frequencies per kind of draft, each started from a guess and forgetting slowly.

    Args:
        trust: how many observations the first guess is worth.
        memory: observations after which an old one counts half.
    """

    def __init__(self, trust: float = 4.0, memory: float = 200.0):
        self.trust = trust
        self._kept = 0.5 ** (1 / memory)
        self._seen: dict[Hashable, tuple[float, float]] = {}  # hits and tries

    def chance(self, kind: Hashable, guess: float) -> float:
        """The chance that a draft of this kind is right; ``guess`` is what is thought of it at first."""
        hits, tries = self._seen.get(kind, (0.0, 0.0))
        return (hits + self.trust * guess) / (tries + self.trust)

    def observe(self, kind: Hashable, right: bool) -> None:
        """One draft of this kind stood where the text went on: was it right?"""
        hits, tries = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = hits * self._kept + right, tries * self._kept + 1


class Calibration:
    """What came as a share of what was hoped for, lately: the best of many estimates is mostly one that is too high.

    Args:
        trust: how much hope the first guess, that hopes come true, is worth.
        kept: the weight of an old observation against the next one.
    """

    def __init__(self, trust: float = 10.0, kept: float = 0.98):
        self.trust, self._kept = trust, kept
        self._came = self._hoped = 0.0

    def corrected(self, hope: float) -> float:
        """What to expect where ``hope`` is hoped for."""
        return hope * (self._came + self.trust) / (self._hoped + self.trust)

    def observe(self, hope: float, came: float) -> None:
        """``hope`` was hoped for, and ``came`` came."""
        self._came = self._came * self._kept + came
        self._hoped = self._hoped * self._kept + hope
