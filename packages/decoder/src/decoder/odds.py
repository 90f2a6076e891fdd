"""How often a kind of draft was right lately."""

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
        self._hits: dict[Hashable, float] = {}
        self._tries: dict[Hashable, float] = {}

    def chance(self, kind: Hashable, guess: float) -> float:
        """The chance that a draft of this kind is right; ``guess`` is what is thought of it at first."""
        tries = self._tries.get(kind, 0.0)
        return (self._hits.get(kind, 0.0) + self.trust * guess) / (tries + self.trust)

    def observe(self, kind: Hashable, right: bool) -> None:
        """One draft of this kind stood where the text went on: was it right?"""
        self._hits[kind] = self._hits.get(kind, 0.0) * self._kept + right
        self._tries[kind] = self._tries.get(kind, 0.0) * self._kept + 1
