"""What further nodes cost in steps, learnt from steps one behind the other."""

import random

import pytest

from decoder.drafters.tuning.cost_slope import CostSlope

MEASURED = [0.0, *(1.0 + 0.05 * nodes for nodes in range(64))]


def steps(slope, count, factor, luck, shift=lambda step: 0.0, noise=0.1):
    before = None
    for step in range(count):
        cost = MEASURED[luck.randint(1, 9)]
        seconds = MEASURED[1] + factor * (cost - MEASURED[1]) + shift(step) + luck.gauss(0, noise)
        if before is not None:
            slope.observe(cost - before[0], seconds - before[1], MEASURED[1])
        before = cost, seconds


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


def test_few_steps_prove_little():
    slope = CostSlope()
    steps(slope, 5, 3.0, random.Random(2))
    assert slope.factor < 1.8
