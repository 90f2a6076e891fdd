"""How often drafts of a kind were accepted lately."""

from collections.abc import Hashable

_PRIOR_WEIGHT = 4  # observations that a prior is worth
_HALF_LIFE = 200  # observations of a kind after which an old one counts half


class AcceptanceEstimate:
    """Running acceptance rates by kind of draft; each starts from a prior and forgets slowly, since texts change."""

    def __init__(self) -> None:
        self._decay = 0.5 ** (1 / _HALF_LIFE)
        self._seen: dict[Hashable, tuple[float, float]] = {}  # accepted drafts and all drafts

    def rate(self, kind: Hashable, prior: float) -> float:
        """How likely a draft of this kind is right; ``prior`` is what is assumed before any was seen."""
        accepted, seen = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)

    def observe(self, kind: Hashable, right: bool) -> None:
        """A draft of this kind stood where the text has gone on, and was ``right`` or not."""
        accepted, seen = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = accepted * self._decay + right, seen * self._decay + 1
