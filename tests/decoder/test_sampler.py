"""Penalty and filters mean what transformers means; the window slides as AR's."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoder import SamplingParams
from decoder.sampling.filters import filter_eta, filter_min_p, filter_top_k, filter_top_p, first_argmax, process_logits
from decoder.sampling.sampler import Sampler

LOGITS = torch.randn(6, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (lambda x: filter_top_k(x, 7), TopKLogitsWarper(7)),
        (lambda x: filter_top_k(x, 1000), TopKLogitsWarper(1000)),
        (lambda x: filter_top_p(x, 0.8), TopPLogitsWarper(0.8)),
        (lambda x: filter_top_p(x, 0.05), TopPLogitsWarper(0.05)),
        (lambda x: filter_min_p(x, 0.1), MinPLogitsWarper(0.1)),
        (lambda x: filter_min_p(x, 1.0), MinPLogitsWarper(1.0)),
        (lambda x: filter_eta(x, 3e-2), EtaLogitsWarper(3e-2)),
        (lambda x: filter_eta(x, 2e-4), EtaLogitsWarper(2e-4)),
    ],
)
def test_filters_equal_transformers(ours, theirs):
    torch.testing.assert_close(ours(LOGITS), theirs(None, LOGITS.clone()), rtol=0, atol=0)


def test_filters_run_on_what_the_one_before_left():
    chain = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(20)(None, LOGITS.clone()))
    torch.testing.assert_close(filter_top_p(filter_top_k(LOGITS, 20), 0.9), chain, rtol=0, atol=0)


@pytest.mark.parametrize("penalty", [1.3, 2.0, 0.7])
def test_penalty_equals_transformers(penalty):
    ids = torch.randint(200, (6, 50), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(repetition_penalty=penalty)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, LOGITS.clone())
    for row in range(6):
        window = torch.zeros(200, dtype=torch.bool)
        window[ids[row]] = True
        torch.testing.assert_close(process_logits(LOGITS[row], params, window), expected[row], rtol=0, atol=0)


def test_ties_go_to_the_smaller_token_id():
    equal = torch.zeros(1, 10, dtype=torch.float64)
    assert torch.isfinite(filter_top_k(equal, 3))[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert torch.isfinite(filter_top_p(equal, 0.35))[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert torch.isfinite(filter_min_p(equal, 0.5)).all()
    assert torch.isfinite(filter_eta(equal, 0.5)).all()
    assert first_argmax(torch.tensor([1.0, 5.0, 5.0, 2.0])) == 1
    assert first_argmax(torch.tensor([1.0, torch.nan, 5.0, 2.0])) == 3


@pytest.mark.parametrize("spread", [1, 2, 5])
def test_with_ties_the_filters_keep_as_many_as_transformers(spread):
    """transformers' top-k keeps all that equal the k-th; ours exactly k, the smaller ids, so that the text is fixed."""
    tied = torch.randint(spread, (6, 200), generator=torch.Generator().manual_seed(3)).double()

    def kept(logits):
        return torch.isfinite(logits).sum(-1)

    for p in (0.103, 0.503, 0.933):
        assert (kept(filter_top_p(tied, p)) == kept(TopPLogitsWarper(p)(None, tied.clone()))).all()
    for p in (0.05, 0.3, 1.0):
        assert (kept(filter_min_p(tied, p)) == kept(MinPLogitsWarper(p)(None, tied.clone()))).all()
    for epsilon in (2e-4, 4e-3, 0.1):
        assert (kept(filter_eta(tied, epsilon)) == kept(EtaLogitsWarper(epsilon)(None, tied.clone()))).all()
    for k in (1, 10, 150):
        theirs = TopKLogitsWarper(k)(None, tied.clone())
        assert (kept(filter_top_k(tied, k)) == k).all()
        assert (torch.isfinite(theirs) | ~torch.isfinite(filter_top_k(tied, k))).all()


def test_suppressed_tokens_equal_transformers_and_leave_the_others_chances():
    banned = (0, 5, 199)
    expected = MinPLogitsWarper(0.01)(None, SuppressTokensLogitsProcessor(list(banned), CPU)(None, LOGITS.clone()))
    sampler = Sampler(SamplingParams(min_p=0.01, suppress_tokens=banned), 200, CPU, [0])
    for row, theirs in zip(LOGITS, expected, strict=True):
        torch.testing.assert_close(sampler.filtered(row), theirs, rtol=0, atol=0)
        assert torch.isinf(sampler.draft_scores(row[None], True, sampler.draft_context())[0, list(banned)]).all()


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.0}])
@pytest.mark.parametrize(
    "logits",
    [torch.full((20,), -torch.inf).index_fill(0, torch.tensor([7]), 2.0), torch.arange(20) * -1e30 + 7e30],
    ids=["one finite logit", "huge values"],
)
def test_extreme_logits_leave_the_best_token(only, logits):
    sampler = Sampler(SamplingParams(**only), 20, CPU, [0])
    assert sampler.take(sampler.draw(logits)) == int(logits.argmax())


