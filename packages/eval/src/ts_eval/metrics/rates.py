"""What speculation achieved: acceptance and tokens per step."""

from collections.abc import Mapping, Sequence

import torch

from ts_eval.metrics.base import Ratio


def acceptance_rate(accepted: int | None, drafted: int | None) -> float | None:
    """alpha: accepted drafted tokens over drafted ones (paper, section 4.1).

    None when nothing was drafted, or when that is not known.

    ``drafted`` counts the depth of each step's tree, ``accepted`` the drafted tokens that entered the text.
    """
    return accepted / drafted if drafted else None


def ngram_acceptance_rate(accepted_from_ngrams: int | None, drafted: int | None) -> float | None:
    """beta: tokens accepted in the steps that an n-gram candidate won, over drafted ones (paper, section 4.3)."""
    return accepted_from_ngrams / drafted if drafted and accepted_from_ngrams is not None else None


def tokens_per_step(tokens: int, steps: int) -> float | None:
    """Tokens that entered the text per verification pass; 1 for plain decoding, None without a step."""
    return tokens / steps if steps else None


def acceptance_by_depth(accepted_by_depth: Sequence[int], steps: int) -> list[float]:
    """Share of steps that accepted a drafted token at depth 1, 2, ...; falls from each depth to the next.

    For a tree of fixed depth its mean over the depths is alpha. Empty when nothing was drafted.
    """
    return [accepted / steps for accepted in accepted_by_depth]


def acceptance_by_source(accepted_by_source: Mapping[str, int], drafted: int) -> dict[str, float | None]:
    """The part of alpha that each source of candidates reached.

    A token that several sources proposed counts for each, so the parts may add up to more than alpha.
    """
    return {source: acceptance_rate(accepted, drafted) for source, accepted in accepted_by_source.items()}


class AcceptanceRate(Ratio):
    """`acceptance_rate` pooled over all updates; scalar float64."""

    higher_is_better = True

    def update(self, accepted: int, drafted: int) -> None:
        self.numerator += accepted
        self.denominator += drafted


class NgramAcceptanceRate(AcceptanceRate):
    """`ngram_acceptance_rate` pooled over all updates; scalar float64."""


class TokensPerStep(Ratio):
    """`tokens_per_step` pooled over all updates; scalar float64."""

    higher_is_better = True

    def update(self, tokens: int, steps: int) -> None:
        self.numerator += tokens
        self.denominator += steps


class AcceptanceByDepth(Ratio):
    """`acceptance_by_depth` pooled over all updates; float64 [depths]."""

    higher_is_better = True

    def __init__(self, depths: int, **kwargs):
        super().__init__(depths, **kwargs)

    def update(self, accepted_by_depth: Sequence[int], steps: int) -> None:
        """Raises ValueError for more depths than the metric has."""
        if len(accepted_by_depth) > len(self.numerator):
            raise ValueError(f"{len(accepted_by_depth)} depths came, the metric has {len(self.numerator)}")
        for depth, accepted in enumerate(accepted_by_depth):
            self.numerator[depth] += accepted
        self.denominator += steps


class AcceptanceBySource(Ratio):
    """`acceptance_by_source` pooled over all updates; {source: scalar float64}."""

    higher_is_better = True

    def __init__(self, sources: Sequence[str], **kwargs):
        super().__init__(len(sources), **kwargs)
        self.sources = tuple(sources)

    def update(self, accepted_by_source: Mapping[str, int], drafted: int) -> None:
        for place, source in enumerate(self.sources):
            self.numerator[place] += accepted_by_source.get(source, 0)
        self.denominator += drafted

    def compute(self) -> dict[str, torch.Tensor]:  # type: ignore[override]  # as torchmetrics' collections do
        return dict(zip(self.sources, super().compute(), strict=True))
