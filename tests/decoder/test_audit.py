"""An audit passes what AR would have written, and finds the token that it would not."""

import math
from dataclasses import replace

import pytest
import torch

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.auditing import rounding

from .conftest import VOCAB, some, tiny_llama

SAMPLING = SamplingParams(seed=4, temperature=0.9, min_p=0.05, repetition_penalty=1.2, penalty_window=16)


@pytest.mark.parametrize("method", some(decoder.methods(), ["ar", "tokenswift", "auto"]))
def test_every_method_passes(dec, prompt, method):
    """More tokens than a chunk of the audit has, and a hook: everything that decides a choice."""

    def hook(context, logits):
        return logits.index_fill(0, logits.new_tensor([len(context) % 7]).long(), -math.inf)

    dec.model.train()
    try:
        report = decoder.audit(dec.generate(prompt, 150, method, SAMPLING, logits_hook=hook))
        assert dec.model.training
    finally:
        dec.model.eval()
    assert report.equal and report.checked == 150
    assert str(report) == "all 150 tokens are the model's own choices"
    assert dec.audit(dec.generate(prompt, 0, method)).checked == 0


@pytest.mark.parametrize("at", [0, 1, 130, 299])
def test_a_wrong_token_is_found_with_its_margin(dec, prompt, at):
    out = dec.generate(prompt, 300, sampling=SamplingParams(seed=4))
    right = out.token_ids[at]
    out.token_ids[at] = wrong = (right + 1) % VOCAB
    report = dec.audit(out)
    assert not report.equal
    assert (report.index, report.checked, report.token, report.expected) == (at, at + 1, wrong, right)
    # Without filters, only a change of the two logits that closes the gap of their scores makes the wrong token win.
    gap = report.expected_score - report.token_score
    assert 0 < gap <= report.margin * (1 + 1e-5)
    assert f"token {at} is {wrong}, scored again it is {right}" in str(report)


def test_a_tie_at_a_filters_edge_has_a_small_margin(prompt):
    """A token that min-p drops by a hair: its score is -inf and yet rounding decides."""
    model = tiny_llama()
    dec = Decoder(model)
    out = dec.generate(prompt, 1, "ar", SamplingParams(temperature=0), return_logprobs=True)
    best = out.token_ids[0]
    model.lm_head.weight.data[(best + 1) % VOCAB] = model.lm_head.weight.data[best] * (1 - 1e-9)
    for seed in range(50):
        sampling = SamplingParams(seed=seed, min_p=1.0)
        out = dec.generate(prompt, 1, "ar", sampling)
        if out.token_ids != [best]:
            break
        out.token_ids[0] = (best + 1) % VOCAB
        report = dec.audit(out)
        assert report.token_score == -math.inf
        if report.margin < math.inf:
            assert report.margin < 1e-6
            return
    pytest.fail("no seed whose noise prefers the dropped token")


@pytest.fixture(scope="module")
def twins():
    """A model to which two tokens are the same, so that the choice between them is always a tie."""
    model = tiny_llama(torch.float32)
    dec = Decoder(model, bitwise=False)
    out = dec.generate(list(range(10)), 200, "ar", SamplingParams(temperature=0))
    often = max(set(out.token_ids), key=out.token_ids.count)
    other = next(token for token in range(often + 1, often + VOCAB) if token not in out.token_ids)
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        # The later one, since of equal scores the smaller id is taken.
        weight.data[other] = weight.data[often]
    return dec, often, other


