"""Measures of decoding and of text: pure functions, and thin torchmetrics classes over them.

Sources are sections of TokenSwift (arXiv 2502.18890) and its review discussion. A measure that its input is too small
for is None (NaN in the torchmetrics classes), never 0.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from torchmetrics import Metric

DISTINCT_ORDERS = (1, 2, 3, 4)
BLEU_ORDERS = (2, 3, 4, 5)


def acceptance_rate(accepted: int, drafted: int) -> float | None:
    """alpha: accepted drafted tokens over drafted ones (paper, section 4.1); None when nothing was drafted.

    ``drafted`` counts the depth of each step's tree, ``accepted`` the drafted tokens that entered the text.
    """
    return accepted / drafted if drafted else None


def ngram_acceptance_rate(accepted_from_ngrams: int, drafted: int) -> float | None:
    """beta: tokens accepted in the steps that an n-gram candidate won, over drafted ones (paper, section 4.3)."""
    return accepted_from_ngrams / drafted if drafted else None


def tokens_per_step(tokens: int, steps: int) -> float | None:
    """Tokens that entered the text per verification pass; 1 for plain decoding, None without a step."""
    return tokens / steps if steps else None


def distinct_n(tokens: Sequence[Hashable], n: int) -> float | None:
    """Distinct-n: unique n-grams over all n-grams of ``tokens`` (Li et al., 2016; paper, section 4.1), in (0, 1].

    None for fewer than ``n`` tokens. Raises ValueError for ``n`` below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    ngrams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def distinct(tokens: Sequence[Hashable], orders: Sequence[int] = DISTINCT_ORDERS) -> dict[str, float | None]:
    """Distinct-n of every order, keyed "1", "2", ..., and their "mean" (None when one of them is None)."""
    values = {str(n): distinct_n(tokens, n) for n in orders}
    return {**values, "mean": mean_of(list(values.values())) if None not in values.values() else None}


def self_bleu(text: str, orders: Sequence[int] = BLEU_ORDERS, segments: int = 50) -> dict[str, float | None]:
    """Self-BLEU (Zhu et al., 2018; the paper's review discussion), in [0, 1], keyed by order; lower is more diverse.

    The text is cut at white space in ``segments`` pieces of equally many words (their lengths differ by one at most).
    Each is scored against all the others with sacrebleu's sentence BLEU of that maximal order (13a tokenisation,
    exponential smoothing, effective order); the result is the mean over the pieces. None for an order when a piece
    has fewer words than that. Raises ValueError for fewer than two segments.

    sacrebleu would count every reference again for each piece. Clipped matches need, per n-gram, only the highest
    count among the other pieces, so one pass keeps the two highest; sacrebleu turns the counts into scores.
    """
    if segments < 2:
        raise ValueError(f"segments must be at least 2, not {segments}")
    words = text.split()
    shortest = len(words) // segments
    fitting = [n for n in orders if n <= shortest]
    if not fitting:
        return {str(n): None for n in orders}

    tokenize = Tokenizer13a()
    cuts = [i * len(words) // segments for i in range(segments + 1)]
    pieces = [tokenize(" ".join(words[a:b])).split() for a, b in pairwise(cuts)]
    matches = [_clipped_matches(pieces, n) for n in range(1, max(fitting) + 1)]
    lengths = [len(piece) for piece in pieces]
    scores: dict[int, list[float]] = {n: [] for n in fitting}
    for i, length in enumerate(lengths):
        closest = min(lengths[:i] + lengths[i + 1 :], key=lambda other: (abs(other - length), other))
        for n in fitting:
            correct = [matches[order][i] for order in range(n)]
            total = [max(length - order, 0) for order in range(n)]
            score = BLEU.compute_bleu(
                correct, total, length, closest, smooth_method="exp", effective_order=True, max_ngram_order=n
            )
            # sacrebleu's exp(log) leaves a perfect score a rounding error above 100.
            scores[n].append(min(score.score / 100, 1.0))
    return {str(n): mean_of(scores[n]) if n in scores else None for n in orders}


def _clipped_matches(pieces: list[list[str]], n: int) -> list[int]:
    """Per piece, its n-grams that some other piece has, each at most as often as the piece that has it most."""
    counts = [Counter(zip(*(piece[i:] for i in range(n)), strict=False)) for piece in pieces]
    highest: dict[tuple[str, ...], tuple[int, int, int]] = {}
    for i, counter in enumerate(counts):
        for ngram, count in counter.items():
            first, owner, second = highest.get(ngram, (0, -1, 0))
            if count > first:
                highest[ngram] = (count, i, first)
            elif count > second:
                highest[ngram] = (first, owner, count)
    matches = []
    for i, counter in enumerate(counts):
        matched = 0
        for ngram, count in counter.items():
            first, owner, second = highest[ngram]
            matched += min(count, second if owner == i else first)
        matches.append(matched)
    return matches


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None when there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class _Ratio(Metric):
    """A quotient of two sums that accumulate over updates and devices; NaN while the divisor is 0."""

    full_state_update = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_state("numerator", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("denominator", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> torch.Tensor:
        return self.numerator / self.denominator


class AcceptanceRate(_Ratio):
    """`acceptance_rate` pooled over all updates; scalar float64."""

    higher_is_better = True

    def update(self, accepted: int, drafted: int) -> None:
        self.numerator += accepted
        self.denominator += drafted


class TokensPerStep(_Ratio):
    """`tokens_per_step` pooled over all updates; scalar float64."""

    higher_is_better = True

    def update(self, tokens: int, steps: int) -> None:
        self.numerator += tokens
        self.denominator += steps


class Distinct(_Ratio):
    """Mean `distinct_n` over texts, one text (token ids or words) per update; texts too short for n do not count."""

    higher_is_better = True

    def __init__(self, n: int, **kwargs):
        super().__init__(**kwargs)
        self.n = n

    def update(self, tokens: Sequence[Hashable]) -> None:
        value = distinct_n(tokens, self.n)
        if value is not None:
            self.numerator += value
            self.denominator += 1


class SelfBLEU(_Ratio):
    """Mean `self_bleu` of one order over texts, one text per update; texts too short for it do not count."""

    higher_is_better = False

    def __init__(self, order: int = 4, segments: int = 50, **kwargs):
        super().__init__(**kwargs)
        self.order, self.segments = order, segments

    def update(self, text: str) -> None:
        value = self_bleu(text, (self.order,), self.segments)[str(self.order)]
        if value is not None:
            self.numerator += value
            self.denominator += 1
