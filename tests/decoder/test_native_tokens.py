"""Tokens and drafts chosen by the native library: those that PyTorch's operators choose."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decoder import Decoder, SamplingParams
from decoder.backends.native import library as native
from decoder.backends.native.levels import NativeLevels
from decoder.backends.native.quantised import QuantisedEmbedding, QuantisedMatrix, weight_formats
from decoder.constraints import Vocabulary
from decoder.drafters import levels as levels_module
from decoder.drafters.levels import HeadLevels, LevelsWanted, fill_together
from decoder.model.rounding import rounded
from decoder.sampling import host_rows
from decoder.sampling.native_choice import IMPLEMENTED, NativeChoice, native_choice, no_choice
from decoder.sampling.noise import gumbel
from decoder.sampling.sampler import Sampler

from .automaton import Automaton
from .conftest import VOCAB, random_heads, tiny_llama

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no C compiler here")
CPU = torch.device("cpu")
CHOICE = partial(native_choice, device=CPU)
SAMPLINGS = [
    SamplingParams(temperature=0.7, seed=5),
    SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2, seed=2**63 - 1),
    SamplingParams(temperature=1.7, min_p=1e-6, repetition_penalty=0.8, seed=0),
    SamplingParams(temperature=0.01, seed=9),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1, seed=7),
    SamplingParams(temperature=1.3, top_k=50, min_p=0.02, eta_cutoff=1e-3, seed=8),
    SamplingParams(eta_cutoff=5e-3, top_p=0.99, presence_penalty=0.7, frequency_penalty=-0.4, seed=9),
    SamplingParams(temperature=1.1, logit_bias={3: 4.5, 11: -90.0, 30: 1.0}, frequency_penalty=0.2, seed=10),
    SamplingParams(temperature=0.0, logit_bias={5: 2.0}, presence_penalty=1.5, repetition_penalty=1.1),
]
# With some for which the library runs no levels of heads.
ALL = [*SAMPLINGS, SamplingParams(temperature=0.9, top_p=0.95, suppress_tokens=(0, 36), seed=11)]
DTYPES = [torch.float32, torch.bfloat16]


def obvious(sampler, logits):
    """The first of the highest scores, all of which are computed."""
    scores = sampler.scores(logits)
    return int((scores == scores.max()).nonzero()[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("params", ALL, ids=range(len(ALL)))
@pytest.mark.parametrize("vocab, scale", [(1, 1), (37, 0), (37, 3), (4_099, 0.01), (4_099, 4), (49_152, 2)])
def test_the_library_draws_the_token_with_the_highest_score_of_all(vocab, scale, params, dtype):
    if vocab == 1:  # for which others are named by some
        params = dataclasses.replace(params, logit_bias=params.logit_bias and {0: 1.0}, suppress_tokens=())
    generator = torch.Generator().manual_seed(vocab)
    sampler = Sampler(params, vocab, CPU, torch.randint(vocab, (30,), generator=generator).tolist(), choice=CHOICE)
    left = 0
    for _ in range(15 if vocab > 4_099 else 60):
        logits = (torch.randn(vocab, generator=generator) * scale).to(dtype)
        found = sampler.native.highest(sampler._ruled_out(logits, None), len(sampler.context), *sampler.penalties())
        left += found is None
        assert found is None or found[0] == obvious(sampler, logits)
        drawn = sampler.draw(logits)
        assert drawn.token == obvious(sampler, logits) and drawn.score > -math.inf
        sampler.push(drawn.token)
    # What it leaves to others is rare: here where each token's noise is worth a hundred times less than its score.
    assert left <= (15 if params.temperature == 0.01 and not scale else 0)


def spread(kind: str, generator: torch.Generator) -> torch.Tensor:
    """Scores of a vocabulary, float64 [30,000]."""
    scores = torch.randn(30_000, generator=generator, dtype=torch.float64)
    if kind == "far":
        # All but one are so far below it that each alone is hopeless; at one position in some 15 one of them wins.
        return torch.full_like(scores, -13).index_fill(0, torch.tensor([9]), 0)
    if kind == "filtered":
        return scores.masked_fill(scores < 2.5, -torch.inf)
    if kind == "one":
        return torch.full_like(scores, -torch.inf).index_fill(0, torch.tensor([29_999]), -3.5)
    return scores * float(kind)


@pytest.mark.parametrize("kind", ["0", "0.1", "1", "4", "30", "far", "filtered", "one"])
def test_the_highest_of_filtered_scores_with_noise_is_found_as_among_all(kind):
    """Token and score, to the last bit, also where double precision alone tells two scores apart."""
    generator, seed, chosen = torch.Generator().manual_seed(5), 2**62 + 7, set()
    choice = CHOICE(SamplingParams(seed=seed))
    for position in (0, 1, *range(1000, 1060), 2**31):
        scores = spread(kind, generator)
        sums = scores + gumbel(seed, torch.tensor([position]), torch.arange(len(scores)))[0]
        best = int(sums.argmax())
        assert choice.highest_with_noise(scores, position) == (best, float(sums[best]))
        scores[best - 1] = scores[best] + (sums[best] - scores[best]) - (sums[best - 1] - scores[best - 1]) - 1e-9
        if best and kind not in ("one", "filtered"):
            assert choice.highest_with_noise(scores, position) == (best, float(sums[best]))
        chosen.add(best)
    assert len(chosen) > 3 or kind in ("one", "30")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_to_operators_which_find_it(value):
    top_k = SamplingParams(top_k=5, seed=3)
    for vocab in (500, 40_000):
        sampler, logits = Sampler(top_k, vocab, CPU, [1], choice=CHOICE), torch.zeros(vocab)
        drawn = sampler.draw(
            logits.fill_(-math.inf) if value == -math.inf else logits.index_fill(0, torch.tensor([7]), value)
        )
        assert not math.isfinite(drawn.score) and (drawn.token == 7 or value == -math.inf)


@pytest.mark.parametrize("most", [0, 3, 64, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("params", ALL, ids=range(len(ALL)))
def test_what_is_collected_is_the_same_whoever_draws(params, dtype, most):
    """Up to how sums of the vocabulary are rounded; of many that are equal, the first are the likeliest."""
    collected = dict(collect_logprobs=True, collect_top_logprobs=most)
    mine, theirs = (Sampler(params, 4_099, CPU, [5, 7], choice=choice, **collected) for choice in (CHOICE, no_choice))
    generator = torch.Generator().manual_seed(1)
    for turn in range(24):
        logits = (torch.randn(4_099, generator=generator) * 3).to(dtype)
        if turn % 3 == 0:
            logits = logits.round()
        if turn % 4 == 0:
            logits = logits.masked_fill(torch.rand(4_099, generator=generator) < 0.999, -torch.inf)
            logits[5] = 3.0
        drawn, expected = mine.draw(logits), theirs.draw(logits)
        scores = theirs.filtered(logits).log_softmax(-1)
        assert drawn.token == expected.token
        assert drawn.logprob == pytest.approx(float(scores[drawn.token]), abs=1e-12)
        if most:
            [ids, values], [same_ids, same] = (
                zip(*drawn.top_logprobs, strict=True),
                zip(*expected.top_logprobs, strict=True),
            )
            assert ids == same_ids and values == pytest.approx(same, abs=1e-12) and len(ids) <= most
            assert values[0] == pytest.approx(float(scores.max()), abs=1e-12)
        else:
            assert drawn.top_logprobs is None
        for sampler, one in ((mine, drawn), (theirs, expected)):
            sampler.take(one)
    assert mine.context == theirs.context


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_rows_on_the_host_are_those_of_operators(dtype):
    logits, allowed = torch.randn(40_001).to(dtype), torch.rand(40_001) < 0.3
    logits[:3] = torch.tensor([math.inf, -math.inf, -0.0])
    before = logits.clone()
    assert torch.equal(host_rows.without(logits, allowed), logits.masked_fill(~allowed, -torch.inf))
    row = host_rows.in_float32(logits)
    assert row.dtype == torch.float32 and torch.equal(row, logits.float())
    row.zero_()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_p, kept", [(0.9, 27), (0.5, 15), (1 / 3, 10), (0.91, 28), (1e-9, 1), (1 - 1e-16, 30)])
def test_of_equal_tokens_those_are_left_whose_mass_is_top_p(top_p, kept):
    """Where roundings of sums would decide, and differently in another order."""
    params = SamplingParams(top_p=top_p, suppress_tokens=tuple(range(30, 70)), seed=1)
    for choice in (CHOICE, no_choice):
        drawn = Sampler(params, 70, CPU, [1], collect_top_logprobs=64, choice=choice).draw(torch.full((70,), 2.5))
        assert [token for token, _ in drawn.top_logprobs] == list(range(kept))


@pytest.mark.parametrize("rows", [90, 40])
@pytest.mark.parametrize("choice", [CHOICE, no_choice])
def test_drafts_of_rows_with_padding_and_gradients(choice, rows):
    """Those of a draft model whose vocabulary is padded to another size, outside of any context of inference."""
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0}, suppress_tokens=(1,))
    logits = torch.randn(rows, generator=torch.Generator().manual_seed(1), requires_grad=True)
    sampler = Sampler(params, 50, CPU, [1, 2, 3], choice=choice)
    token = int(sampler.draft_choice(logits, True, sampler.draft_context([7])))
    known = torch.full((50,), -math.inf)
    known[:rows] = logits[:50]
    assert token == int(sampler.draft_scores(known[None], True, sampler.draft_context([7])).argmax())


@pytest.mark.parametrize("params", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("coupled", [True, False])
def test_drafts_of_the_model_itself_are_those_of_operators(params, coupled):
    generator = torch.Generator().manual_seed(3)
    mine, theirs = (Sampler(params, 4_099, CPU, [5, 7, 5], choice=choice) for choice in (CHOICE, no_choice))
    for _ in range(20):
        logits = torch.randn(4_099, generator=generator) * 3
        ranked = [sampler.best_drafts(logits, coupled, sampler.draft_context([9]), 6) for sampler in (mine, theirs)]
        for (token, score), (expected, same) in zip(*ranked, strict=True):
            assert score == same == -math.inf or (token == expected and score == pytest.approx(same, abs=1e-3))


class Wide(TorchDispatchMode):
    """Collects the operators that read or write as many numbers as PyTorch shares among threads."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        numbers = [one.numel() for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
        if not func.is_view and max(numbers, default=0) > 32_768:
            self.operators.append(func)
        return out