def test_the_audit_goes_on_behind_ties(twins):
    dec, often, other = twins
    out = dec.generate(list(range(10)), 200, "ar", SamplingParams(temperature=0))
    places = [index for index, token in enumerate(out.token_ids) if token == often]
    assert len(places) > 3 and dec.audit(out).equal
    swapped = places[1::2]
    for index in swapped:
        out.token_ids[index] = other
    report = dec.audit(out)
    assert (report.ties, report.fault, report.checked) == (tuple(swapped), None, 200)
    assert not report.equal and report.index == swapped[0] and report.margin <= report.rounding < 1e-3
    assert str(report).startswith(f"{len(swapped)} of 200 tokens are ties within rounding")
    # A fault behind them is found all the same, and ends it.
    at = next(index for index in range(swapped[-1] + 1, 200) if out.token_ids[index] not in (often, other))
    out.token_ids[at] = (out.token_ids[at] + 1) % VOCAB
    report = dec.audit(out)
    assert (report.ties, report.fault, report.checked) == (tuple(swapped), at, at + 1)
    assert report.index == at and report.margin > report.rounding
    assert f"token {at} is {out.token_ids[at]}, scored again it is" in str(report)
    assert f"before it {len(swapped)} of {at + 1} tokens are ties" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_what_two_passes_differ_by(dtype, prompt):
    model = tiny_llama(dtype)
    measured = rounding(model, prompt)
    with torch.inference_mode():
        whole = model(torch.tensor([prompt])).logits[0].double()
        rows = [model(torch.tensor([prompt[:end]])).logits[0, -1].double() for end in range(1, len(prompt) + 1)]
    deviations = (whole - torch.stack(rows))[-16:].std(1)
    spacing = torch.finfo(dtype).eps * whole[-16:].abs().amax()
    # Passes over a part of the text are not those that it compares, but round as much.
    assert 0.5 <= measured / (16 * max(deviations.amax(), spacing / 4)) <= 2
    assert rounding(model, prompt[:1]) > 0


def test_a_model_that_is_not_transformers_can_be_audited():
    class Fixed(torch.nn.Module):
        device, config = torch.device("cpu"), tiny_llama(torch.float32).config

        def forward(self, input_ids, logits_to_keep, **_):
            return type("Output", (), {"logits": torch.tensor([3.0, 2.0, -8.0]).expand(1, logits_to_keep, -1)})

    # Both passes give the same, so what is left is the spacing of numbers at the largest logit.
    assert rounding(Fixed(), range(20)) == pytest.approx(4 * torch.finfo(torch.float32).eps * 8)


@pytest.mark.parametrize("least", [-math.inf, torch.finfo(torch.float32).min])
def test_tokens_that_do_not_exist_hide_no_fault(prompt, least, monkeypatch):
    """Their logits are infinite, or stand for that, and say nothing about rounding."""
    model = tiny_llama(torch.float32)
    forward = type(model).forward

    def padded(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits[..., -1] = least
        return output

    dec = Decoder(model, bitwise=False)
    out = dec.generate(prompt, 60, "ar", SamplingParams(temperature=0, suppress_tokens=(VOCAB - 1,)))
    monkeypatch.setattr(type(model), "forward", padded)
    assert 0 < rounding(model, prompt) < 1e-3
    assert dec.audit(out).equal
    out.token_ids[20] = (out.token_ids[20] + 1) % (VOCAB - 1)
    assert dec.audit(out).fault == 20


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_rounding_in_half_precision_is_no_fault(kv_dtype):
    dec = Decoder(tiny_llama(torch.bfloat16), bitwise=False)
    samplings = [SamplingParams(seed=seed) for seed in range(8)]
    outs = dec.generate_batch([[1]] * 8, 120, "ar", samplings, TokenSwiftOptions(kv_dtype=kv_dtype))
    reports = [dec.audit(out) for out in outs]
    assert all(report.fault is None and report.checked == 120 for report in reports), reports
    assert any(report.ties for report in reports)


def test_a_slightly_wrong_penalty_is_a_fault(prompt):
    """What a generous tolerance for ties would hide."""
    dec = Decoder(tiny_llama(torch.float32))
    sampling = SamplingParams(seed=4, temperature=0.9, repetition_penalty=1.2)
    out = dec.generate(prompt, 300, "ar", sampling)
    assert dec.audit(out).equal
    out.request = replace(out.request, sampling=replace(sampling, repetition_penalty=1.21))
    report = dec.audit(out)
    assert report.fault is not None and report.rounding < report.margin < 0.1


def test_independent_verification_cannot_be_audited(dec, prompt):
    out = dec.generate(prompt, 5, options=TokenSwiftOptions(verification="independent"))
    with pytest.raises(ValueError, match="exact"):
        dec.audit(out)
