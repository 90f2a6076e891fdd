"""Log-probabilities of a prompt: those of transformers' model, whatever drafts and whoever else is decoded."""

import pytest
import torch

from decoder import SamplingParams
from decoder.prefix_reuse import PrefixReuse

from .conftest import random_tokens


def assert_from_transformers(dec, prompt, found, most_likely):
    """The obvious computation over a single pass of the model as it is."""
    with torch.no_grad():
        logits = dec.model(torch.tensor([prompt])).logits[0].double()
    assert len(found) == len(prompt) and found[0] is None
    for logits_before, token, one in zip(logits, prompt[1:], found[1:], strict=False):
        expected = logits_before - logits_before.logsumexp(-1)
        assert one.logprob == pytest.approx(float(expected[token]), abs=1e-9)
        assert one.rank == 1 + sum(logits_before > logits_before[token])
        values, ids = expected.topk(most_likely) if most_likely else ([], [])
        assert [token for token, _ in one.top_logprobs] == [int(each) for each in ids]
        assert [value for _, value in one.top_logprobs] == pytest.approx([float(each) for each in values], abs=1e-9)


@pytest.mark.parametrize("method", ["ar", "auto", "tokenswift", "prompt-lookup"])
@pytest.mark.parametrize(("length", "new"), [(150, 9), (70, 0), (1, 3), (1, 0)])
def test_they_are_the_models_own_and_the_text_stays(dec, method, length, new):
    """Temperature, penalties and filters are for what is drawn."""
    prompt = random_tokens(length, 1)
    sampling = SamplingParams(seed=3, temperature=0.5, top_k=4, repetition_penalty=1.5)
    out = dec.generate(prompt, new, method, sampling, prompt_logprobs=3)
    assert_from_transformers(dec, prompt, out.prompt_logprobs, 3)
    plain = dec.generate(prompt, new, "ar", sampling)
    assert out.token_ids == plain.token_ids and plain.prompt_logprobs is None and out.finish_reason == "length"


def test_in_a_batch_with_a_cache_of_earlier_prompts(dec, monkeypatch):
    """Nothing is taken over where the whole prompt is asked for; what is computed is kept for others."""
    monkeypatch.setattr(dec, "prefixes", PrefixReuse(dec.target, 2**24))
    prompts = [random_tokens(length, length) for length in (5, 90, 90, 200)]
    for _ in range(2):
        outs = dec.generate_batch(prompts, [4, 0, 6, 5], sampling=SamplingParams(seed=1), prompt_logprobs=0)
        for prompt, out in zip(prompts, outs, strict=True):
            assert_from_transformers(dec, prompt, out.prompt_logprobs, 0)
            assert out.stats.reused_tokens == 0
    assert dec.generate(prompts[3], 5, sampling=SamplingParams(seed=1)).stats.reused_tokens > 100


@pytest.mark.parametrize("count", [-1, True, 1.5, "3", 10**9])
def test_other_counts_are_refused(dec, count):
    with pytest.raises(ValueError, match=r"^prompt_logprobs must be"):
        dec.generate([1, 2], 1, prompt_logprobs=count)
