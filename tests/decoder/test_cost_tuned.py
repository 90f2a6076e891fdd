"""Cost-tuned trees: what candidates are thought to be worth, what is learnt of them; no clock changes a text."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.drafters.auto import Auto
from decoder.drafters.layer_levels import LayerLevels
from decoder.drafters.levels import HeadLevels
from decoder.drafters.tuning.candidate_tree import AcceptanceEstimate, CandidateTree
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.drafters.tuning.level_policy import LevelPolicy
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree

from .conftest import clocked, finding, random_heads, random_tokens, some

GREEDY = SamplingParams(temperature=0)
PENALISED = SamplingParams(seed=5, min_p=0.05, repetition_penalty=1.2)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_an_estimate_begins_with_its_prior_and_comes_to_the_true_rate(rate):
    estimate, luck = AcceptanceEstimate(), random.Random(1)
    assert estimate.rate("kind", prior=0.3) == 0.3
    for _ in range(2000):
        estimate.observe("kind", luck.random() < rate)
    assert estimate.rate("kind", prior=0.3) == pytest.approx(rate, abs=0.08)
    assert estimate.rate("another kind", prior=0.3) == 0.3
    # A text that changes is followed.
    for _ in range(1000):
        estimate.observe("kind", luck.random() < 1 - rate)
    assert estimate.rate("kind", prior=0.3) == pytest.approx(1 - rate, abs=0.1)


def candidates(estimate, *tables, depth=9, floor=0.0):
    """What tables of sources offer: (token, kind, prior) behind paths of tokens, the first table first."""
    found = CandidateTree(TokenTree(1), depth, floor, estimate)
    for name, table in tables:
        nodes = {(): 0}
        for path, offers in table.items():
            for token, kind, prior in offers if path in nodes else ():
                node = found.offer(nodes[path], token, (name, kind), prior)
                if node is not None:
                    nodes[*path, token] = node
    return found


def chances(found):
    """By the tokens on the way to each node."""
    tree = found.tree
    return {
        tuple(tree.tokens[at] for at in tree.path(node)[1:]): pytest.approx(found.chances[node])
        for node in range(1, len(tree))
    }


def test_a_token_that_two_sources_offer_is_one_node_as_likely_as_the_surer_says():
    estimate = AcceptanceEstimate()
    first = "first", {(): [(5, "a", 0.5), (6, "a", 0.2)], (5,): [(7, "a", 0.5)], (6,): [(8, "a", 0.5)]}
    second = "second", {(): [(5, "b", 0.6), (9, "b", 0.1)], (5,): [(7, "b", 0.2)]}
    assert chances(candidates(estimate, first)) == {(5,): 0.5, (6,): 0.2, (5, 7): 0.25, (6, 8): 0.1}
    both = {(5,): 0.6, (6,): 0.2, (9,): 0.1, (5, 7): 0.25, (6, 8): 0.1}
    assert chances(candidates(estimate, first, second)) == both
    # The text: each offer counts for its kind, whoever else has made it.
    for _ in range(400):
        candidates(estimate, first, second).observe(0, 5)
    found = chances(candidates(estimate, first, second))
    assert found[5,] == pytest.approx(0.5, abs=0.02)
    assert found[6,] == pytest.approx(0.5, abs=0.02)
    assert found[9,] == pytest.approx(0.5, abs=0.02)


def test_what_is_too_unlikely_to_be_a_node_is_observed_all_the_same():
    """Else a kind that was unlucky at first would never be drafted again."""
    estimate, table = AcceptanceEstimate(), ("source", {(): [(5, "a", 0.01)]})
    assert chances(candidates(estimate, table, floor=0.05)) == {}
    for _ in range(20):
        candidates(estimate, table, floor=0.05).observe(0, 5)
    assert candidates(estimate, table, floor=0.05).chances[1] > 0.8


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_nodes_are_a_tree_however_many_are_kept(seed):
    """Whatever two sources offer where, and whatever was learnt of it, certainties and ties among it."""
    luck, estimate = random.Random(seed), AcceptanceEstimate()
    tables = []
    for name in ("first", "second"):
        table, places = {}, [()]
        while places and len(table) < 25:
            place = places.pop(0)
            tokens = luck.sample(range(5), luck.randrange(4))
            table[place] = [
                (token, luck.randrange(3), luck.choice((0.05, 0.5, 1.0, luck.random()))) for token in tokens
            ]
            places += [(*place, token) for token in tokens]
        tables.append((name, table))
    for _ in range(30):
        found = candidates(estimate, *tables)
        for node in range(len(found.tree)):
            found.observe(node, luck.randrange(5))
    whole = candidates(estimate, *tables, depth=4)
    known = chances(whole)
    assert max(whole.tree.depths) <= 4
    for size in range(1, len(whole.tree) + 1):
        found = candidates(estimate, *tables, depth=4)
        kept = found.likeliest()[:size]
        tree = found.tree
        tree.select(kept)
        assert len(tree) == size
        assert kept[0] == 0
        for node in range(1, size):
            assert tree.parents[node] < node
            assert tree.depths[node] == len(tree.path(node)) - 1
            assert tree.child(tree.parents[node], tree.tokens[node]) == node
            assert known[tuple(tree.tokens[at] for at in tree.path(node)[1:])] == found.chances[kept[node]]
        dropped = [found.chances[node] for node in range(len(found.chances)) if node not in kept]
        assert min(found.chances[node] for node in kept) >= max(dropped, default=0.0)


def first_chance(drafter):
    """Of the first candidate, in a list; empty without any."""
    return drafter._candidates.chances[1:2]


def watched(monkeypatch, name, note):
    method = getattr(Auto, name)

    def noted(drafter, *args):
        result = method(drafter, *args)
        note(drafter, args, result)
        return result

    monkeypatch.setattr(Auto, name, noted)


@pytest.mark.parametrize(
    ("method", "sampling"),
    some(
        product(("auto", "suffix", "tokenswift"), (PENALISED, GREEDY)),
        [("auto", PENALISED), ("auto", GREEDY), ("suffix", PENALISED), ("tokenswift", GREEDY)],
    ),
)
def test_no_clock_changes_the_text(model, prompt, monkeypatch, method, sampling):
    dec, options = Decoder(model, heads=random_heads(model, kind="gated")), TokenSwiftOptions(budget=24, sink=4)
    plain = dec.generate(prompt, 60, "ar", sampling).token_ids
    drafted, filled, filling = set(), [], HeadLevels.filling
    monkeypatch.setattr(HeadLevels, "filling", lambda *given: filled.append(1) or filling(*given))
    for seed in range(5):
        luck, clock = random.Random(f"{method} {sampling.seed} {seed}"), [0.0]

        def tick(luck=luck, clock=clock):
            clock[0] += luck.choice((1e-9, 1e-6, 1e-3, luck.expovariate(100)))
            return clock[0]

        monkeypatch.setattr("time.perf_counter", tick)
        dec.verify_costs._tables.clear(), dec.verify_costs._seconds.clear()
        out = dec.generate(prompt, 60, method, sampling, options)
        assert out.token_ids == plain
        drafted.add((out.stats.nodes, len(filled)))
        filled.clear()
    assert len(drafted) > 1, "the clocks were to make a difference"


def test_longer_suffixes_are_believed_more(model, monkeypatch):
    clocked(monkeypatch, 0.0)
    believed = []
    watched(monkeypatch, "_offer_before_levels", lambda drafter, *_: believed[-1].append(first_chance(drafter)))
    for length in (1, 2, 8, 30):
        believed.append([])
        text = [*range(10, 10 + length)]
        Decoder(model).generate([*text, 7, 8, 9, *text], 16, "suffix")
    first = [chances[0][0] for chances in believed]
    assert first == sorted(first)
    assert first[0] == pytest.approx(0.5)
    assert 0.8 < first[-1] < 1


def test_heads_are_not_run_where_the_suffix_gives_enough(model, monkeypatch):
    """A token that is hard to draft is worth a level of heads, however fast the text goes elsewhere."""
    clocked(monkeypatch, 0.01)
    monkeypatch.setattr(LevelPolicy, "tokens", lambda policy, first, levels: 0.5 * levels)
    monkeypatch.setattr(LevelPolicy, "seconds", lambda policy, levels: 1.0 + 0.3 * levels)
    monkeypatch.setattr(LevelPolicy, "observe", lambda *args: None)
    runs = []

    def note(drafter, args, wanted):
        depth = args[-1]  # none is left for the last token
        if depth:
            runs.append((before[-1], wanted is not None and wanted.count))

    before = []
    watched(monkeypatch, "_offer_before_levels", lambda drafter, *_: before.append(first_chance(drafter)))
    watched(monkeypatch, "wants_levels", note)
    dec = Decoder(model, heads=random_heads(model))
    dec.generate([1, 2, 3, 4] * 30, 400, "auto", replace(GREEDY, repetition_penalty=0.01))
    likely = [levels for chance, levels in runs if chance and chance[0] > 0.9]
    assert len(likely) > 5 and not any(likely)
    runs.clear()
    dec.generate([1, 2, 3, 4] * 30 + [9, 8, 7], 200, "auto", SamplingParams(temperature=3.0, seed=1))
    hard = [levels for chance, levels in runs[2:] if not chance]
    assert len(hard) > 5 and all(hard)


def test_steps_that_need_no_heads_are_left_out_of_what_numbers_of_levels_are_compared_by(model, monkeypatch):
    """Also while none is run: else a text's loops would speak against heads elsewhere."""
    clocked(monkeypatch, 0.01)
    monkeypatch.setattr(LevelPolicy, "tokens", lambda policy, first, levels: 0.5 * levels)
    monkeypatch.setattr(LevelPolicy, "seconds", lambda policy, levels: 1.0 + 0.3 * levels)
    observed, typical = [], []
    monkeypatch.setattr(LevelPolicy, "observe", lambda policy, *args: observed.append(policy))
    watched(monkeypatch, "commit", lambda drafter, *_: typical.append(drafter._typical))
    for levels in (0, 1):
        monkeypatch.setattr(
            LevelPolicy, "levels", property(lambda policy, levels=levels: levels, lambda *_: None), False
        )
        dec = Decoder(model, heads=random_heads(model))
        dec.generate([1, 2, 3, 4] * 30, 200, "auto", replace(GREEDY, repetition_penalty=0.01))
        covered = len(typical)
        assert len(observed) == sum(typical) < 0.5 * covered
        dec.generate([1, 2, 3, 4] * 30 + [9, 8, 7], 100, "auto", SamplingParams(temperature=3.0, seed=1))
        assert len(observed) == sum(typical) > 0.5 * (len(typical) - covered)
        observed.clear()
        typical.clear()


