"""How many levels of heads are run, in steps of made-up acceptance and costs."""

import random

import pytest

from decoder.drafters.tuning.level_policy import LevelPolicy

COSTS = [0.0, *(1.0 + 0.02 * n for n in range(1, 65))]


def run(policy, steps, acceptance, level_seconds, luck, slower=lambda step: 1.0):
    """Steps whose level i is accepted with chance ``acceptance[i]`` behind the one before; how often each was run."""
    taken, tokens, seconds = {}, 0, 0.0
    for step in range(steps):
        levels = policy.levels
        gained = []
        for level in range(levels):
            gained.append(all(gained) and luck.random() < acceptance[level])
        nodes = 1 + 3 * levels
        time = (COSTS[nodes] + 0.2 + level_seconds * levels) * slower(step) * luck.uniform(0.9, 1.1)
        policy.observe(levels, gained, 1, nodes, time - COSTS[nodes], COSTS)
        taken[levels] = taken.get(levels, 0) + 1
        tokens, seconds = tokens + 1 + sum(gained), seconds + time
    return taken, tokens / seconds


def rate(levels, acceptance, level_seconds):
    tokens, chance = 1.0, 1.0
    for level in range(levels):
        chance *= acceptance[level]
        tokens += chance
    return tokens / (COSTS[1 + 3 * levels] + 0.2 + level_seconds * levels)


@pytest.mark.parametrize(
    "acceptance, level_seconds, best",
    [((0.1,) * 8, 0.5, 0), ((0.7,) + (0.1,) * 7, 0.3, 1), ((0.8, 0.8) + (0.05,) * 6, 0.3, 2), ((0.9,) * 8, 0.05, 8)],
)
def test_the_number_that_gives_most_tokens_per_second_is_run_and_trials_cost_little(acceptance, level_seconds, best):
    """Over 10 seeds of 3,000 steps the loss against the best number is below 4 %."""
    rates = [rate(levels, acceptance, level_seconds) for levels in range(9)]
    assert rates.index(max(rates)) == best
    found = [run(LevelPolicy(8), 3000, acceptance, level_seconds, random.Random(seed))[1] for seed in range(10)]
    assert sum(found) / len(found) > 0.96 * max(rates)


def test_a_number_that_becomes_the_best_is_found():
    policy, luck = LevelPolicy(2), random.Random(1)
    taken, _ = run(policy, 1000, (0.05, 0.05), 0.5, luck)
    assert taken[0] > 800
    # A text that heads know better.
    run(policy, 1500, (0.95, 0.9), 0.2, luck)
    taken, _ = run(policy, 1000, (0.95, 0.9), 0.2, luck)
    assert taken[2] > 800


def test_a_machine_that_slows_down_speaks_for_no_number():
    """What was learnt of other numbers lately holds for a slower machine, too."""
    policy, luck = LevelPolicy(1), random.Random(2)
    run(policy, 1000, (0.6,), 0.3, luck)
    assert policy.levels == 1
    taken, _ = run(policy, 3000, (0.6,), 0.3, luck, slower=lambda step: 1 + min(1.0, step / 500))
    assert taken[1] > 0.85 * 3000


def test_disturbed_steps_prove_nothing():
    policy, luck = LevelPolicy(1), random.Random(3)
    taken, _ = run(policy, 3000, (0.6,), 0.3, luck, slower=lambda step: 100.0 if step % 100 == 50 else 1.0)
    assert taken[1] > 0.85 * 3000


def test_the_first_step_of_all_may_be_disturbed():
    policy = LevelPolicy(1)
    for step in range(200):
        levels = policy.levels
        policy.observe(levels, [True] * levels, 1, 2, 1000.0 if step == 2 else 0.3 * levels, COSTS)
    assert policy.levels == 1


def test_texts_of_a_few_steps_find_the_best_number_together():
    policy, luck = LevelPolicy(4), random.Random(4)
    for _ in range(200):
        run(policy, 5, (0.1,) * 4, 0.5, luck)
    taken = [run(policy, 5, (0.1,) * 4, 0.5, luck)[0] for _ in range(40)]
    assert sum(counts.get(0, 0) for counts in taken) > 0.8 * 200


def test_a_step_with_another_number_says_nothing():
    """It is another text's, or one that began without a state for heads."""
    policy = LevelPolicy(1)
    for _ in range(500):
        policy.observe(0, [], 9, 1, 0.1, COSTS)
    assert policy.levels == 1


def test_without_heads_there_is_nothing_to_try():
    policy = LevelPolicy(0)
    taken, _ = run(policy, 500, (), 0.5, random.Random(5))
    assert taken == {0: 500}
    assert policy.overhead(0) == pytest.approx(0.2, abs=0.05)


def test_seconds_of_a_number_not_tried_are_those_of_its_neighbour_with_its_own_nodes():
    policy = LevelPolicy(3)
    for _ in range(10):
        policy.observe(1, [True], 1, 4, 0.5, COSTS)
    assert policy.overhead(3) == policy.overhead(1) == pytest.approx(0.5)
    assert policy.seconds(1, COSTS) == pytest.approx(COSTS[4] + 0.5)
    assert policy.gain(1) == policy.gain(3) == 1.0
    assert policy.gain(0) == 0.0
