"""Under constraints, biases and penalties every method gives the text of plain decoding, alone and in company."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.constraints import Vocabulary
from decoder.drafters import TUNED

from .automaton import Automaton, keeps_to
from .conftest import VOCAB, all_heads, some, tiny_llama

LENGTH = 45
SAMPLERS = {
    "forced often": SamplingParams(seed=1, min_tokens=22, constraint=Automaton()),
    "forced chains told": SamplingParams(
        seed=2, min_p=0.05, min_tokens=34, constraint=Automaton(seed=5, tells_forced=True)
    ),
    "greedy": SamplingParams(temperature=0, repetition_penalty=1.3, penalty_window=9, constraint=Automaton(seed=3)),
    "with all else": SamplingParams(
        seed=4,
        temperature=0.9,
        top_k=15,
        top_p=0.95,
        min_p=0.01,
        eta_cutoff=1e-3,
        repetition_penalty=1.2,
        penalty_window=11,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        logit_bias={3: 2.5, 40: -100, 17: 1},
        min_tokens=15,
        bad_words=[[5], [7, 8], [1, 2, 3]],
        constraint=Automaton(count=30, seed=7),
    ),
    "penalties": SamplingParams(seed=5, presence_penalty=1.5, frequency_penalty=-0.5, min_p=0.05),
    "penalties, greedy": SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.9),
    "bias": SamplingParams(seed=6, logit_bias={token: (-1) ** token * token / 9 for token in range(30)}),
    "bad words": SamplingParams(
        seed=7, temperature=0.7, bad_words=[*([token] for token in range(0, VOCAB, 3)), [1, 2]]
    ),
    "min_tokens": SamplingParams(seed=8, min_tokens=38),
}
OPTIONS = {
    "by cost": TokenSwiftOptions(budget=30),
    "fixed": TokenSwiftOptions(tree=(1, 3, 3, 3), ngrams=20),
    "chain, not coupled": TokenSwiftOptions(tree=(1, 1, 1, 1, 1), ngrams=0, budget=17, coupled=False),
}
DRAFTING = [method for method in methods() if method != "ar"]


@pytest.fixture(scope="module", params=["no end token", "end tokens"])
def ended(request, dec):
    """A decoder whose model has no end-of-sequence token, and one that has two."""
    if request.param == "no end token":
        return dec
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, 11]
    decoder = Decoder(model, heads=all_heads(model, "conditioned"), draft_model=dec.draft_model)
    return decoder


def vocabulary_of(decoder):
    ends = decoder.model.generation_config.eos_token_id
    return Vocabulary(VOCAB, end_ids=frozenset(ends or ()))


@pytest.fixture(scope="module")
def plain(ended, prompt):
    return {
        name: ended.generate(prompt, LENGTH, "ar", one, return_logprobs=True, top_logprobs=3)
        for name, one in SAMPLERS.items()
    }


@pytest.mark.parametrize(
    "ended, options, method",
    some(
        product(("no end token", "end tokens"), OPTIONS, DRAFTING),
        # Without a tree of their own the others have the one that is fixed.
        [("no end token", "by cost", method) for method in ("auto", "suffix", *TUNED)]
        # Its forced tokens are more than its tree has nodes, up to the end of the text.
        + [("no end token", "fixed", "draft-model")]
        + [("end tokens", "fixed", method) for method in DRAFTING if method not in TUNED],
    ),
    indirect=["ended"],
    scope="module",
)
def test_every_method_equals_ar(ended, prompt, plain, method, options):
    for name, sampling in SAMPLERS.items():
        out = ended.generate(prompt, LENGTH, method, sampling, OPTIONS[options], return_logprobs=True, top_logprobs=3)
        expected = plain[name]
        assert out.token_ids == expected.token_ids, name
        assert out.finish_reason == expected.finish_reason, name
        assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-9), name
        for own, other in zip(out.top_logprobs, expected.top_logprobs, strict=True):
            assert [token for token, _ in own] == [token for token, _ in other], name
        if sampling.constraint is not None:
            assert keeps_to(sampling.constraint, out.token_ids, vocabulary_of(ended))


def test_texts_are_as_long_as_the_tests_suppose(plain):
    """A text that ends at once would show nothing."""
    lengths = {name: len(out.token_ids) for name, out in plain.items()}
    assert min(lengths.values()) > 1 and sum(length > 20 for length in lengths.values()) >= 5, lengths


@pytest.mark.parametrize(
    "method", some(["auto", "tokenswift", "prompt-lookup", "draft-model"], ["auto", "draft-model"])
)
def test_in_a_batch_and_in_a_stream(ended, prompt, plain, method):
    names = list(SAMPLERS)
    outs = ended.generate_batch([prompt] * len(names), LENGTH, method, [SAMPLERS[name] for name in names])
    assert [out.token_ids for out in outs] == [plain[name].token_ids for name in names]
    for name in names:
        chunks = list(ended.stream(prompt, LENGTH, method, SAMPLERS[name]))
        assert [token for chunk in chunks for token in chunk.token_ids] == plain[name].token_ids


@pytest.mark.parametrize("method", some(["ar", "auto", "magicdec", "medusa"], ["auto"]))
def test_a_text_that_was_cut_goes_on_as_if_it_had_not_been(ended, prompt, plain, method):
    for name, sampling in SAMPLERS.items():
        whole = plain[name].token_ids
        for cut in (1, len(whole) // 2, len(whole) - 1):
            behind = replace(sampling, continued_tokens=cut)
            out = ended.generate([*prompt, *whole[:cut]], LENGTH - cut, method, behind)
            assert whole[:cut] + out.token_ids == whole, name
            assert out.finish_reason == plain[name].finish_reason, name
            assert ended.audit(out).equal, name


@pytest.mark.parametrize(
    "method", ["auto", "suffix", "tokenswift", "medusa", "draft-model", "prompt-lookup", "magicdec"]
)
def test_forced_tokens_are_drafted(ended, prompt, plain, method):
    sampling = SAMPLERS["forced chains told"]
    expected = plain["forced chains told"].token_ids
    out = ended.generate(prompt, LENGTH, method, sampling, TokenSwiftOptions(tree=(1,), ngrams=0))
    assert out.token_ids == expected
    assert out.stats.accepted_by_source.get("constraint", 0) > 5
    assert out.stats.steps < len(expected)
    assert ended.generate(prompt, LENGTH, "ar", sampling).stats.steps == len(expected)


def test_a_chain_of_any_length_takes_one_step(dec, prompt):
    """All tokens but the first are forced: 41 of them come in the step that verifies them."""

    class Long(Automaton):
        def start(self, vocabulary):
            state = super().start(vocabulary)
            state.ways = [{place % VOCAB: place + 1} for place in range(200)]
            return state

    sampling = SamplingParams(constraint=Long(tells_forced=True))
    for method in ("auto", "prompt-lookup", "medusa"):
        out = dec.generate(prompt, 41, method, sampling, TokenSwiftOptions(tree=(1,)))
        assert out.token_ids == [place % VOCAB for place in range(41)]
        assert out.stats.steps <= 3


def test_independent_verification_keeps_within(dec, prompt):
    sampling = SamplingParams(seed=3, constraint=Automaton())
    options = TokenSwiftOptions(tree=(2, 2, 2), verification="independent")
    out = dec.generate(prompt, LENGTH, "medusa", sampling, options)
    assert keeps_to(sampling.constraint, out.token_ids, vocabulary_of(dec))


def test_a_text_without_end_tokens_ends_where_nothing_may_follow(dec, prompt):
    sampling = SamplingParams(seed=2, constraint=Automaton(count=20, seed=2, dead_end=True), min_tokens=90)
    outs = [dec.generate(prompt, 200, method, sampling) for method in methods()]
    assert outs[0].finish_reason == "stop" and 3 < len(outs[0].token_ids) < 200
    assert all(out.token_ids == outs[0].token_ids and out.finish_reason == "stop" for out in outs)


def test_audits(ended, prompt, plain):
    for name in SAMPLERS:
        assert ended.audit(plain[name]).equal, name
    wrong = replace(plain["forced often"], token_ids=[*plain["penalties"].token_ids])
    assert ended.audit(wrong).fault is not None


@pytest.mark.parametrize("library", ["with_native", "without_native"])
def test_single_precision_with_the_library_and_without(request, prompt, library):
    request.getfixturevalue(library)
    model = tiny_llama(torch.float32)
    model.generation_config.eos_token_id = [2, 11]
    decoder = Decoder(model, heads=all_heads(model), draft_model=tiny_llama(torch.float32, seed=2))
    for sampling in SAMPLERS.values():
        expected = decoder.generate(prompt, LENGTH, "ar", sampling)
        for method in ("auto", "tokenswift", "draft-model", "medusa"):
            out = decoder.generate(prompt, LENGTH, method, sampling)
            assert out.token_ids == expected.token_ids or decoder.audit(out).fault is None


def test_as_on_cuda(as_on_cuda, prompt):
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, 11]
    decoder = Decoder(model, heads=all_heads(model), draft_model=tiny_llama(seed=2))
    for sampling in SAMPLERS.values():
        expected = decoder.generate(prompt, LENGTH, "ar", sampling)
        for method in ("auto", "tokenswift", "medusa"):
            assert decoder.generate(prompt, LENGTH, method, sampling).token_ids == expected.token_ids


def test_a_mask_that_is_none(dec, prompt):
    class Wrong(Automaton):
        def start(self, vocabulary):
            state = super().start(vocabulary)
            state.mask = lambda: torch.ones(3, dtype=torch.bool)
            return state

    with pytest.raises(ValueError, match=r"bool tensor of the shape \[48\]"):
        dec.generate(prompt, 5, "ar", SamplingParams(constraint=Wrong()))