def test_a_step_that_can_run_no_levels_speaks_for_no_number(model, monkeypatch):
    """The first step has no state for heads to begin with, and behind the last token nothing is drafted."""
    clocked(monkeypatch, 0.01)
    monkeypatch.setattr(LevelPolicy, "levels", property(lambda policy: 1, lambda *_: None), False)
    monkeypatch.setattr(CostTuned, "_levels_pay", lambda drafter: True)
    told, wanted = [], []
    monkeypatch.setattr(LevelPolicy, "observe", lambda policy, expected, *rest: told.append(len(expected)))
    watched(monkeypatch, "wants_levels", lambda drafter, args, levels: wanted.append((args[-1], levels)))
    dec = Decoder(model, heads=random_heads(model))
    prompts = [[1, 2, 3], [4, 5]]
    outs = dec.generate_batch(prompts, 40, "auto", [SamplingParams(seed=seed) for seed in (1, 2)])
    assert set(told) == {2}
    # Each text tells of its own.
    assert max(out.stats.steps for out in outs) < len(told) < sum(out.stats.steps for out in outs)
    assert any(not depth for depth, _ in wanted)
    assert all(levels is None for depth, levels in wanted if not depth)


def test_what_one_text_teaches_serves_the_next_with_the_same_sampling(model, prompt):
    dec = Decoder(model, heads=random_heads(model))
    sampling = SamplingParams(seed=3)
    plain = [dec.generate(prompt, 80, "ar", replace(sampling, seed=seed)).token_ids for seed in (3, 4)]
    assert dec.generate(prompt, 80, "auto", sampling).token_ids == plain[0]
    (first,) = (state for (method, *_), state in dec._tuning_states.items() if method == "auto")
    estimate, policy = first["acceptance"], first["levels", "heads", 3, False, 1]
    assert estimate._seen and policy.steps
    steps = policy.steps
    assert dec.generate(prompt, 80, "auto", replace(sampling, seed=4)).token_ids == plain[1]
    assert first["acceptance"] is estimate and first["levels", "heads", 3, False, 1] is policy
    assert policy.steps > steps
    # Another temperature, another way of drafting: another text altogether.
    dec.generate(prompt, 80, "auto", replace(sampling, temperature=0.5))
    dec.generate(prompt, 80, "auto", sampling, TokenSwiftOptions(coupled=False))
    known = [state["acceptance"] for (method, *_), state in dec._tuning_states.items() if method == "auto"]
    assert len(known) == len({id(one) for one in known}) == 3


