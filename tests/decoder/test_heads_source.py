"""What cost-tuned trees grow from: levels of heads run for several nodes at once, and the bookkeeping of hopes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.drafters.tuning.heads_source import HeadsSource
from decoder.drafters.tuning.level_worth import LevelWorth
from decoder.drafters.tuning.odds import Calibration, Odds
from decoder.drafters.tuning.running_costs import RunningCosts
from decoder.drafters.tuning.ways import Ways
from decoder.model.target import Target, Verification
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler

from .conftest import VOCAB, random_heads
from .test_walk import HostReads

CPU = torch.device("cpu")
SAMPLING = SamplingParams(seed=3, min_p=0.01, repetition_penalty=1.3)


@pytest.mark.parametrize("kind", ["chained", "independent", "conditioned", "gated"])
def test_levels_for_many_nodes_are_those_of_each_node_alone(model, kind):
    """Conditioned heads draft behind each node from its own token; deeper than they go, the last one is run again."""
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    heads, levels, seconds = dec.heads[kind], 0, 0
    for seed in range(8):
        sampler = Sampler(replace(SAMPLING, seed=seed), VOCAB, CPU, [5, 6, 7])
        source = HeadsSource(dec.target, heads, coupled=True, odds=Odds(), learnt={})
        hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        source.commit(Verification(hidden, torch.empty(0), {}), path=[0, 2], tokens=[6, 7])
        with torch.inference_mode():
            place, states = source.root(sampler, rate=lambda: 0.0, node_seconds=0.0, levels=8), {(): hidden[2]}
            while place is not None:
                offers, path = source.offers(place), list(place)
                depth = len(path)
                before = states[tuple(path)]
                index = min(depth, 2)
                embedding = dec.target.embed(path[-1] if path else 7) if heads.conditioned else None
                state, normalised = heads.advance(index, hidden[2] if kind == "independent" else before, embedding)
                scores = sampler.draft_scores(dec.target.head(normalised[None]), True, sampler.draft_context(path))[0]
                best = zip(*(found.tolist() for found in scores.topk(6)), strict=True)
                assert [offer.token for offer in offers] == [token for score, token in best if score > scores.max() - 4]
                states |= {tuple(offer.place): state for offer in offers}
                levels += 1
                # The second best of the first level, or else the best one that the next level goes on from.
                onward = [*offers[1:2], *offers] if not depth else offers if depth < 3 else []
                place = next((offer.place for offer in onward if source.offers(offer.place)), None)
                seconds += not depth and len(offers) > 1 and place == offers[1].place
    assert levels >= 24
    assert seconds > 1


def ended(sampler, drawn, count, node):
    """The draws of a walk that gave the first ``count`` of these tokens and came to ``node``."""
    window = Sampler(sampler.params, VOCAB, CPU, [*sampler.context, *drawn[:count]]).window.counts
    newest, added = torch.tensor([drawn[count - 1]]), torch.tensor([count])
    behind = DraftContext.behind_verification(sampler.draft_context(), added, len(drawn), newest, window)
    return SimpleNamespace(sampler=sampler, last_node=torch.tensor([node]), draft_context=behind)


@pytest.mark.parametrize("kind", ["chained", "independent", "conditioned", "gated"])
def test_levels_asked_for_ahead_are_those_asked_for_one_by_one(model, kind):
    """Behind an ending that the device alone knows: the same offers at the same places, with the same guesses."""
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    for seed in range(4):
        text, drawn, end = [5, 6, 7], [9, 2, 4, 8], 1 + seed % 3
        params = replace(SAMPLING, seed=seed)
        verification = Verification(torch.randn(4, 32, dtype=torch.float64), torch.empty(0), {})
        before, behind = (Sampler(params, VOCAB, CPU, tokens) for tokens in (text, text + drawn[:end]))
        offers, places = [], [()]
        with torch.inference_mode():
            sources = [HeadsSource(dec.target, dec.heads[kind], coupled=True, odds=Odds(), learnt={}) for _ in range(2)]
            sources[0].commit(verification, path=[0, 3], tokens=drawn[:end])
            ending = ended(before, drawn, end, node=3)
            read = sources[1].draft_ahead(verification, ending, levels=3)
            for token in drawn[:end]:
                before.push(token)
            read.receive(read.numbers.tolist())
            sources[1].commit(verification, path=[0, 3], tokens=drawn[:end])
            for source in sources:
                assert source.root(behind, rate=lambda: 0.0, node_seconds=0.0, levels=3) == ()
            while places:
                place = places.pop()
                found = [source.offers(place) for source in sources]
                assert found[0] == found[1]
                offers += found[0]
                places += [offer.place for offer in found[0]]
            with HostReads() as counter:
                sources[1].offers(())
        assert counter.reads == 0
        assert max(len(offer.place) for offer in offers) == 3
        # An answer is for the step it was asked for.
        behind.push(1)
        sources[1].root(behind, rate=lambda: 0.0, node_seconds=0.0, levels=3)
        with torch.inference_mode(), HostReads() as counter:
            sources[1].offers(())
        assert counter.reads == 1


def test_branch_scores_are_the_draft_scores_of_each_path():
    sampler = Sampler(SAMPLING, 200, CPU, [9, 9, 4])
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 3
    paths = [(1, 2), (1, 5), (7, 9)]
    actual = sampler.branch_scores(logits, True, sampler.draft_context(), torch.tensor(paths))
    expected = [
        sampler.draft_scores(row[None], True, sampler.draft_context(path))[0]
        for row, path in zip(logits, paths, strict=True)
    ]
    torch.testing.assert_close(actual.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_hopes_are_corrected_by_what_came():
    calibration = Calibration()
    assert calibration.corrected(2.0) == 2.0
    for _ in range(500):
        calibration.observe(hope=0.8, came=0.4)
    assert calibration.corrected(2.0) == pytest.approx(1.2, abs=0.1)
    for _ in range(500):
        calibration.observe(hope=0.8, came=1.0)
    assert calibration.corrected(0.8) == pytest.approx(0.96, abs=0.05)


@pytest.mark.parametrize("native", [True, False])
def test_heads_saved_in_bfloat16_stay_so_on_a_cpu_that_multiplies_it(model, prompt, tmp_path, native, monkeypatch):
    monkeypatch.setattr("decoder.decoder.fast_bfloat16", lambda device: native)
    random_heads(model, kind="gated").bfloat16().save_pretrained(tmp_path)
    model = type(model)(model.config).eval()
    dec = Decoder(model, heads=tmp_path)
    assert {p.dtype for p in dec.heads["gated"].parameters()} == {torch.bfloat16 if native else torch.float32}
    sampling = SamplingParams(seed=1)
    tokens = [dec.generate(prompt, 40, method, sampling, ignore_eos=True).token_ids for method in ("ar", "auto")]
    assert tokens[0] == tokens[1]


def test_a_disturbed_level_does_not_switch_the_heads_off(model):
    source = HeadsSource(Decoder(model).target, random_heads(model), coupled=True, odds=Odds(), learnt={})
    for seconds in (50.0, 1.0, 1.0):
        source.worth.took(0, seconds)
    assert source.worth.seconds(0) < 1.5
    source.worth.took(0, 1000.0)
    assert source.worth.seconds(0) < 1.6
    assert source.worth.seconds(1) == source.worth.seconds(0), "as long as the one above, until it is timed"
    source.worth.took(1, 3.0)
    assert source.worth.seconds(2) == source.worth.seconds(1) == 3.0


def look(source, sampler, levels):
    verification = Verification(torch.ones(1, 32, dtype=torch.float64), torch.empty(0), {})
    return source.draft_ahead(verification, ended(sampler, [7], 1, node=0), levels)


def test_looking_ahead_is_timed_now_and_then(model):
    """Not the first time, and a single stall must not make levels look so dear that none are ever run again."""
    dec = Decoder(model, heads=random_heads(model, kind="gated"))
    source = HeadsSource(dec.target, dec.heads["gated"], coupled=True, odds=Odds(), learnt={})
    clock, waits, runs = [0.0], [], []
    advance, sampler = dec.heads["gated"].advance, Sampler(SAMPLING, VOCAB, CPU, [5, 6])

    def slowly(*args):
        runs.append(source._looked)
        # The first look prepares much, and the first level of the second one is disturbed.
        clock[0] += 5.0 if len(runs) <= 3 else 1e-3
        return advance(*args)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("decoder.drafters.tuning.heads_source.time.perf_counter", lambda: clock[0])
        patch.setattr(dec.target, "wait", lambda: waits.append(source._looked))
        patch.setattr(dec.heads["gated"], "advance", slowly)
        for _ in range(2):
            look(source, sampler, levels=2)
        assert max(source.worth.seconds(0), source.worth.seconds(1)) < 4e-3
        for _ in range(65):
            look(source, sampler, levels=2)
    assert sorted(set(waits)) == [2, 3, 66, 67]
    assert source.worth.seconds(1) == pytest.approx(1e-3, rel=0.3)
    assert source.looking_seconds == pytest.approx(2e-3, rel=0.4)


def test_levels_that_do_not_pay_are_not_looked_ahead_for_but_now_and_then(model):
    """Whether one pays tells the usual chance to come to it, learnt from what was told; at first all are tried."""
    dec = Decoder(model, heads=random_heads(model, kind="gated"))
    source, sampler = HeadsSource(dec.target, dec.heads["gated"], coupled=True, odds=Odds(), learnt={}), None
    levels = []
    with torch.inference_mode():
        for step in range(200):
            sampler = Sampler(SAMPLING, VOCAB, CPU, [5] * (step + 1))
            read = look(source, sampler, levels=4)
            levels.append(0 if read is None else len(read.numbers) // 12)
            if read is not None:
                read.receive(read.numbers.tolist())
            source.commit(Verification(torch.ones(1, 32, dtype=torch.float64), torch.empty(0), {}), [0], [1])
            # In this test a level costs half a token.
            source.worth.seconds = lambda depth: 0.5
            source.root(sampler, rate=lambda: 1.0, node_seconds=0.0, levels=4)
    # Score and token of 6 candidates, or of four rows of them and where these stood: 12 numbers, then 52 a level.
    assert levels[0] == (12 + 3 * 52) // 12
    tried = [step for step, count in enumerate(levels) if count]
    assert 3 < len(tried) < 40
    assert levels[-60:].count(0) >= 55
    assert any(levels[-70:])


@pytest.mark.parametrize("kind", ["conditioned", "gated"])
def test_a_level_goes_on_from_the_likeliest_branches(model, kind):
    """Likely by all of their tokens: the sums along a path of what its scores, with noise, come to as logarithms."""
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    different = 0
    for seed in range(6):
        sampler = Sampler(replace(SAMPLING, seed=seed), VOCAB, CPU, [5, 6, 7])
        source = HeadsSource(dec.target, dec.heads[kind], coupled=True, odds=Odds(), learnt={})
        hidden = torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        source.commit(Verification(hidden, torch.empty(0), {}), path=[0], tokens=[7])
        seen, original = [], sampler.branch_scores

        def watched(*args, seen=seen, original=original):
            seen.append((args[3].tolist(), original(*args)))
            return seen[-1][1]

        sampler.branch_scores = watched
        with torch.inference_mode():
            place = source.root(sampler, rate=lambda: 0.0, node_seconds=0.0, levels=3)
            while source.offers(place):
                place = source.offers(place)[0].place
        likely = {(): 0.0}
        for drafted, scores in seen:
            assert sorted(map(tuple, drafted)) == sorted(sorted(likely, key=likely.get)[-4:])
            best = scores.topk(6)
            logs, last = best.values.log_softmax(-1).tolist(), likely
            likely = {
                (*path, token): last[tuple(path)] + log
                for path, row, tokens in zip(drafted, logs, best.indices.tolist(), strict=True)
                for token, log in zip(tokens, row, strict=True)
            }
            alone = sorted(likely, key=lambda path, likely=likely, last=last: likely[path] - last[path[:-1]])[-4:]
            different += sorted(alone) != sorted(sorted(likely, key=likely.get)[-4:])
        assert len(seen) == 3
    # Another choice than by the last token alone.
    assert different > 3


def test_the_time_of_levels_looked_ahead_for_is_no_cost_of_verifying(model, prompt, monkeypatch):
    """It is the way's; an estimate of it never takes more than half of what a step took."""
    whole, verifying = [], []
    monkeypatch.setattr(Target, "draws_whole_trees", True)
    monkeypatch.setattr(LevelWorth, "pays", lambda worth, depth, price, chance=None: True)
    monkeypatch.setattr("decoder.drafters.tuning.tuned._LEVELS", (2, 2, 2))
    # Every step is looked ahead of: no tree is deep.
    monkeypatch.setattr("decoder.drafters.tuning.suffix_source._LONGEST_CHAIN", 0)
    dec = Decoder(model, heads=random_heads(model, kind="gated"))
    monkeypatch.setattr(Ways, "observe", lambda ways, way, tokens, seconds: whole.append(seconds))
    monkeypatch.setattr(RunningCosts, "observe", lambda costs, nodes, seconds: verifying.append(seconds))
    monkeypatch.setattr(LevelWorth, "took", lambda worth, depth, seconds: None)
    monkeypatch.setattr(LevelWorth, "seconds", lambda worth, depth: 10.0)
    dec.generate(prompt, 60, "auto", SAMPLING)
    # From the first estimate on, far too high here.
    assert all(0 < cost <= step / 2 for cost, step in list(zip(verifying, whole, strict=True))[4:])