def test_the_window_slides_with_the_text():
    """Incremental counts against a window recomputed from scratch at every position, repeats included."""
    generator = torch.Generator().manual_seed(2)
    for window in (0, 1, 3, 8, 100):
        sampler = Sampler(SamplingParams(repetition_penalty=2.0, penalty_window=window), 6, CPU, [1, 2, 2])
        for _ in range(40):
            recent = set(sampler.context[-window:]) if window else set()
            in_window = sampler.draft_context().in_window()
            marked = set() if in_window is None else set(in_window.nonzero().flatten().tolist())
            assert marked == recent
            drafted = torch.randint(6, (len(sampler.context) % 5,), generator=generator).tolist()
            ahead = sampler.draft_context(drafted).in_window()
            marked = set() if ahead is None else set(ahead.nonzero().flatten().tolist())
            assert marked == (set([*sampler.context, *drafted][-window:]) if window else set())
            sampler.push(int(torch.randint(6, (1,), generator=generator)))


def test_logprobs_are_of_the_filtered_distribution():
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=5, seed=4), 200, CPU, [3], collect_logprobs=True)
    token = sampler.take(sampler.draw(LOGITS[0]))
    expected = filter_top_k(LOGITS[:1] / 0.7, 5).log_softmax(-1)[0, token].item()
    assert sampler.logprobs == [expected]
    assert expected < 0


def test_coupled_drafts_of_the_true_distribution_are_the_targets_choice():
    params = SamplingParams(seed=6, repetition_penalty=1.2, min_p=0.02)
    for position in range(1, 30):
        sampler = Sampler(params, 200, CPU, [0] * position)
        chain = []
        for _ in range(3):
            chain.append(int(sampler.draft_scores(LOGITS[:1], True, sampler.draft_context(chain))[0].argmax()))
        assert chain == [sampler.take(sampler.draw(LOGITS[0])) for _ in range(3)]


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", "x"),
        ("min_p", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("eta_cutoff", 1.0),
        ("repetition_penalty", 0.0),
        ("penalty_window", -1),
        ("seed", -1),
        ("seed", True),
        ("temperature", 1e-9),
        ("repetition_penalty", 1e-320),
        ("suppress_tokens", 3),
        ("suppress_tokens", [-1]),
        ("suppress_tokens", [True]),
    ],
)
def test_out_of_range_values_name_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_a_choice_takes_whatever_tensor_a_hook_returns():
    logits = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    greedy = SamplingParams(temperature=0)
    for odd in (logits.clone().requires_grad_(True), torch.complex(logits, -logits).conj().imag):
        sampler = Sampler(greedy, 50, CPU, [1], lambda context, _, odd=odd: odd)
        assert sampler.take(sampler.draw(logits)) == int(logits.argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=1e-6, top_k=5, top_p=0.5, eta_cutoff=0.1, min_p=1.0, repetition_penalty=1e3, seed=4),
        SamplingParams(temperature=0.7, min_p=0.1, repetition_penalty=0.5, penalty_window=7, suppress_tokens=(1, 2)),
    ],
)
def test_drafts_of_heads_are_ruled_out_less_strictly(params):
    weak = params.for_weak_drafts()
    kept = ("seed", "penalty_window", "suppress_tokens", "greedy", "window", "top_k", "top_p", "eta_cutoff")
    assert all(getattr(weak, name) == getattr(params, name) for name in kept)
    assert weak.min_p <= params.min_p and weak.temperature <= params.temperature
    assert abs(math.log(weak.repetition_penalty)) <= abs(math.log(params.repetition_penalty))
    if params == SamplingParams():
        assert weak == params
    # What min-p leaves of the model's logits it leaves of theirs.
    params = replace(params, repetition_penalty=1.0, top_k=0, top_p=1.0, eta_cutoff=0.0)
    strict, lax = (process_logits(LOGITS, one, None) == -torch.inf for one in (params, params.for_weak_drafts()))
    assert not (lax & ~strict).any()
