"""Medians over generations that may differ in length, and how sure they are: bootstrap confidence intervals."""

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
FEWEST_PROMPTS = 3


Weighted = tuple[float, float]
"""A value and its weight, above 0."""


def weighted_median(values: Sequence[Weighted]) -> float:
    """The value below and above which lies half of the weight; between two such values their mean.

    With equal weights it is the median.
    """
    ordered = sorted(values)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for (value, weight), (following, _) in pairwise(ordered):
        reached += weight
        if reached == half:
            return (value + following) / 2
        if reached > half:
            return value
    return ordered[-1][0]


def median_interval(values_of_prompts: Sequence[Sequence[Weighted]]) -> list[float] | None:
    """The percentile bootstrap interval of the weighted median of all values, at `CONFIDENCE`.

    Prompts are drawn again, with all values of a prompt (its runs) together: runs of one prompt resemble each other, so
    they are no sample of what other prompts would give. The draws are the same every time.

    Args:
        values_of_prompts: the values of each prompt; prompts without any are left out.

    Returns:
        The lower and upper end; None for fewer than `FEWEST_PROMPTS`: of two it would only repeat the range.
    """
    known = [values for values in values_of_prompts if values]
    if len(known) < FEWEST_PROMPTS:
        return None
    drawn = np.random.default_rng(0).integers(len(known), size=(RESAMPLES, len(known)))
    medians = [weighted_median([*chain.from_iterable(known[prompt] for prompt in prompts)]) for prompts in drawn]
    tail = (1 - CONFIDENCE) / 2
    return np.quantile(medians, [tail, 1 - tail]).tolist()
