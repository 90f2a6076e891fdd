"""How many levels of heads are run, in steps of made-up acceptance and costs."""

import random

import pytest

from decoder.drafters.tuning.level_policy import Expected, LevelPolicy

COSTS = [0.0, *(1.0 + 0.02 * n for n in range(1, 65))]


def run(policy, steps, acceptance, level_seconds, luck, slower=lambda step: 1.0):
    """Steps whose level i is accepted with chance ``acceptance[i]`` behind the one before; how often each was run."""
    taken, tokens, seconds = {}, 0, 0.0
    for step in range(steps):
        levels = policy.levels
        gained = []
        for level in range(levels):
            gained.append(all(gained) and luck.random() < acceptance[level])
        cost = COSTS[1 + 3 * levels]
        slow = slower(step)
        drafting = level_seconds * levels * slow * luck.uniform(0.9, 1.1)
        verification = (cost + 0.2) * slow * luck.uniform(0.9, 1.1)
        policy.observe(likely(levels, acceptance, luck), cost, drafting, verification - cost)
        taken[levels] = taken.get(levels, 0) + 1
        tokens, seconds = tokens + 1 + sum(gained), seconds + drafting + verification
    return taken, tokens / seconds


def likely(levels, acceptance, luck):
    """What a step expects of none of its levels, of one and so on; its candidates are more likely or less."""
    tokens, chance, found = 1.0, luck.uniform(0.5, 1.5), []
    for level in range(levels + 1):
        found.append(Expected(tokens, COSTS[1 + 3 * level]))
        chance *= acceptance[level] if level < len(acceptance) else 0.0
        tokens += chance
    return found


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


@pytest.mark.parametrize("usual", [0, 1])
def test_what_a_machine_gains_or_loses_in_speed_counts_for_the_numbers_that_are_not_run(usual):
    policy = LevelPolicy(1, first=usual)

    def steps(count, rest):
        for _ in range(count):
            levels = policy.levels
            expected = [Expected(1.0, 1.0), Expected(2.5 if usual else 0.1, 1.2)][: levels + 1]
            policy.observe(expected, expected[-1].cost, 0.1 * levels, rest)

    steps(600, 1.0)
    assert policy.best == usual
    # Too few for the other number to tell, which takes one in 48.
    for rest in (3.0, 0.2):
        steps(200, rest)
        assert [policy.overhead(levels) - 0.1 * levels for levels in (0, 1)] == pytest.approx([rest] * 2, abs=0.15)


def test_disturbed_steps_prove_nothing():
    policy, luck = LevelPolicy(1), random.Random(3)
    taken, _ = run(policy, 3000, (0.6,), 0.3, luck, slower=lambda step: 100.0 if step % 100 == 50 else 1.0)
    assert taken[1] > 0.85 * 3000


@pytest.mark.parametrize("disturbed", [(1000.0, 0.0), (0.0, 1000.0)], ids=["drafts", "the rest"])
def test_the_first_step_of_all_may_be_disturbed(disturbed):
    policy, luck = LevelPolicy(1), random.Random(6)
    for step in range(200):
        levels = policy.levels
        drafting, rest = disturbed if step == 2 else (0.3 * levels, 0.0)
        policy.observe(likely(levels, (1.0,), luck), COSTS[1 + 3 * levels], drafting, rest)
    assert policy.levels == 1


def test_texts_of_a_few_steps_find_the_best_number_together():
    policy, luck = LevelPolicy(4), random.Random(4)
    for _ in range(200):
        run(policy, 5, (0.1,) * 4, 0.5, luck)
    taken = [run(policy, 5, (0.1,) * 4, 0.5, luck)[0] for _ in range(40)]
    assert sum(counts.get(0, 0) for counts in taken) > 0.8 * 200


