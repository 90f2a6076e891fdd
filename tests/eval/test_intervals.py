"""Confidence intervals over prompts."""

import itertools
from statistics import median

import numpy as np

from ts_eval.intervals import median_interval


def test_the_interval_is_that_of_all_resamples():
    values = [1.07, 1.31, 0.94, 1.52, 1.18]
    medians = [median(drawn) for drawn in itertools.product(values, repeat=5)]
    assert median_interval([[value] for value in values]) == np.quantile(medians, [0.025, 0.975]).tolist()


def test_it_covers_the_true_median_as_often_as_it_says():
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        low, high = median_interval([[value] for value in draw.normal(0, 1, 20)])
        covered += low <= 0 <= high
    # 95 of 100 are expected; the odds of fewer than 86 are below 1 in 1,000.
    assert covered >= 86


def test_runs_of_a_prompt_are_no_prompts():
    # Two prompts of many equal runs are as unsure as two of one run.
    assert median_interval([[1.0] * 9, [2.0] * 9]) == median_interval([[1.0], [2.0]]) == [1.0, 2.0]


def test_one_prompt_tells_nothing_of_others():
    assert median_interval([[1.0, 2.0, 3.0]]) is None
    assert median_interval([[1.0], []]) is None
    assert median_interval([]) is None