def test_the_settings_used_last_are_remembered(model, prompt):
    dec = Decoder(model)
    often, settings = SamplingParams(), [SamplingParams(temperature=1 + n / 100) for n in range(1, 41)]
    for sampling in settings:
        for one in (often, sampling):
            dec.generate(prompt, 16, "suffix", one)
    assert 20 < len(dec._tuning_states) < 40
    temperatures = {sampling.temperature for _, sampling, *_ in dec._tuning_states}
    assert {often.temperature, settings[-1].temperature} < temperatures
    assert settings[0].temperature not in temperatures


def test_drafts_that_were_never_right_are_not_tried_again_text_after_text(model, monkeypatch):
    clocked(monkeypatch, 0.2)
    dec = Decoder(model, heads=random_heads(model))
    prompt = random_tokens(40, 3)
    # Heads that know neither the model nor its noise.
    asked = {"method": "auto", "options": TokenSwiftOptions(coupled=False)}
    drafted = []
    for seed in range(8):
        out = dec.generate(prompt, 60, sampling=SamplingParams(temperature=5.0, seed=seed), **asked)
        drafted.append(out.stats.drafted)
    assert drafted[0] >= 5
    # One in fifty tokens: a token drawn right by luck may be believed once more.
    assert sum(drafted[-4:]) <= 4 * 60 // 50


