"""The choice among ways of going on, with steps of made-up costs."""

import random

import pytest

from decoder.drafters.tuning.ways import Ways


def run(ways, steps, draw):
    """How often each way was taken, and tokens and seconds in all; ``draw(way, step)`` gives those of one step."""
    taken, tokens, seconds = {}, 0, 0.0
    for step in range(steps):
        way = ways.now
        taken[way] = taken.get(way, 0) + 1
        more, longer = draw(way, step)
        ways.observe(way, more, longer)
        tokens, seconds = tokens + more, seconds + longer
    return taken, tokens, seconds


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_fastest_way_is_taken_and_trials_cost_little(fastest):
    """Tokens per step as drafts give them, by luck: over 20 seeds the loss against the best way is below 5 %."""
    longer = [1.0 if way == fastest else 1.25 for way in range(3)]
    rates = []
    for seed in range(20):
        luck = random.Random(seed)
        _, tokens, seconds = run(Ways(3), 3000, lambda way, _, luck=luck: (luck.choice((1, 1, 2, 3)), longer[way]))
        rates.append(tokens / seconds)
    assert sum(rates) / len(rates) > 0.95 * 1.75


def test_a_way_that_becomes_the_fastest_is_found():
    """A text that begins to repeat itself makes deep drafts right."""
    taken, _, _ = run(Ways(2), 1000, lambda way, _: (1, 1.0 + way))
    assert taken[0] > 800
    ways = Ways(2)
    run(ways, 1000, lambda way, _: (1, 1.0 + way))
    taken, _, _ = run(ways, 3000, lambda way, _: ((1, 5)[way], 1.0 + way))
    assert taken[1] > 1500


def test_a_disturbed_step_proves_nothing():
    taken, _, _ = run(Ways(2), 1500, lambda way, step: (1, 50.0 if not way and step % 100 == 99 else 1.0 + 0.3 * way))
    assert taken[0] > 1200


def test_one_way_has_nothing_to_try():
    ways = Ways(1)
    taken, _, _ = run(ways, 500, lambda way, _: (2, 0.5))
    assert taken == {0: 500}


def test_a_step_on_another_way_than_now_is_of_another_text():
    """Of two texts that are generated at the same time one may turn while the other is in a step."""
    ways = Ways(2)
    for _ in range(500):
        ways.observe(1 - ways.now, 9, 0.1)
    assert ways.now == 0
    taken, _, _ = run(ways, 1000, lambda way, _: (1, 1.0 + way))
    assert taken[0] > 800