def test_a_draw_by_the_library_shares_nothing_among_pytorchs_threads():
    """With all that is collected, and a mask: they would wait for more on the cores that the next pass needs."""
    vocab, own = 100_000, {"temperature": 0.7, "repetition_penalty": 1.1, "min_p": 0.01, "bad_words": [[7], [9]]}
    sampler = Sampler(SamplingParams(**own, min_tokens=9), vocab, CPU, [5], None, True, 5, CHOICE, Vocabulary(vocab))
    logits = torch.randn(vocab)
    with Wide() as wide:
        sampler.scores(logits)
    assert wide.operators, "what operators do is seen"
    with Wide() as wide:
        for _ in range(3):
            sampler.take(sampler.draw(logits))
            sampler.best_drafts(logits, True, sampler.draft_context(), 4)
    assert not wide.operators


def test_of_several_that_it_cannot_tell_apart_the_noise_of_all_decides(monkeypatch):
    """With two tokens whose scores differ by what single precision loses."""
    params = SamplingParams(temperature=1.0, seed=3)
    noise = gumbel(3, torch.tensor([2]), torch.arange(50))[0]
    asked = []
    monkeypatch.setattr("decoder.sampling.native_choice.gumbel", lambda *given: asked.append(given) or gumbel(*given))
    for least in (-1, 1):
        logits = torch.full((50,), -30.0)
        logits[7] = 30.0
        logits[9] = float(30 + noise[7] - noise[9]) + least * 1e-5
        sampler = Sampler(params, 50, CPU, [1, 2], choice=CHOICE)
        assert sampler.draw(logits).token == obvious(sampler, logits) == (7 if least < 0 else 9)
    assert len(asked) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_left_to_the_sampler(value):
    sampler = Sampler(SAMPLINGS[0], 40, CPU, [1], choice=CHOICE)
    logits = torch.zeros(40)
    logits[33] = value
    assert sampler.native.highest(logits, 1, None) is None
    logits[:] = -math.inf
    assert sampler.native.highest(logits, 1, None) is None
    with pytest.raises(ValueError, match="no token is left"):
        sampler.take(sampler.draw(logits))


