"""Cost-tuned trees: what their candidates are thought to be worth, and what one text teaches for the next."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.drafters.tuning.heads_source import HeadsSource
from decoder.drafters.tuning.level_worth import LevelWorth
from decoder.drafters.tuning.odds import Odds
from decoder.drafters.tuning.suffix_source import SuffixSource
from decoder.drafters.tuning.tuned import Offer, Tuned, _Candidates
from decoder.drafters.tuning.ways import Ways

from .conftest import VOCAB, random_heads

GREEDY = SamplingParams(temperature=0)


class Table:
    """A source that offers what a table says: places are paths of tokens."""

    def __init__(self, name, table):
        self.name, self.table = name, table

    def offers(self, place):
        return [
            Offer(token, (self.name, kind), guess, (*place, token)) for token, kind, guess in self.table.get(place, ())
        ]


def candidates(odds, *sources, depth=9, floor=0.0):
    found = _Candidates(root=1, depth=depth, odds=odds)
    for source in sources:
        found.grow(source, (), floor)
    return found


def chances(found):
    """By the tokens on the way to each node."""
    tree = found.tree
    return {
        tuple(tree.tokens[at] for at in tree.path(node)[1:]): pytest.approx(found.chances[node])
        for node in range(1, len(tree))
    }


def test_a_token_that_two_sources_offer_is_one_node_and_has_odds_of_its_own():
    odds = Odds()
    first = Table("first", {(): [(5, "a", 0.5), (6, "a", 0.2)], (5,): [(7, "a", 0.5)], (6,): [(8, "a", 0.5)]})
    second = Table("second", {(): [(5, "b", 0.6), (9, "b", 0.1)]})
    assert chances(candidates(odds, first)) == {(5,): 0.5, (6,): 0.2, (5, 7): 0.25, (6, 8): 0.1}
    # What both offer is as likely as the second says, what the first alone offers less, and what lies behind it too.
    assert chances(candidates(odds, first, second)) == {
        (5,): 0.6,
        (6,): 0.3 * 0.2,
        (9,): 0.1,
        (5, 7): 0.3,
        (6, 8): 0.3 * 0.1,
    }
    # The text: where both offer a token it is always right, and where the first one is alone it never is.
    for _ in range(400):
        for kind, token in candidates(odds, first, second).offered[0]:
            odds.observe(kind, token == 5)
    found = chances(candidates(odds, first, second))
    assert found[5,] == pytest.approx(1.0, abs=0.02)
    assert found[6,] == pytest.approx(0.0, abs=0.01)
    # The first source by itself is right with one of its two.
    assert chances(candidates(odds, first))[5,] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_nodes_are_a_tree_however_many_are_kept(seed):
    """Whatever two sources offer where, and whatever was learnt of it, certainties and ties among it."""
    luck, odds = random.Random(seed), Odds()
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
        tables.append(Table(name, table))
    for _ in range(30):
        for node_offers in candidates(odds, *tables).offered.values():
            for kind, _ in node_offers:
                odds.observe(kind, luck.random() < 0.7)
    whole = candidates(odds, *tables, depth=4)
    known = chances(whole)
    assert max(whole.tree.depths) <= 4
    for size in range(1, len(whole.tree) + 1):
        found = candidates(odds, *tables, depth=4)
        kept = found.likeliest()[:size]
        tree = found.tree
        tree.keep(kept)
        assert len(tree) == size
        assert kept[0] == 0
        for node in range(1, size):
            assert tree.parents[node] < node
            assert tree.depths[node] == len(tree.path(node)) - 1
            assert tree.child(tree.parents[node], tree.tokens[node]) == node
            assert known[tuple(tree.tokens[at] for at in tree.path(node)[1:])] == found.chances[kept[node]]
        dropped = [found.chances[node] for node in range(len(found.chances)) if node not in kept]
        assert min(found.chances[node] for node in kept) >= max(dropped, default=0.0)


def test_a_long_suffix_is_believed_more_than_a_short_one():
    guesses = []
    for length in (1, 2, 8, 30):
        text = [*range(100, 100 + length)]
        source = SuffixSource([*text, 7, 8, 9, *text])
        place = source.root(None, None, 0.0, 0)
        guesses.append(source.offers(place)[0].guess)
    assert guesses == sorted(guesses)
    assert guesses[0] == pytest.approx(0.5)
    assert 0.8 < guesses[-1] < 1


def test_heads_are_weighed_against_what_their_own_step_gives_without_them(model, monkeypatch):
    """A token that is hard to draft is worth a plain step, however fast the text goes elsewhere."""
    ticks, rates = itertools.count(), []
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 1e-9)
    table = [0.0, *(1.0 + 0.1 * node for node in range(64))]
    monkeypatch.setattr("decoder.drafters.tuning.verify_costs.VerifyCosts._measure", lambda self, cache: table)
    monkeypatch.setattr("decoder.drafters.tuning.running_costs.RunningCosts.observe", lambda self, nodes, seconds: None)
    root = HeadsSource.root

    def watched(source, sampler, rate, *rest):
        lengths = [
            sum(sampler.context[-n:] == sampler.context[i : i + n] for i in range(len(sampler.context) - n))
            for n in (1, 30)
        ]
        rates.append((lengths, rate()))
        return root(source, sampler, rate, *rest)

    monkeypatch.setattr(HeadsSource, "root", watched)
    dec = Decoder(model, heads=random_heads(model))
    dec.generate([1, 2, 3, 4] * 30 + [9, 8, 7], 200, "auto", SamplingParams(temperature=3.0, seed=1))
    hard = [rate for (once, _), rate in rates if not once]
    assert hard and hard == pytest.approx([1 / table[1]] * len(hard), rel=1e-3)
    rates.clear()
    dec.generate([1, 2, 3, 4] * 30, 100, "auto", replace(GREEDY, repetition_penalty=0.01))
    assert max(rate for _, rate in rates) > 2 / table[1]


def test_what_one_text_teaches_serves_the_next_with_the_same_sampling(model, prompt):
    dec = Decoder(model, heads=random_heads(model))
    sampling = SamplingParams(seed=3)
    plain = [dec.generate(prompt, 80, "ar", replace(sampling, seed=seed)).token_ids for seed in (3, 4)]
    assert dec.generate(prompt, 80, "auto", sampling).token_ids == plain[0]
    (first,) = (learnt for (method, *_), learnt in dec._learnt.items() if method == "auto")
    odds, ways = first["odds"], first["ways", 3]
    assert odds.chance(("heads", 0, 0, 0), 0.6) != 0.6
    assert dec.generate(prompt, 80, "auto", replace(sampling, seed=4)).token_ids == plain[1]
    assert first["odds"] is odds and first["ways", 3] is ways
    # Another temperature, another way of drafting: another text altogether.
    dec.generate(prompt, 80, "auto", replace(sampling, temperature=0.5))
    dec.generate(prompt, 80, "auto", sampling, TokenSwiftOptions(coupled=False))
    known = [learnt["odds"] for (method, *_), learnt in dec._learnt.items() if method == "auto"]
    assert len(known) == len({id(one) for one in known}) == 3


def test_the_settings_used_last_are_remembered(model, prompt):
    dec = Decoder(model)
    often, settings = SamplingParams(), [SamplingParams(temperature=1 + n / 100) for n in range(1, 60)]
    for sampling in settings:
        for one in (often, sampling):
            dec.generate(prompt, 1, "suffix", one)
    assert 20 < len(dec._learnt) < 40
    temperatures = {sampling.temperature for _, sampling, _ in dec._learnt}
    assert {often.temperature, settings[-1].temperature} < temperatures
    assert settings[0].temperature not in temperatures


def test_drafts_that_were_never_right_are_not_tried_again_text_after_text(model, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 1e-9)
    monkeypatch.setattr(
        "decoder.drafters.tuning.verify_costs.VerifyCosts._measure",
        lambda self, cache: [0.0, *(1.0 + 0.2 * n for n in range(64))],
    )
    monkeypatch.setattr("decoder.drafters.tuning.running_costs.RunningCosts.observe", lambda self, nodes, seconds: None)
    dec = Decoder(model, heads=random_heads(model))
    prompt = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    # Heads that know neither the model nor its noise.
    asked = {"method": "auto", "options": TokenSwiftOptions(coupled=False)}
    drafted = []
    for seed in range(8):
        out = dec.generate(prompt, 60, sampling=SamplingParams(temperature=5.0, seed=seed), **asked)
        drafted.append(out.stats.drafted)
    assert drafted[0] >= 5
    assert sum(drafted[-4:]) <= 1


def test_texts_of_a_few_steps_find_the_fastest_way_together():
    ways, taken = Ways(3), []
    for _ in range(200):
        ways.begin()
        for _ in range(5):
            taken.append(ways.now)
            ways.observe(ways.now, 1, (1.0, 1.3, 0.7)[ways.now])
    assert taken[-300:].count(2) > 220


def test_a_new_text_may_be_of_another_kind():
    """What was learnt is worth a trial: the way that is faster now is soon found."""
    ways = Ways(2)
    for _ in range(3000):
        ways.observe(ways.now, 1, (1.0, 1.5)[ways.now])
    ways.begin()
    taken = []
    for _ in range(300):
        taken.append(ways.now)
        ways.observe(ways.now, 1, (1.5, 1.0)[ways.now])
    assert taken[-100:].count(1) > 80


def test_a_level_is_worth_what_it_gave_where_the_text_came_to_it():
    worth = LevelWorth(3)
    for _ in range(300):
        worth.begin_step()
        worth.ran(0, onward=0.4)
        worth.observe(0, 1.0, right=True)
        worth.observe(1, 0.4, right=False)
    worth.begin_step()
    assert worth.pays(0, price=0.9)
    assert not worth.pays(0, price=1.1)
    worth.ran(1)
    assert not worth.pays(1, price=0.2), "it never went through"
    assert worth.pays(2, price=0.9), "nothing is known of it"
    # Where the level above is known to lead nowhere it does not pay either.
    assert not worth.pays(2, price=0.9, chance=0.1)


def test_a_level_that_does_not_pay_is_tried_again_now_and_then():
    worth, tried = LevelWorth(3), []
    for step in range(300):
        worth.begin_step()
        assert worth.pays(0, price=0.5)
        worth.ran(0)
        depth = 1
        while depth < 3 and worth.pays(depth, price=5.0):
            tried.append((step, depth))
            worth.ran(depth)
            depth += 1
    # One level more than pays, never two.
    assert 3 <= len(tried) <= 5
    assert {depth for _, depth in tried} == {1}


def clocked(monkeypatch, node_seconds):
    """Times of the test's own: 1 for a verification and ``node_seconds`` more for each node."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 1e-9)
    table = [0.0, *(1.0 + node_seconds * node for node in range(64))]
    monkeypatch.setattr("decoder.drafters.tuning.verify_costs.VerifyCosts._measure", lambda self, cache: table)
    monkeypatch.setattr("decoder.drafters.tuning.running_costs.RunningCosts.observe", lambda self, nodes, seconds: None)


