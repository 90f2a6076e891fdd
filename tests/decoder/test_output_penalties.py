"""Biases, penalties on the output, bad words and min_tokens: vLLM's definitions, written out as a slow referee."""

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from decoder import SamplingParams
from decoder.constraints import Vocabulary
from decoder.sampling.sampler import Sampler

from ..tiny import byte_tokenizer

CPU, V = torch.device("cpu"), 20
PROMPT, OUTPUT = [3, 3, 5, 7, 9], [3, 3, 8, 1, 4, 3]
STOPS = frozenset([0, 19])


def of_vllm(logits, prompt, output, params):
    """The logits behind bans, bias and penalties, token by token in the order of vLLM's sampler."""
    found = []
    for token, logit in enumerate(logits.tolist()):
        for *before, last in params.bad_words:
            if token == last and (not before or output[-len(before) :] == before):
                logit = -float("inf")
        if len(output) < params.min_tokens and token in STOPS:
            logit = -float("inf")
        logit += dict(params.logit_bias or ()).get(token, 0.0)
        if token in prompt + output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        found.append(logit)
    return torch.tensor(found, dtype=torch.float64)


SETTINGS = [
    dict(presence_penalty=0.7),
    dict(frequency_penalty=-1.3, presence_penalty=2),
    dict(logit_bias={3: 1.5, 0: -100}, repetition_penalty=1.3, frequency_penalty=0.4),
    dict(min_tokens=7, bad_words=[[4], [3, 6], [8, 1, 4, 3, 2], [9, 9]]),
    dict(min_tokens=6, bad_words=[[4, 3, 0], [7, 9, 3]]),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_as_vllm_defines_them(settings):
    params = SamplingParams(temperature=0, **settings)
    generator = torch.Generator().manual_seed(1)
    sampler = Sampler(params, V, CPU, PROMPT, vocabulary=Vocabulary(V, stop_ids=STOPS))
    for length in range(len(OUTPUT) + 1):
        logits = torch.randn(V, generator=generator, dtype=torch.float64) * 3
        expected = of_vllm(logits, PROMPT, OUTPUT[:length], params)
        torch.testing.assert_close(sampler.filtered(logits), expected, rtol=1e-12, atol=0)
        # The same where the output is told from the prompt by its length alone.
        text = [*PROMPT, *OUTPUT[:length]]
        resumed = SamplingParams(temperature=0, continued_tokens=length, **settings)
        other = Sampler(resumed, V, CPU, text, vocabulary=Vocabulary(V, stop_ids=STOPS))
        torch.testing.assert_close(other.filtered(logits), expected, rtol=1e-12, atol=0)
        # And for drafts behind a shorter text.
        begun = SamplingParams(temperature=0, continued_tokens=length // 2, **settings)
        drafting = Sampler(begun, V, CPU, text[: len(PROMPT) + length // 2], vocabulary=Vocabulary(V, stop_ids=STOPS))
        context = drafting.draft_context(OUTPUT[length // 2 : length])
        torch.testing.assert_close(drafting.draft_scores(logits[None], True, context)[0], expected, rtol=1e-12, atol=0)
        if length < len(OUTPUT):
            sampler.push(OUTPUT[length])


def test_as_transformers_processors():
    text = torch.tensor([PROMPT + OUTPUT])
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    bad = [[4], [4, 3, 6], [8, 1]]
    expected = NoBadWordsLogitsProcessor(bad_words_ids=bad)(text, logits.clone())
    expected = MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, sorted(STOPS), device="cpu")(text, expected)
    expected = SequenceBiasLogitsProcessor(sequence_bias=[[[3], 1.5], [[7], -2.0]])(text, expected)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(text, expected)
    params = SamplingParams(
        temperature=0,
        bad_words=bad,
        min_tokens=9,
        logit_bias={3: 1.5, 7: -2},
        repetition_penalty=1.3,
        continued_tokens=len(OUTPUT),
    )
    sampler = Sampler(params, V, CPU, PROMPT + OUTPUT, vocabulary=Vocabulary(V, stop_ids=STOPS))
    torch.testing.assert_close(sampler.filtered(logits[0]), expected[0], rtol=1e-12, atol=1e-12)


def test_bad_words_that_are_texts():
    vocabulary = Vocabulary(256, byte_tokenizer())
    ids = vocabulary.tokenizer.encode("bad", add_special_tokens=False)
    params = SamplingParams(temperature=0, bad_words=["bad"], continued_tokens=len(ids) - 1)
    sampler = Sampler(params, 256, CPU, [7, *ids[:-1]], vocabulary=vocabulary)
    assert (sampler.filtered(torch.zeros(256)) == -torch.inf).nonzero()[:, 0].tolist() == ids[-1:]
    with pytest.raises(ValueError, match="need a tokenizer"):
        Sampler(params, 256, CPU, [7, *ids[:-1]])


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(presence_penalty=2.1), "presence_penalty must be between -2 and 2"),
        (dict(frequency_penalty=float("nan")), "frequency_penalty must be between"),
        (dict(logit_bias={1: 101}), "logit_bias must be between -100 and 100"),
        (dict(logit_bias={"1": 1}), "logit_bias must be by token ids"),
        (dict(logit_bias=3), "logit_bias must be a mapping"),
        (dict(min_tokens=-1), "min_tokens must be at least 0"),
        (dict(min_tokens=1.5), "min_tokens must be an integer"),
        (dict(bad_words="word"), "bad_words must be texts"),
        (dict(include_stop_str_in_output=1), "include_stop_str_in_output must be true or false"),
        (dict(bad_words=[""]), "bad_words must be texts"),
        (dict(bad_words=[[]]), "bad_words must be texts"),
        (dict(constraint="json"), "constraint must be one of decoder.constraints"),
        (dict(continued_tokens=-3), "continued_tokens must be at least 0"),
    ],
)
def test_values_out_of_range_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**settings)


@pytest.mark.parametrize("settings", [dict(logit_bias={V: 1}), dict(bad_words=[[1, V]])])
def test_tokens_outside_the_vocabulary_are_named(settings):
    with pytest.raises(ValueError, match=f"{V}, which is outside the vocabulary of {V}"):
        Sampler(SamplingParams(**settings), V, CPU, PROMPT)