def test_acceptance_is_learnt_where_the_text_went(model, monkeypatch):
    """Nodes are numbered anew once they are chosen; what was offered behind each goes with it."""
    clocked(monkeypatch, 0.02)
    offered, observed, expected, reordered = {}, [], [], []
    likeliest, commit, observe = CandidateTree.likeliest, CostTuned.commit, AcceptanceEstimate.observe

    def noted(found):
        offered.clear()
        for node, offers in enumerate(found._offers):
            offered[tuple(found.tree.tokens[at] for at in found.tree.path(node)[1:])] = list(offers)
        return likeliest(found)

    def checked(drafter, cache, verification, path, tokens):
        observed.clear()
        commit(drafter, cache, verification, path, tokens)
        expected.clear()
        for depth, token in enumerate(tokens):
            expected.extend((kind, right == token) for kind, right in offered[tuple(tokens[:depth])])
        assert observed == expected
        reordered.append(drafter._chosen != sorted(drafter._chosen))

    monkeypatch.setattr(CandidateTree, "likeliest", noted)
    monkeypatch.setattr(CostTuned, "commit", checked)
    monkeypatch.setattr(
        AcceptanceEstimate,
        "observe",
        lambda estimate, kind, right: (observed.append((kind, right)), observe(estimate, kind, right)),
    )
    dec = Decoder(model, heads=random_heads(model))
    dec.generate([1, 2, 3, 4, 5] * 12, 80, "auto", SamplingParams(seed=1))
    assert sum(reordered) > 5


