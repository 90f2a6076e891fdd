"""How to draft: settings that change the speed and, but for one kept for reproduction, never the text."""

from dataclasses import dataclass

MIN_BUDGET = 64
CACHES = ("dynamic", "static", "full")
VERIFICATIONS = ("exact", "independent")


@dataclass(frozen=True)
class TokenSwiftOptions:
    """Settings of the drafters; a drafter ignores those that do not apply to it.

    Args:
        tree: branching per depth. The first number counts candidates for the next token, the i-th those of the i-th
            head under every parent; (1, 3, 3, 3) is the paper's tree (section 3.3).
        ngrams: how many n-grams are retrieved per step (the paper's k); 0 switches reutilisation off.
        budget: slots of the partial cache (|B|); None takes the prompt length, at least 64.
        sink: attention-sink positions that always stay in the partial cache (|S|).
        cache: the draft pass's memory: ``dynamic`` (rebuilt by importance), ``static`` (chosen once) or ``full``.
        coupled: rank draft candidates by log q + the noise of their position instead of log q.
        verification: ``exact``: one draw per node from that node's own context, so the text is AR's. ``independent``:
            the paper's Algorithm 1 as written, an own draw per candidate path of which the longest match wins. It
            favours drafted tokens, so the text is *not* distributed as AR's; for reproduction only.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    tree: tuple[int, ...] = (1, 3, 3, 3)
    ngrams: int = 20
    budget: int | None = None
    sink: int = 16
    cache: str = "dynamic"
    coupled: bool = True
    verification: str = "exact"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", () if isinstance(self.tree, int | None) else tuple(self.tree))
        if not isinstance(self.coupled, bool):
            raise ValueError(f"coupled must be true or false, not {self.coupled!r}")
        if not self.tree or any(not isinstance(k, int) or k < 1 for k in self.tree):
            raise ValueError(f"tree must be one or more positive integers, one per depth, not {self.tree!r}")
        if not isinstance(self.ngrams, int) or self.ngrams < 0:
            raise ValueError(f"ngrams must be an integer of at least 0, not {self.ngrams!r}")
        if not isinstance(self.sink, int) or self.sink < 0:
            raise ValueError(f"sink must be an integer of at least 0, not {self.sink!r}")
        if self.budget is not None and (not isinstance(self.budget, int) or self.budget <= self.sink):
            raise ValueError(f"budget must be an integer above sink ({self.sink}), not {self.budget!r}")
        if self.cache not in CACHES:
            raise ValueError(f"cache must be one of {', '.join(CACHES)}, not {self.cache!r}")
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"verification must be one of {', '.join(VERIFICATIONS)}, not {self.verification!r}")

    def budget_for(self, prompt_tokens: int) -> int:
        """Slots of the partial cache for a prompt of ``prompt_tokens`` tokens."""
        return self.budget if self.budget is not None else max(MIN_BUDGET, self.sink + 1, prompt_tokens)