def test_a_machine_that_is_slow_for_a_while_speaks_for_no_number():
    """Trials stand among the other steps, so that a slow while of 40 steps falls on all numbers alike."""
    shares = []
    for seed in range(10):
        policy, luck = LevelPolicy(1), random.Random(seed)
        pace = [1.4 if luck.random() < 0.3 else 1.0 for _ in range(100)]
        taken, _ = run(policy, 4000, (0.5,), 0.3, luck, slower=lambda step, pace=pace: pace[step // 40])
        shares.append(taken[1] / 4000)
    assert min(shares) > 0.85


def test_texts_that_take_a_step_together_count_it_once():
    """Each of eight texts tells of every step; a number is tried as rarely as for one text."""
    policy, luck, tried = LevelPolicy(1, sequences=8), random.Random(9), 0
    for _ in range(640):
        levels = policy.levels
        tried += levels != 1
        for _ in range(8):
            policy.observe(likely(levels, (0.9,), luck), COSTS[1 + 3 * levels], 0.2 + 0.1 * levels, 0.0)
    assert 0.8 * 640 / 48 <= tried <= 1.2 * 640 / 48


@pytest.mark.parametrize("ahead", [False, True])
def test_every_number_beside_the_best_is_tried_again_and_again(ahead):
    """On CUDA heads draft ahead: a step runs what was asked for in the one before, unless that was none."""
    policy, luck = LevelPolicy(2), random.Random(12)
    ran, drafted = [], 0
    for _ in range(1000):
        ran.append(drafted or policy.levels)
        drafted = policy.levels if ahead else 0  # in this step, for the next one
        policy.observe(likely(ran[-1], (0.7, 0.1), luck), COSTS[1 + 3 * ran[-1]], 0.3 * ran[-1], 0.1)
    assert policy.best == 1
    for number in (0, 2):
        steps = [step for step in range(200, 1000) if ran[step] == number]
        trials = [step for step, before in zip(steps[1:], steps, strict=False) if step > before + 1]
        # One in 48 steps.
        assert 800 / 60 - 3 <= len(trials) <= 800 / 48
        assert len(steps) <= (1 + ahead) * (len(trials) + 1)


def test_a_level_that_adds_nothing_is_told_from_one_that_does_by_the_time_of_drafts():
    """Levels cost a fortieth of a step, and the machine is slow for some 30 steps now and then.

    By the whole time of their steps, two in three of such runs would tell.
    """
    found = []
    for seed in range(10):
        policy, luck = LevelPolicy(4, first=4), random.Random(seed)
        slower = [0.6 * (luck.random() < 0.3) for _ in range(14)]
        for step in range(400):
            levels = policy.levels
            expected = [Expected(min(1.0 + 0.4 * level, 1.8), 1.0 + 0.02 * level) for level in range(levels + 1)]
            policy.observe(expected, expected[-1].cost, 0.025 * levels, luck.uniform(0.0, 0.3) + slower[step // 30])
        found.append(policy.best)
    assert found == [2] * 10


def test_without_heads_there_is_nothing_to_try():
    policy = LevelPolicy(0)
    taken, _ = run(policy, 500, (), 0.5, random.Random(5))
    assert taken == {0: 500}
    assert policy.overhead(0) == pytest.approx(0.2, abs=0.05)


def test_what_a_level_adds_is_averaged_over_the_steps_that_ran_it():
    policy = LevelPolicy(3)
    for step in range(10):
        policy.observe([Expected(1.0, 1.0), Expected(1.5 + 0.1 * (step % 2), 1.2)], 1.1, 0.5)
    assert policy.tokens(0, 0) == pytest.approx(1.0)
    assert policy.tokens(1, 1) == policy.tokens(1, 3) == pytest.approx(0.55)
    assert policy.tokens(0, 1) == pytest.approx(1.55)
    # Numbers not tried yet are thought to need no time for drafts, so that they are tried.
    assert [policy.seconds(levels) for levels in (0, 1, 3)] == pytest.approx([1.0, 1.2 + 0.5, 1.2])


@pytest.mark.parametrize("second, best", [(0.2, 0), (0.9, 2)])
def test_plain_steps_are_run_where_a_costly_first_level_does_not_pay(second, best):
    """The first level takes more than a step and adds less than a token; only the second may make up for it."""
    policy, luck = LevelPolicy(2, first=2), random.Random(7)
    for _ in range(300):
        levels = policy.levels
        expected = [Expected((1.0, 1.8, 1.8 + second)[level], 1.0) for level in range(levels + 1)]
        policy.observe(expected, 1.0, (0.0 if not levels else 1.1 + 0.02 * levels) * luck.uniform(0.9, 1.1))
    assert policy.best == best
    assert policy.rate(best) > policy.rate(1)


def test_a_step_takes_time_whatever_verifications_were_measured_to_cost():
    """Where steps of two sequences become those of one, the costs that they were measured beside are others'."""
    policy = LevelPolicy(2)
    for _ in range(50):
        policy.observe([Expected(1.0, 5.0)], 5.0, 0.0, -4.0)
    assert policy.overhead(0) < -3
    assert policy.whole(3.0, 0) == pytest.approx(0.3) and policy.whole(5.0, 0) == pytest.approx(
        5.0 + policy.overhead(0)
    )
    assert policy.rate(0) > 0