def test_what_fewer_levels_would_have_brought_is_told_by_the_same_step(model, monkeypatch):
    """By the candidates that came without the others, the suffix's among them."""
    clocked(monkeypatch, 0.01)
    monkeypatch.setattr(LevelPolicy, "tokens", lambda policy, first, levels: 99.0)
    numbers = []

    def checked(drafter, cache, sampler, depth, propose=CostTuned.propose):
        levels = drafter._ahead
        tree = propose(drafter, cache, sampler, depth)
        found, whole = drafter._expected, (drafter._candidates, drafter._tree)
        for count, expected in enumerate(found):
            drafter._tree = TokenTree(tree.tokens[0])
            drafter._candidates = CandidateTree(drafter._tree, depth, whole[0]._floor, drafter._estimate)
            drafter._offer_before_levels()
            nodes = [0]
            for number in range(count):
                nodes = drafter._offer_level(number, levels[number], nodes)
            rates = [
                sum(sorted(drafter._candidates.chances, reverse=True)[:size]) / drafter._costs[size]
                for size in range(1, 1 + min(64, len(drafter._tree)))
            ]
            rate = max(rates)
            assert expected.tokens / expected.cost == pytest.approx(rate)
        drafter._candidates, drafter._tree = whole
        assert [one.tokens for one in found] == sorted(one.tokens for one in found)
        numbers.append(len(found))
        return tree

    monkeypatch.setattr(CostTuned, "propose", checked)
    dec = Decoder(model, heads=random_heads(model))
    plain = dec.generate([1, 2, 3, 4] * 30, 150, "ar", replace(GREEDY, repetition_penalty=0.01)).token_ids
    out = dec.generate([1, 2, 3, 4] * 30, 150, "auto", replace(GREEDY, repetition_penalty=0.01))
    assert out.token_ids == plain
    assert max(numbers) >= 2


def test_the_time_that_costs_are_measured_in_counts_for_no_number_of_levels(model, monkeypatch):
    """They are measured again, within a step, where the text has become twice as long."""
    now, told = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def measured(costs, cache, texts=1):
        now[0] += 100.0
        return [0.0, *(1.0 + 0.01 * node for node in range(64))]

    monkeypatch.setattr(VerifyCosts, "at", measured)
    monkeypatch.setattr(LevelPolicy, "observe", lambda policy, expected, cost, drafting, *rest: told.append(drafting))
    dec = Decoder(model, heads=random_heads(model))
    dec.generate([1, 2, 3], 80, "auto", SamplingParams(seed=1))
    assert now[0] >= 300.0  # at the start, and in steps
    assert told and max(told) < 1.0


def test_costs_measured_in_a_slow_moment_are_made_up_for(model, monkeypatch):
    """Steps then seem to take less than their verification, and the policy knows by how much."""
    monkeypatch.setattr(VerifyCosts, "at", lambda costs, cache, texts=1: [0.0, *(9.0 + 0.1 * n for n in range(64))])
    dec = Decoder(model, heads=random_heads(model))
    dec.generate([1, 2, 3], 250, "auto", SamplingParams(seed=1))
    [state] = dec._tuning_states.values()
    policy = state["levels", "heads", 3, False, 1]
    assert policy.steps > 100
    for levels in (0, 1):
        assert 0.0 < policy.seconds(levels) < 1.5


