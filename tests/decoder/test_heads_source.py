"""What cost-tuned trees grow from: levels of heads run for several nodes at once, and the bookkeeping of hopes."""

from dataclasses import replace

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.acceptance import Ending
from decoder.drafters.heads_source import HeadsSource
from decoder.odds import Calibration, Odds
from decoder.sampler import Sampler
from decoder.target import Verification

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
        source = HeadsSource(dec.target, heads, coupled=True, odds=Odds())
        hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        source.commit(Verification(hidden, torch.empty(0), {}), path=[0, 2], tokens=[6, 7])
        with torch.inference_mode():
            place, states = source.root(sampler, rate=0.0, node_seconds=0.0, levels=8), {(): hidden[2]}
            while place is not None:
                offers, path = source.offers(place), list(place)
                depth = len(path)
                before = states[tuple(path)]
                index = min(depth, 2)
                embedding = dec.target.embed(path[-1] if path else 7) if heads.conditioned else None
                state, normalised = heads.advance(index, hidden[2] if kind == "independent" else before, embedding)
                scores = sampler.draft_scores(dec.target.head(normalised[None]), True, path)[0]
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
    """The ending of a walk that drew these tokens and came ``count`` nodes far, to ``node``."""
    children = [node] * (count - 1) + [0] * (len(drawn) - count + 1)
    return Ending(torch.tensor([children, drawn]).double(), sampler, node)


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
            sources = [HeadsSource(dec.target, dec.heads[kind], coupled=True, odds=Odds()) for _ in range(2)]
            sources[0].commit(verification, path=[0, 3], tokens=drawn[:end])
            ending = ended(before, drawn, end, node=3)
            question = sources[1].look_ahead(verification, before, ending, levels=3)
            for token in drawn[:end]:
                before.push(token)
            question.told(question.numbers.tolist())
            sources[1].commit(verification, path=[0, 3], tokens=drawn[:end])
            for source in sources:
                assert source.root(behind, rate=0.0, node_seconds=0.0, levels=3) == ()
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
        # An answer is for the text it was asked for.
        behind.push(1)
        sources[1].root(behind, rate=0.0, node_seconds=0.0, levels=3)
        with torch.inference_mode(), HostReads() as counter:
            sources[1].offers(())
        assert counter.reads == 1


def test_branch_scores_are_the_draft_scores_of_each_path():
    sampler = Sampler(SAMPLING, 200, CPU, [9, 9, 4])
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 3
    paths = [(1, 2), (1, 5), (7, 9)]
    actual = sampler.branch_scores(logits, True, sampler.ahead(), torch.tensor(paths))
    expected = [sampler.draft_scores(row[None], True, path)[0] for row, path in zip(logits, paths, strict=True)]
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
    source = HeadsSource(Decoder(model).target, random_heads(model), coupled=True, odds=Odds())
    for seconds in (50.0, 1.0, 1.0):
        source._took(seconds)
    assert source._seconds < 1.5
    source._took(1000.0)
    assert source._seconds < 1.6


def test_looking_ahead_is_timed_now_and_then_but_not_the_first_time(model):
    """What the first one prepares would make levels look so dear that none were ever run again."""
    dec = Decoder(model, heads=random_heads(model, kind="gated"))
    source, clock, waits = HeadsSource(dec.target, dec.heads["gated"], coupled=True, odds=Odds()), [0.0], []
    advance, sampler = dec.heads["gated"].advance, Sampler(SAMPLING, VOCAB, CPU, [5, 6])

    def slowly(*args):
        clock[0] += 1e-3 if clock[0] else 5.0
        return advance(*args)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr("decoder.drafters.heads_source.time.perf_counter", lambda: clock[0])
        patch.setattr(dec.target, "wait", lambda: waits.append(source._looked))
        patch.setattr(dec.heads["gated"], "advance", slowly)
        verification = Verification(torch.randn(1, 32, dtype=torch.float64), torch.empty(0), {})
        for _ in range(67):
            assert source.look_ahead(verification, sampler, ended(sampler, [7], 1, node=0), levels=2) is not None
    assert waits == [2, 2, 3, 3, 66, 66, 67, 67]
    assert source._seconds == pytest.approx(1e-3)
    assert source.looking_seconds == pytest.approx(2e-3)