# For each field of SamplingParams settings that differ in it, so that the text does too.
OTHERS = {
    "temperature": [dict(temperature=0.3), dict(temperature=2.0)],
    "top_k": [dict(top_k=3)],
    "top_p": [dict(top_p=0.5)],
    "min_p": [dict(min_p=0.3)],
    "eta_cutoff": [dict(eta_cutoff=0.3)],
    "repetition_penalty": [dict(repetition_penalty=1.5), dict(repetition_penalty=0.5)],
    "penalty_window": [dict(repetition_penalty=1.5, penalty_window=2), dict(repetition_penalty=1.5, penalty_window=0)],
    "seed": [dict(seed=1), dict(seed=2**62)],
    "suppress_tokens": [dict(suppress_tokens=(1, 2, 3))],
    "presence_penalty": [dict(presence_penalty=1.5)],
    "frequency_penalty": [dict(frequency_penalty=-0.5)],
    "logit_bias": [dict(logit_bias={3: 2.0, 5: -100})],
    "min_tokens": [dict(min_tokens=30)],
    "bad_words": [dict(bad_words=[[3], [4, 5]])],
    "include_stop_str_in_output": [dict(include_stop_str_in_output=True)],
    "constraint": [dict(constraint=Automaton())],
    "continued_tokens": [dict(bad_words=[[5, token] for token in range(7)], continued_tokens=1)],
}
# What to compare with, where not with the defaults.
PLAIN = {
    "penalty_window": SamplingParams(repetition_penalty=1.5),
    "continued_tokens": SamplingParams(bad_words=[[5, token] for token in range(7)]),
}
VOCABULARY = Vocabulary(8, stop_ids=frozenset([2, 6]))