def test_trees_shrink_beside_other_texts(model, monkeypatch):
    """Where a node costs a text alone little, it costs one of many most of a step: fewer pay."""
    clocked(monkeypatch, 0.05)
    sizes = {1: [], 16: []}
    for texts, found in sizes.items():
        with pytest.MonkeyPatch.context() as patch:
            propose = CostTuned.propose

            def noted(drafter, *args, texts=texts, found=found, propose=propose):
                object.__setattr__(drafter.context, "running", lambda: texts)
                found.append(len(propose(drafter, *args)))
                return drafter._tree

            patch.setattr(CostTuned, "propose", noted)
            dec = Decoder(model, heads=random_heads(model))
            out = dec.generate([1, 2, 3, 4] * 30, 60, "auto", SamplingParams(temperature=1.5, seed=1))
            assert len(out.token_ids) == 60
    mean = {texts: sum(found) / len(found) for texts, found in sizes.items()}
    assert mean[16] < 0.7 * mean[1]


def test_heads_that_look_at_no_tokens_are_run_at_once_and_no_more_than_there_are(model, monkeypatch):
    counts, filling = [], HeadLevels.filling

    def counted(heads, state, sampler, context, count, own_level):
        counts.append(count)
        return filling(heads, state, sampler, context, count, own_level)

    monkeypatch.setattr(HeadLevels, "filling", counted)
    clocked(monkeypatch, 0.0)
    dec = Decoder(model, heads=random_heads(model, num_heads=2))
    dec.generate([1, 2, 3], 300, "auto", SamplingParams(seed=2))
    assert set(counts) == {1, 2}


def tokenswift_clocked(monkeypatch, pass_seconds):
    """Whether each step has made a draft pass, which takes ``pass_seconds`` of the number of steps so far."""
    now, forward, draft, made = [0.0], Target.forward, Target.draft, []
    table = [0.0, *(1.0 + 0.3 * nodes for nodes in range(64))]

    def timed_forward(target, trees, *args, **named):
        now[0] += table[sum(map(len, trees))]
        made.append(False)
        return forward(target, trees, *args, **named)

    def timed_draft(*args):
        now[0] += pass_seconds(len(made))
        made[-1] = True  # of the step before: good enough to count by
        return draft(*args)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(VerifyCosts, "_measure", finding(table))
    monkeypatch.setattr(Target, "forward", timed_forward)
    monkeypatch.setattr(Target, "draft", timed_draft)
    return made


# Nearly the whole text, so that what the draft pass predicts is nearly always right.
NEARLY_ALL = TokenSwiftOptions(budget=480, sink=4)
LONG = [1, 2, 3] * 161
CONFIDENT = SamplingParams(temperature=0.1, repetition_penalty=1.5, penalty_window=32)


def test_with_a_draft_pass_or_without_whichever_is_faster_is_run_and_the_other_tried_again(model, monkeypatch):
    """Half way the draft pass becomes dear; without it steps are then the faster ones."""
    monkeypatch.setattr("decoder.drafters.tokenswift._TURNS", 4)
    made = tokenswift_clocked(monkeypatch, lambda steps: 0.2 if steps < 600 else 5.0)
    dec = Decoder(model, heads=random_heads(model, num_heads=2))
    while len(made) < 1400:
        dec.generate(LONG, 200, "tokenswift", CONFIDENT, NEARLY_ALL)
    # The first turn is made without it, the second with it; some steps tell nothing and are part of no turn.
    assert sum(made[:60]) == 0 and sum(made[80:120]) > 30
    assert sum(made[350:512]) > 0.6 * 162
    assert sum(made[1100:1400]) < 0.2 * 300 and any(made[1100:1400])


