"""The most likely tokens at each position: those of the obvious computation, whatever drafts and whoever draws."""

import math
from itertools import chain, product

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.arguments import check_arguments
from decoder.model.target import Target
from decoder.request import GenerationRequest
from decoder.sampling.acceptance import Independent
from decoder.sampling.filters import highest
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree

from .conftest import VOCAB, some, take, tiny_llama

COUNT, NEW = 6, 30
SAMPLERS = {
    "plain": SamplingParams(seed=1),
    "filtered": SamplingParams(seed=2, temperature=0.8, top_k=9, top_p=0.7, min_p=0.4),
    "short window": SamplingParams(seed=3, repetition_penalty=1.5, penalty_window=7, suppress_tokens=(3, 17)),
    "greedy, penalised": SamplingParams(temperature=0, repetition_penalty=1.3, penalty_window=32),
}
PAPER = TokenSwiftOptions(tree=(1, 3, 3, 3), ngrams=20, budget=30)


def flat(top_logprobs):
    """Ids and log-probabilities in a row, for `pytest.approx`; the ids are far enough apart for it."""
    return [[number for entry in likely for number in entry] for likely in top_logprobs]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one == pytest.approx(other, rel=0, abs=1e-9)


def obvious(logits, before, sampling, count):
    """Of one position's logits, a list of numbers, and the tokens before it, as the parameters' docstring says it."""
    window = before[-sampling.penalty_window :] if sampling.penalty_window else []
    for token in set(window):
        divided = logits[token] > 0
        logits[token] *= 1 / sampling.repetition_penalty if divided else sampling.repetition_penalty
    kept = sorted(set(range(len(logits))) - set(sampling.suppress_tokens), key=lambda token: (-logits[token], token))
    if not sampling.greedy:
        logits = [logit / sampling.temperature for logit in logits]
        kept = kept[: sampling.top_k or None]
        mass = [math.exp(logits[token] - logits[kept[0]]) for token in kept]
        kept = [token for rank, token in enumerate(kept) if sum(mass[:rank]) < sampling.top_p * sum(mass)]
        kept = [token for token in kept if math.exp(logits[token] - logits[kept[0]]) >= sampling.min_p]
    total = sum(math.exp(logits[token]) for token in kept)
    return [(token, logits[token] - math.log(total)) for token in kept[:count]]


@pytest.fixture(scope="module")
def plain(dec, prompt):
    """Plain decoding under each of the samplers."""
    return {
        name: dec.generate(prompt, NEW, "ar", sampling, return_logprobs=True, top_logprobs=COUNT)
        for name, sampling in SAMPLERS.items()
    }


@pytest.mark.parametrize("name", SAMPLERS)
def test_plain_decoding_gives_those_of_the_obvious_computation(dec, prompt, plain, name):
    sampling, out = SAMPLERS[name], plain[name]
    ids = [*prompt, *out.token_ids]
    with torch.inference_mode():
        logits = dec.model(torch.tensor([ids])).logits[0].tolist()
    expected = [obvious(logits[end - 1], ids[:end], sampling, COUNT) for end in range(len(prompt), len(ids))]
    assert_equal(out.top_logprobs, expected)
    for token, logprob, likely in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
        # The same number, and not one that is rounded otherwise.
        assert dict(likely).get(token, logprob) == logprob
        assert likely[0][0] == token or not sampling.greedy
        assert all(type(one) is int and type(value) is float for one, value in likely)
    fewest = min(map(len, out.top_logprobs))
    assert fewest < COUNT if name == "filtered" else fewest == COUNT


# Each method, and each way to walk a tree, under one sampling; each sampling with one method.
@pytest.mark.parametrize(
    "method, name, whole_trees",
    some(
        product(methods(), SAMPLERS, [False, True]),
        [(method, "filtered", trees) for method in methods() for trees in (False, True)]
        + [("tokenswift", name, trees) for name in SAMPLERS for trees in (False, True)],
    ),
)
def test_every_method_gives_those_of_plain_decoding(dec, prompt, plain, method, name, whole_trees, monkeypatch):
    monkeypatch.setattr(Target, "draws_whole_trees", whole_trees)
    out = dec.generate(prompt, NEW, method, SAMPLERS[name], PAPER, return_logprobs=True, top_logprobs=COUNT)
    assert out.token_ids == plain[name].token_ids
    assert out.logprobs == pytest.approx(plain[name].logprobs)
    assert_equal(out.top_logprobs, plain[name].top_logprobs)


@pytest.mark.parametrize("whole_trees", [False, True], ids=["visited nodes", "whole trees"])
def test_log_probabilities_of_the_tokens_themselves_need_not_be_asked_for(dec, prompt, plain, whole_trees, monkeypatch):
    monkeypatch.setattr(Target, "draws_whole_trees", whole_trees)
    out = dec.generate(prompt, NEW, "tokenswift", SAMPLERS["plain"], PAPER, top_logprobs=COUNT)
    assert out.logprobs is None
    assert_equal(out.top_logprobs, plain["plain"].top_logprobs)


@pytest.mark.parametrize("method", ["ar", "medusa"])
def test_choices_of_the_device_come_with_the_same(prompt, plain, method, as_on_cuda, dec):
    for name, sampling in SAMPLERS.items():
        out = dec.generate(prompt, 10, method, sampling, PAPER, return_logprobs=True, top_logprobs=COUNT)
        assert_equal(out.top_logprobs, plain[name].top_logprobs[:10])