def drawn(params, native):
    """Tokens of a small vocabulary drawn one after the other; None where the library does not choose."""
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(params, 8, CPU, [1, 2, 3, 4, 5], choice=CHOICE if native else no_choice, vocabulary=VOCABULARY)
    if native and sampler.native is None:
        return None
    tokens = []
    for _ in range(60):
        logits = torch.randn(8, generator=generator)
        tokens.append(sampler.draw(logits).token if native else obvious(sampler, logits))
        sampler.push(tokens[-1])
    return tokens


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
def test_each_field_is_either_implemented_or_left_to_the_sampler(field):
    assert field in OTHERS, f"add settings of {field} here"
    for other in OTHERS[field]:
        expected = drawn(SamplingParams(**other), native=False)
        same = expected == drawn(PLAIN.get(field, SamplingParams()), native=False)
        assert same == (field == "include_stop_str_in_output"), "whether the tokens depend on it"
        assert drawn(SamplingParams(**other), native=True) == (expected if field in IMPLEMENTED else None)


def test_a_field_that_nobody_has_told_the_library_of_is_left_to_the_sampler():
    class Unchecked(SamplingParams):
        def __post_init__(self):
            pass

    settled = dataclasses.make_dataclass(
        "Settled", [("dry_multiplier", float, 0.0)], bases=(SamplingParams,), frozen=True
    )
    assert native_choice(settled(temperature=0.5), CPU) is not None
    assert native_choice(settled(temperature=0.5, dry_multiplier=0.8), CPU) is None
    assert Sampler(settled(dry_multiplier=0.8), 40, CPU, [1], choice=CHOICE).native_drafts is None
    # A default that is made anew for each object does not say what is switched off.
    made_anew = dataclasses.field(default_factory=tuple)
    listing = dataclasses.make_dataclass("Listing", [("words", tuple, made_anew)], bases=(Unchecked,), frozen=True)
    assert native_choice(listing(), CPU) is None


def test_what_the_library_does_not_know_it_does_not_choose():
    assert native_choice(SAMPLINGS[0], torch.device("meta")) is None
    assert Sampler(SAMPLINGS[0], 40, CPU, [1], logits_hook=lambda ids, logits: logits, choice=CHOICE).native is None
    choice = NativeChoice(SAMPLINGS[0])
    assert choice.highest(torch.zeros(40, dtype=torch.float64), 1, None) is None
    assert choice.highest(torch.zeros(40, 2)[:, 0], 1, None) is None


def texts_of(dec, heads, params, counts, beam, coupled, own_level):
    """One text for each number of levels, in states of its own; and what their levels are."""
    wanted, found = [], []
    for number, count in enumerate(counts):
        generator = torch.Generator().manual_seed(number)
        context = torch.randint(VOCAB, (20 + number,), generator=generator).tolist()
        sampler = Sampler(params, VOCAB, CPU, context, choice=CHOICE)
        hidden = torch.randn(1, 32, generator=generator).to(dec.target.lm_head.weight.dtype)
        levels = HeadLevels(dec.target, heads, coupled, width=6, beam=beam)
        wanted.append(LevelsWanted(levels, hidden, sampler, count, own_level, lambda own, _: found.append(own)))
    return wanted, found