def test_odds_are_learnt_where_the_text_went(model, monkeypatch):
    """Nodes are numbered anew once they are chosen; what was offered behind each goes with it."""
    clocked(monkeypatch, 0.02)
    offered, observed, reordered = {}, [], []
    likeliest, commit = _Candidates.likeliest, Tuned.commit

    def noted(found):
        offered.clear()
        for node, offers in found.offered.items():
            offered[tuple(found.tree.tokens[at] for at in found.tree.path(node))] = list(offers)
        return likeliest(found)

    def checked(tuned, cache, verification, path, tokens):
        observed.clear()
        commit(tuned, cache, verification, path, tokens)
        expected, way = [], tuned.context_before
        for token in tokens:
            expected += [(kind, right == token) for kind, right in offered.get(tuple(way), ())]
            way = [*way, token]
        assert observed == expected
        reordered.append(tuned._kept != sorted(tuned._kept))

    propose = Tuned.propose

    def proposed(tuned, cache, sampler, depth):
        tuned.context_before = [sampler.context[-1]]
        return propose(tuned, cache, sampler, depth)

    monkeypatch.setattr(_Candidates, "likeliest", noted)
    monkeypatch.setattr(Tuned, "commit", checked)
    monkeypatch.setattr(Tuned, "propose", proposed)
    dec = Decoder(model, heads=random_heads(model))
    monkeypatch.setattr(Odds, "observe", lambda odds, kind, right: observed.append((kind, right)))
    dec.generate([1, 2, 3, 4, 5] * 12, 80, "auto", SamplingParams(seed=1))
    assert sum(reordered) > 5