@pytest.mark.parametrize("method", ["ar", "tokenswift", "auto"])
def test_of_equal_ones_the_smaller_ids_come_first(dec, prompt, method):
    """Logits that are rounded by a hook have ties at the first and at the last of the tokens that are asked for."""

    def rounded(context, logits):
        return (logits / 4).round()

    asked = dict(sampling=SamplingParams(temperature=0), logits_hook=rounded, return_logprobs=True)
    out = dec.generate(prompt, NEW, method, **asked, options=PAPER, top_logprobs=5)
    whole = dec.generate(prompt, NEW, "ar", **asked, top_logprobs=VOCAB)
    assert out.token_ids == whole.token_ids == [likely[0][0] for likely in out.top_logprobs]
    assert_equal(out.top_logprobs, [likely[:5] for likely in whole.top_logprobs])
    assert any(likely[4][1] == likely[5][1] for likely in whole.top_logprobs)
    for likely in whole.top_logprobs:
        assert sorted(likely, key=lambda entry: (-entry[1], entry[0])) == likely
        assert sorted(token for token, _ in likely) == list(range(VOCAB))


@pytest.mark.parametrize("method", ["ar", "tokenswift", "auto"])
def test_chunks_and_batches_have_those_of_their_own_tokens(dec, prompt, plain, method):
    sampling, expected = SAMPLERS["filtered"], plain["filtered"]
    chunks = list(dec.stream(prompt, NEW, method, sampling, PAPER, top_logprobs=COUNT))
    assert all(len(chunk.top_logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert_equal(list(chain(*(chunk.top_logprobs for chunk in chunks))), expected.top_logprobs)
    assert chunks[-1].output.top_logprobs == list(chain(*(chunk.top_logprobs for chunk in chunks)))
    others = [prompt[:9], prompt, prompt[5:]]
    outs = dec.generate_batch(others, [4, NEW, 7], method, sampling, PAPER, top_logprobs=COUNT)
    assert_equal(outs[1].top_logprobs, expected.top_logprobs)
    assert [len(out.top_logprobs) for out in outs] == [4, NEW, 7]
    parts = [part for index, part in dec.stream_batch(others, 6, method, sampling, PAPER, top_logprobs=2) if index == 1]
    found = list(chain(*(part.top_logprobs for part in parts)))
    assert_equal(found, [likely[:2] for likely in expected.top_logprobs[:6]])


def test_nothing_is_ranked_unless_it_is_asked_for(dec, prompt, monkeypatch):
    monkeypatch.setattr("decoder.sampling.sampler.highest", lambda *args: pytest.fail("ranked"))
    chunks = list(dec.stream(prompt, 5, "auto", return_logprobs=True))
    assert chunks[-1].output.top_logprobs is None
    assert all(chunk.top_logprobs is None for chunk in chunks)


def test_independent_verification_has_those_that_its_draws_are_from(dec, prompt):
    options = TokenSwiftOptions(tree=(2, 2), verification="independent")
    out = dec.generate(
        prompt, NEW, "prompt-lookup", SamplingParams(seed=4), options, return_logprobs=True, top_logprobs=VOCAB
    )
    found = [dict(likely)[token] for token, likely in zip(out.token_ids, out.top_logprobs, strict=True)]
    assert found == out.logprobs
    sampler = Sampler(SamplingParams(top_k=2), 8, torch.device("cpu"), [0], collect_top_logprobs=3)
    take(Independent(1, torch.device("cpu")), TokenTree(0), torch.arange(8.0)[None].double(), sampler)
    assert [token for token, _ in sampler.top_logprobs[0]] == [7, 6] and sampler.logprobs is None


@pytest.mark.parametrize("shape", [(50,), (1, 50), (7, 50)])
@pytest.mark.parametrize("values", [2, 5, 1000])
def test_the_highest_scores_are_those_of_a_stable_sort(shape, values):
    generator = torch.Generator().manual_seed(values)
    for count in (1, 2, 20, 49, 50):
        scores = torch.randint(values, shape, generator=generator).double()
        for barred in (0, 5, 45, 50):
            scores[..., torch.randperm(50, generator=generator)[:barred]] = -torch.inf
            expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
            assert torch.equal(highest(scores, count), expected)


def test_the_highest_of_scores_that_are_no_numbers_are_within_the_row():
    for spoilt in (1, 4, 9):
        scores = torch.arange(9.0).index_fill(0, torch.arange(spoilt), torch.nan)
        assert 0 <= highest(scores, 4).min() <= highest(scores, 4).max() < 9


@pytest.mark.parametrize("value", [-1, VOCAB + 1, True, "3", 2.0, None])
def test_a_number_that_cannot_be_honoured_is_told_at_once(dec, prompt, value):
    words = f"^top_logprobs must be an integer of at least 0 and at most {VOCAB}, the size of the vocabulary, not "
    for call in (dec.generate, dec.stream):
        with pytest.raises(ValueError, match=words) as error:
            call(prompt, 3, top_logprobs=value)
        assert "\n" not in str(error.value)
    for call in (dec.generate_batch, lambda *args, **kwargs: next(dec.stream_batch(*args, **kwargs))):
        with pytest.raises(ValueError, match=words.replace("^", "^prompt 0: ")):
            call([prompt], 3, top_logprobs=value)


def test_processes_compare_how_many_they_were_asked_for(dec):
    arguments = check_arguments(dec, GenerationRequest([1], 3, "ar", None, None, None, False, False, None, 4))
    assert arguments.by_name()["top_logprobs"] == 4


def test_in_half_precision_they_are_of_the_rounded_logits():
    """Ties are frequent there, and the order is still one that all methods share."""
    dec = Decoder(tiny_llama(torch.bfloat16), bitwise=False)
    out = dec.generate([1, 2, 3], 12, "ar", SamplingParams(temperature=0), top_logprobs=VOCAB)
    for token, likely in zip(out.token_ids, out.top_logprobs, strict=True):
        assert likely[0][0] == token
        assert sorted(likely, key=lambda entry: (-entry[1], entry[0])) == likely