@pytest.mark.parametrize("heads_kind", ["gated", "conditioned"])
@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_levels_over_quantised_embeddings_are_those_of_pytorchs_operators(scale, heads_kind, monkeypatch):
    """A GGUF file's, with the scale that Gemma's have."""
    model = tiny_llama(torch.float32)
    kind = next(one for one in weight_formats().values() if one.name == "Q8_0")
    blocks = rounded(model.get_input_embeddings().weight.data, "Q8_0")
    model.set_input_embeddings(QuantisedEmbedding(QuantisedMatrix(kind, blocks), torch.float32, scale))
    dec = Decoder(model, heads=random_heads(model, kind=heads_kind))
    heads, calls, fill = dec.heads[heads_kind], [], NativeLevels.fill
    monkeypatch.setattr(NativeLevels, "fill", lambda self, texts: calls.append(len(texts)) or fill(self, texts))
    with torch.inference_mode(), dec.target.patched():
        for params in SAMPLINGS:
            given = dec, heads, params, (4, 1, 2), 4, True, False
            wanted, found = texts_of(*given)
            fill_together(wanted)
            again, expected = texts_of(*given)
            with monkeypatch.context() as patch:
                patch.setattr(levels_module, "_by_library", lambda wanted: {})
                fill_together(again)
            for mine, theirs in zip(found, expected, strict=True):
                compare(mine, theirs, torch.float32)
    assert calls == [3] * len(SAMPLINGS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("own_level", [False, True])
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("kind", ["gated", "conditioned", "chained", "independent"])
def test_levels_are_those_of_pytorchs_operators(kind, beam, own_level, some, dtype, monkeypatch):
    if not native.multiplies(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    model = tiny_llama(dtype)
    heads = random_heads(model, kind=kind)
    heads.set_draft_vocabulary(torch.arange(VOCAB)[::2] if some else None)  # a view
    dec = Decoder(model, heads=heads)
    heads = dec.heads[kind]
    deepest = 5 if heads.conditioned else 3 + own_level
    calls, fill = [], NativeLevels.fill
    monkeypatch.setattr(NativeLevels, "fill", lambda self, texts: calls.append(len(texts)) or fill(self, texts))
    with torch.inference_mode(), dec.target.patched():
        for params in SAMPLINGS:
            for coupled in (True, False):
                given = dec, heads, params, (deepest, 1, 2), beam, coupled, own_level
                wanted, found = texts_of(*given)
                calls.clear()
                fill_together(wanted)
                assert calls == [3]
                again, expected = texts_of(*given)
                with monkeypatch.context() as patch:
                    patch.setattr(levels_module, "_by_library", lambda wanted: {})
                    fill_together(again)
                for mine, theirs in zip(found, expected, strict=True):
                    compare(mine, theirs, dtype)


def compare(mine, theirs, dtype):
    """Candidates and branches are the same, but where scores are nearly equal; the scores are close.

    In bfloat16, where PyTorch's operators round states and the library does not, only the first scores are compared.
    """
    assert [level.parents is None for level in mine] == [level.parents is None for level in theirs]
    exact = dtype == torch.float32
    tolerance = 1e-3 if exact else 0.25
    for one, other in zip(mine if exact else mine[:1], theirs if exact else theirs[:1], strict=True):
        assert one.parents == other.parents
        for row, expected in zip(one.rows, other.rows, strict=True):
            for (token, score), (right, value) in zip(row, expected, strict=True):
                if score == value == -math.inf:
                    continue
                assert score == pytest.approx(value, abs=tolerance, rel=tolerance)
                near = sum(abs(value - another) <= 2 * tolerance * max(1, abs(value)) for _, another in expected)
                assert token == right or near > 1


def test_a_user_who_changes_a_head_gets_drafts_of_the_new_one():
    """The library's copy is renewed with the next generation."""
    model = tiny_llama(torch.float32)
    heads = random_heads(model, kind="gated")
    dec = Decoder(model, heads=heads)
    heads, found = dec.heads["gated"], []
    for factor in (1, 0.5):
        heads.heads[0].output_norm.weight.data.mul_(factor)
        heads.heads[0].linear.weight.data.mul_(factor)
        dec.generate([1, 2, 3], 4, "auto")
        with torch.inference_mode(), dec.target.patched():
            wanted, own = texts_of(dec, heads, SAMPLINGS[0], (2,), 4, True, False)
            fill_together(wanted)
            again, _ = texts_of(dec, heads, SAMPLINGS[0], (2,), 4, True, False)
            numbers = levels_module._by_operators(again)
        compare(
            own[0], again[0].levels.read(torch.cat([part.flatten() for part in numbers[0]]).tolist()), torch.float32
        )
        found += own
    assert found[0] != found[1]