@pytest.mark.parametrize("repeats", [True, False])
def test_places_where_the_text_repeats_itself_say_nothing_about_ways(model, monkeypatch, repeats):
    clocked(monkeypatch, 0.0)
    told = []
    monkeypatch.setattr(Ways, "observe", lambda ways, way, tokens, seconds: told.append(way))
    dec = Decoder(model, heads=random_heads(model))
    sampling = replace(GREEDY, repetition_penalty=0.01) if repeats else SamplingParams(temperature=5.0)
    steps = dec.generate([1, 2, 3, 4] * 30, 150, "auto", sampling).stats.steps
    assert (len(told) < 0.7 * steps) is repeats


def test_a_small_tree_is_verified_now_and_then(model, monkeypatch):
    """Else what it costs would not be known where large ones pay."""
    clocked(monkeypatch, 0.0)
    sizes, propose = [], Tuned.propose

    def proposed(tuned, cache, sampler, depth):
        tree = propose(tuned, cache, sampler, depth)
        sizes.append(len(tree))
        return tree

    monkeypatch.setattr(Tuned, "propose", proposed)
    Decoder(model, heads=random_heads(model)).generate([1, 2, 3, 4] * 30, 600, "auto", SamplingParams(temperature=2.0))
    assert len(sizes) > 144
    assert sizes[47] <= 4 and sizes[95] == 1 and sizes[143] <= 2
    assert sum(size > 4 for size in sizes) > 0.5 * len(sizes)
