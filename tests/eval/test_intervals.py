"""Weighted medians, and confidence intervals over prompts."""

import itertools
from statistics import median

import numpy as np
import pytest

from ts_eval.comparing.intervals import median_interval, weighted_median


def interval(values_of_prompts):
    return median_interval([[(value, 1) for value in values] for values in values_of_prompts])


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_with_equal_weights_the_median_is_the_usual_one(count):
    values = np.random.default_rng(count).normal(size=count).tolist()
    assert weighted_median([(value, 3) for value in values]) == median(values)


def test_a_weight_is_a_number_of_equal_values():
    values, weights = [1.5, 0.5, 4.0, 2.0], [2, 1, 3, 4]
    repeated = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    assert weighted_median(list(zip(values, weights, strict=True))) == median(repeated) == 2.0
    low, high = median_interval([[(1.0, 9), (9.0, 1)], [(2.0, 9), (9.0, 1)], [(1.5, 9), (9.0, 1)]])
    assert (low, high) == (1.0, 2.0)


def test_the_interval_is_that_of_all_resamples():
    values = [1.07, 1.31, 0.94, 1.52, 1.18]
    medians = [median(drawn) for drawn in itertools.product(values, repeat=5)]
    assert interval([[value] for value in values]) == np.quantile(medians, [0.025, 0.975]).tolist()


def test_it_covers_the_true_median_as_often_as_it_says():
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        low, high = interval([[value] for value in draw.normal(0, 1, 20)])
        covered += low <= 0 <= high
    # 95 of 100 are expected; the odds of fewer than 86 are below 1 in 1,000.
    assert covered >= 86


def test_runs_of_a_prompt_are_no_prompts():
    # Three prompts of many equal runs are as unsure as three of one run.
    assert interval([[1.0] * 9, [2.0] * 9, [3.0] * 9]) == interval([[1.0], [2.0], [3.0]]) == [1.0, 3.0]


def test_few_prompts_tell_nothing_of_others():
    assert interval([[1.0], [2.0]]) is None
    assert interval([[1.0, 2.0, 3.0]]) is None
    assert interval([[1.0], []]) is None
    assert interval([]) is None
