"""An audit passes what AR would have written, and finds the token that it would not."""

import math

import pytest

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions

from .conftest import VOCAB, tiny_llama

SAMPLING = SamplingParams(seed=4, temperature=0.9, min_p=0.05, repetition_penalty=1.2, penalty_window=16)


@pytest.mark.parametrize("method", decoder.methods())
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


def test_independent_verification_cannot_be_audited(dec, prompt):
    out = dec.generate(prompt, 5, options=TokenSwiftOptions(verification="independent"))
    with pytest.raises(ValueError, match="exact"):
        dec.audit(out)
