"""What further nodes cost in steps, learnt from steps one behind the other."""

import random

import pytest

from decoder.drafters.tuning.cost_slope import CostSlope

MEASURED = [0.0, *(1.0 + 0.05 * nodes for nodes in range(64))]


def steps(slope, count, factor, luck, shift=lambda step: 0.0, noise=0.1):
    for step in range(count):
        nodes = luck.randint(1, 9)
        seconds = MEASURED[1] + factor * (MEASURED[nodes] - MEASURED[1]) + shift(step) + luck.gauss(0, noise)
        slope.observe(MEASURED[nodes], seconds, MEASURED[1])


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.0])
def test_it_comes_to_what_steps_take_whatever_else_changes(factor):
    """The machine becomes slower by half a step within 100, and some steps take ten times as long."""
    slope, luck = CostSlope(), random.Random(1)
    assert slope.factor == 1.0
    steps(slope, 600, factor, luck, lambda step: min(0.5, step / 200) + 9.0 * (step % 50 == 7))
    assert slope.factor == pytest.approx(factor, rel=0.12)
    assert slope.applied(MEASURED)[1] == MEASURED[1]
    assert slope.applied(MEASURED)[9] == pytest.approx(1.0 + slope.factor * 0.4)


def test_nodes_cost_no_less_than_was_measured():
    slope = CostSlope()
    steps(slope, 300, 0.3, random.Random(3))
    assert slope.factor == 1.0


def test_few_steps_prove_little_and_none_follow_a_rest():
    slope, luck = CostSlope(), random.Random(2)
    steps(slope, 5, 3.0, luck)
    assert slope.factor < 1.8
    slope = CostSlope()
    for nodes, seconds in ((1, 1.0), (9, 5.0)) * 50:
        slope.observe(MEASURED[nodes], seconds / 10, MEASURED[1])
        slope.forget_step()
    assert slope.factor == 1.0