@pytest.mark.parametrize("pass_seconds, pays", [(0.02, True), (5.0, False)])
def test_tokenswift_makes_its_draft_pass_only_where_it_pays(model, monkeypatch, pass_seconds, pays):
    """It drafts the model's own next token, nearly always the right one; random heads hardly ever are."""
    made = tokenswift_clocked(monkeypatch, lambda steps: pass_seconds)
    dec = Decoder(model, heads=random_heads(model, num_heads=2))
    out = dec.generate(LONG, 300, "tokenswift", CONFIDENT, NEARLY_ALL)
    passes = sum(made)
    assert out.token_ids == dec.generate(LONG, 300, "ar", CONFIDENT).token_ids
    if pays:
        # Of the steps behind the first turn, which is made without it.
        assert passes > 0.5 * (out.stats.steps - 64)
    else:
        # No longer than it takes to know their time.
        assert 0 < passes <= 8


@pytest.mark.parametrize("true", [0.05, 0.15])
def test_what_nodes_cost_in_steps_corrects_what_was_measured(model, monkeypatch, true):
    now, forward, factors, nodes = [0.0], Target.forward, [], []
    learn = CostTuned._learn_slope

    def timed_forward(target, trees, *args, **named):
        now[0] += 1.0 + true * (len(trees[0]) - 1)
        return forward(target, trees, *args, **named)

    def learnt(drafter, *given):
        learn(drafter, *given)
        factors.append(drafter._slope.factor)
        nodes.append(len(drafter._tree))

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(VerifyCosts, "_measure", finding([0.0, *(1.0 + 0.05 * n for n in range(64))]))
    monkeypatch.setattr(Target, "forward", timed_forward)
    monkeypatch.setattr(CostTuned, "_learn_slope", learnt)
    dec, sampling = Decoder(model), SamplingParams(temperature=0.3, seed=1)
    out = dec.generate([1, 2, 3] * 30, 300, "suffix", sampling)
    assert out.token_ids == dec.generate([1, 2, 3] * 30, 300, "ar", sampling).token_ids
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(true / 0.05, rel=0.25)
    assert len(set(nodes)) > 3


@pytest.mark.parametrize(
    "method, budget",
    [("tokenswift", 24), ("tokenswift", 4096), ("auto", 24), ("medusa", 24), ("eagle3", 24), ("suffix", 24)],
)
def test_behind_each_step_sources_have_taken_in_all_tokens(dec, prompt, monkeypatch, method, budget):
    clocked(monkeypatch, 0.0)
    monkeypatch.setattr("decoder.drafters.tokenswift._TURN", 8)
    current, commit = [], CostTuned.commit

    def checked(drafter, cache, verification, path, tokens):
        commit(drafter, cache, verification, path, tokens)
        grams, partial = getattr(drafter, "grams", None), getattr(drafter, "draft_pass", None)
        if grams is not None and cache.length > budget:
            # Brought up to date behind steps that asked for it, for a draft pass in the next one.
            assert drafter._current == bool(drafter.observed_queries)
            assert not drafter._current or partial.partial._seen == cache.length
            current.append(drafter._current)
        heads = drafter._sources[0] if drafter._sources else None
        if isinstance(heads, LayerLevels):
            assert heads.text.entries + heads.text.pending == cache.length
        elif heads is not None:
            assert torch.equal(heads.state[0], verification.hidden[path[-1]])
        if isinstance(drafter, Auto):
            assert len(drafter.index.text) == cache.length + 1

    monkeypatch.setattr(CostTuned, "commit", checked)
    sampling, options = SamplingParams(seed=2, temperature=0.8), TokenSwiftOptions(budget=budget, sink=4)
    out = dec.generate(prompt, 120, method, sampling, options)
    assert out.token_ids == dec.generate(prompt, 120, "ar", sampling).token_ids
    assert out.stats.accepted > 0 and out.stats.steps > 20
    if method == "tokenswift" and budget < 120:
        assert any(current) and not all(current)
