"""Levels of draft heads run for several branches at once."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.drafters.levels import HeadLevels, LevelsWanted, fill_together, ranked_tokens
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler

from .conftest import VOCAB, drafted_levels, random_heads
from .test_walk import HostReads

CPU = torch.device("cpu")
SAMPLING = SamplingParams(seed=3, min_p=0.01, repetition_penalty=1.3)
KINDS = ["chained", "independent", "medusa", "conditioned", "gated"]


def start(seed):
    sampler = Sampler(replace(SAMPLING, seed=seed), VOCAB, CPU, [5, 6, 7])
    return sampler, torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_levels_for_many_branches_are_those_of_each_branch_alone(model, kind):
    """Conditioned heads draft behind each branch from its own token; deeper than they go, the last one is run again."""
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    heads, deepest = dec.heads[kind], 5 if kind in ("conditioned", "gated") else 3
    for seed in range(4):
        sampler, hidden = start(seed)
        with torch.inference_mode():
            levels = drafted_levels(HeadLevels(dec.target, heads, True, width=6, beam=4), hidden, sampler, deepest)
            branches = [((), hidden[0])]
            for depth, level in enumerate(levels):
                behind = []
                for row, place in enumerate(level.parents or [0]):
                    path, before = branches[place]
                    embedding = dec.target.embed(path[-1] if path else 7) if heads.conditioned else None
                    before = before if heads.chained else hidden[0]
                    state, normalised = heads.advance(min(depth, 2), before, embedding)
                    # Heads that look at no tokens see the penalty window of the text alone.
                    context = sampler.draft_context(path if heads.conditioned else ())
                    logits = dec.target.head(normalised[None])
                    scores = sampler.processed(logits.double(), context.conditions(), None, sampler.draft_params)[0]
                    scores = scores + sampler.draft_context().noise(1, skip=depth)[0]
                    best = scores.topk(6)
                    assert [token for token, _ in level.rows[row]] == best.indices.tolist()
                    found = torch.tensor([score for _, score in level.rows[row]], dtype=torch.float64)
                    torch.testing.assert_close(found, best.values, rtol=1e-4, atol=1e-4)
                    behind += [((*path, token), state) for token, _ in level.rows[row]]
                branches = behind
        assert [len(level.rows) for level in levels] == ([1, 4, 4, 4, 4] if heads.conditioned else [1, 1, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beam", [1, 4])
def test_levels_drafted_ahead_are_those_drafted_afterwards(model, kind, beam):
    """Behind an ending that the device alone knows, with one read, which the engine makes."""
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    heads = HeadLevels(dec.target, dec.heads[kind], True, width=6, beam=beam)
    for seed in range(4):
        text, drawn, end = [5, 6, 7], [9, 2, 4, 8], 1 + seed % 3
        hidden = torch.randn(1, 32, dtype=torch.float64)
        before, behind = (
            Sampler(replace(SAMPLING, seed=seed), VOCAB, CPU, tokens) for tokens in (text, text + drawn[:end])
        )
        with torch.inference_mode():
            draws = ended(before, drawn, end)
            with HostReads() as counter:
                numbers = heads.ask(hidden, before, draws.draft_context, 3)
            assert counter.reads == 0
            with HostReads() as counter:
                expected = drafted_levels(heads, hidden, behind, 3)
            assert counter.reads == 1
        assert heads.read(numbers.tolist()) == expected
        assert len(expected) == 3


def ended(sampler, drawn, count):
    """The draws of a walk that gave the first ``count`` of these tokens."""
    window = Sampler(sampler.params, VOCAB, CPU, [*sampler.context, *drawn[:count]]).window.counts
    newest, added = torch.tensor([drawn[count - 1]]), torch.tensor([count])
    behind = DraftContext.behind_verification(sampler.draft_context(), added, len(drawn), newest, window)
    return SimpleNamespace(draft_context=behind)


@pytest.mark.parametrize("kind", ["conditioned", "gated"])
def test_a_level_goes_on_from_the_likeliest_branches(model, kind):
    """Likely by all of their tokens: the sums along a path of what its scores, with noise, come to as logarithms."""
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    different = 0
    for seed in range(12):
        sampler, hidden = start(seed)
        with torch.inference_mode():
            levels = drafted_levels(HeadLevels(dec.target, dec.heads[kind], True, width=6, beam=4), hidden, sampler, 3)
        likely = [0.0]
        for level, after in pairwise(levels):
            rows = [torch.tensor([score for _, score in row]).log_softmax(-1) for row in level.rows]
            before = likely if level.parents is None else [likely[place] for place in level.parents]
            alone = torch.cat(rows)
            likely = torch.cat([row + start for row, start in zip(rows, before, strict=True)]).tolist()
            best = sorted(range(len(likely)), key=likely.__getitem__)[-4:]
            assert sorted(after.parents) == sorted(best)
            different += sorted(alone.topk(4).indices.tolist()) != sorted(best)
    # Another choice than by the last token alone.
    assert different > 3


def test_tokens_that_a_filter_dropped_are_no_candidates(model):
    dec = Decoder(model, heads=random_heads(model))
    sampler = Sampler(SamplingParams(min_p=1.0), VOCAB, CPU, [5, 6, 7])
    with torch.inference_mode():
        levels = drafted_levels(HeadLevels(dec.target, dec.heads["chained"], True, width=6), start(0)[1], sampler, 2)
    assert [len(row) for row in ranked_tokens(levels)] == [1, 1]


def test_branch_scores_are_the_draft_scores_of_each_path():
    sampler = Sampler(SAMPLING, 200, CPU, [9, 9, 4])
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1)) * 3
    paths = [(1, 2), (1, 5), (7, 9)]
    actual = sampler.branch_scores(logits, True, sampler.draft_context(), torch.tensor(paths))
    expected = [
        sampler.draft_scores(row[None], True, sampler.draft_context(path), weak=True)[0]
        for row, path in zip(logits, paths, strict=True)
    ]
    torch.testing.assert_close(actual.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("own_level", [False, True])
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_levels_of_many_texts_are_those_of_each_alone_from_one_run_of_each_head(model, kind, beam, own_level):
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    counts, received, runs = (1, 3, 2, 3), {}, []
    texts = [(HeadLevels(dec.target, dec.heads[kind], True, width=6, beam=beam), *start(seed)) for seed in range(4)]
    with torch.inference_mode():
        alone = [drafted_levels(heads, hidden, sampler, count, own_level) for (heads, sampler, hidden), count in
                 zip(texts, counts, strict=True)]  # fmt: skip
        for head in dec.heads[kind].heads:
            head.register_forward_hook(lambda head, args, output: runs.append(len(args[0])))
        fill_together([
            LevelsWanted(heads, hidden, sampler, count, own_level,
                         lambda levels, seconds, text=text: received.update({text: (levels, seconds)}))
            for text, ((heads, sampler, hidden), count) in enumerate(zip(texts, counts, strict=True))
        ])  # fmt: skip
    assert len({seconds for _, seconds in received.values()}) == 1
    for text, expected in enumerate(alone):
        levels, _ = received[text]
        assert [level.parents for level in levels] == [level.parents for level in expected]
        for own, other in zip(levels, expected, strict=True):
            for mine, theirs in zip(own.rows, other.rows, strict=True):
                assert [token for token, _ in mine] == [token for token, _ in theirs]
                assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-5)
    if kind in ("conditioned", "gated"):
        # Each head once for all that still want levels, however many branches they have.
        wanting = [sum(count > level for count in counts) for level in range(int(own_level), 3)]
        assert runs == [texts * (1 if level + own_level == 0 else beam) for level, texts in enumerate(wanting)]


def test_the_heads_of_a_batch_are_run_once_a_step(model):
    dec, runs = Decoder(model, heads=random_heads(model, kind="gated")), []
    prompts = [[text, 5, 6, 7] for text in range(4)]
    alone = [dec.generate(text, 20, "ar", SAMPLING).token_ids for text in prompts]
    dec.heads["gated"].heads[0].register_forward_hook(lambda head, args, output: runs.append(len(args[0])))
    for method in ("tokenswift", "tokenswift-fused", "medusa"):
        for options in (TokenSwiftOptions(tree=(1, 2)), TokenSwiftOptions()):
            runs.clear()
            outs = dec.generate_batch(prompts, 20, method, SAMPLING, options)
            assert [out.token_ids for out in outs] == alone
            assert len(runs) <= max(out.stats.steps for out in outs)
            if options.tree is not None:
                assert max(runs) == len(prompts)
