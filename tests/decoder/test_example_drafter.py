"""The drafter that the documentation shows: it finds what it promises, and the text stays plain decoding's."""

import runpy
from pathlib import Path

import pytest

from decoder import SamplingParams, methods
from decoder.drafters import METHODS

from .conftest import VOCAB

EXAMPLE = Path(__file__).parents[2] / "docs/examples/bigram_drafter.py"


@pytest.fixture
def bigram():
    runpy.run_path(str(EXAMPLE))
    yield "bigram"
    del METHODS["bigram"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_plain_decodings(dec, bigram, temperature):
    sampling = SamplingParams(temperature=temperature, seed=3)
    prompt = [1, 2, 3, 1, 2]
    plain = dec.generate(prompt, 60, "ar", sampling)
    drafted = dec.generate(prompt, 60, bigram, sampling)
    assert drafted.token_ids == plain.token_ids


def test_a_text_that_repeats_itself_takes_fewer_steps(dec, bigram):
    """Only tokens 5 and 6 are allowed, and one follows the other: from the prompt on, every draft is right."""
    assert bigram in methods()

    def hook(context, logits):
        wanted = 5 if context[-1] == 6 else 6
        return logits.new_full((VOCAB,), -30.0).index_fill_(0, logits.new_tensor([wanted]).long(), 30.0)

    out = dec.generate([5, 6, 5, 6], 40, bigram, SamplingParams(temperature=0), logits_hook=hook)
    assert out.token_ids == [5, 6] * 20
    assert out.stats.steps == 10 and out.stats.accepted == 30
