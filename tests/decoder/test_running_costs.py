"""Costs of steps, learnt while they run."""

import pytest

from decoder.drafters.tuning.running_costs import RunningCosts

MEASURED = [0.0, *(1.0 + 0.1 * n for n in range(64))]


def test_costs_are_the_measured_ones_until_steps_have_been_seen():
    assert RunningCosts(MEASURED).seconds(64) == pytest.approx(MEASURED)


def test_widths_learn_apart_and_untried_ones_follow_the_next_below():
    costs = RunningCosts(MEASURED)
    for _ in range(400):
        costs.observe(1, 1.1 * MEASURED[1])
    assert costs.seconds(64) == pytest.approx([1.1 * cost for cost in MEASURED])
    for _ in range(400):
        costs.observe(2, 1.3 * MEASURED[2])
        costs.observe(7, 1.3 * MEASURED[7])
        costs.observe(12, 1.5 * MEASURED[12])
    found = costs.seconds(64)
    assert found[1] == pytest.approx(1.1 * MEASURED[1])
    assert found[2:9] == pytest.approx([1.3 * cost for cost in MEASURED[2:9]], rel=0.04)
    assert found[9:] == pytest.approx([1.5 * cost for cost in MEASURED[9:]], rel=0.04)
    assert all(costs.seconds(most) == found[: most + 1] for most in range(1, 64))


def test_a_tree_not_tried_any_more_forgets_what_disturbed_it():
    costs = RunningCosts(MEASURED)
    for _ in range(20):
        costs.observe(16, 3.0 * MEASURED[16])
    assert costs.seconds(64)[16] > 1.5 * MEASURED[16]
    for _ in range(500):
        costs.observe(4, 1.2 * MEASURED[4])
        costs.observe(1, 1.0 * MEASURED[1])
    found = costs.seconds(64)
    assert found[16] == pytest.approx(1.2 * MEASURED[16], rel=0.02)
    assert found[1] == pytest.approx(MEASURED[1])


def test_costs_never_fall_with_the_number_of_nodes():
    costs = RunningCosts(MEASURED)
    for _ in range(200):
        costs.observe(8, 2 * MEASURED[8])
        costs.observe(9, 1 * MEASURED[9])
    found = costs.seconds(64)
    assert found == sorted(found)
    assert found[9] == found[8] == pytest.approx(2 * MEASURED[8], rel=0.1)


def test_a_disturbed_step_counts_little():
    costs = RunningCosts(MEASURED)
    costs.observe(1, 1000.0)
    assert costs.seconds(64)[1] == pytest.approx(1.1)
    for _ in range(200):
        costs.observe(1, 1.0)
    assert costs.seconds(64)[1] == pytest.approx(1.0, rel=1e-3)
