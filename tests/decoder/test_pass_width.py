"""To how many tokens a short pass is padded: as many as are multiplied in the least time."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.model import bitwise_test
from decoder.model.bitwise import PassRule

from .conftest import all_heads, tiny_llama


class Clock:
    """A product whose time follows from its number of rows, and a clock that this moves."""

    def __init__(self, seconds):
        self.now, self._seconds = 0.0, seconds

    def __call__(self, x):
        self.now += self._seconds(x.shape[1])
        return x.repeat(1, 1, 4)


def least(monkeypatch, seconds, rule, layers=1, size=2**12):
    """The last layer's product stands twice, as two layers that are joined to one do."""
    clock = Clock(seconds)
    products = [("layer", size, ("kind",), partial(clock)) for _ in range(layers)]
    products.append(products[-1])
    monkeypatch.setattr(bitwise_test, "_products", lambda target: products)
    monkeypatch.setattr(bitwise_test, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return bitwise_test.cheaper_least(Decoder(tiny_llama()).target, rule)


def test_four_tokens_are_taken_where_they_are_faster(monkeypatch):
    assert least(monkeypatch, {1: 1.0, 4: 0.8}.__getitem__, PassRule()) == 4
    assert least(monkeypatch, {2: 1.2, 4: 1.0}.__getitem__, PassRule(least=2)) == 4
    # A difference that the clock may have made up is none.
    assert least(monkeypatch, {1: 1.0, 4: 0.97}.__getitem__, PassRule()) == 1
    assert least(monkeypatch, {1: 1.0, 4: 1.3}.__getitem__, PassRule()) == 1


def test_a_number_that_the_rule_does_not_have_is_not_taken(monkeypatch):
    assert least(monkeypatch, {3: 1.0, 6: 0.5}.__getitem__, PassRule(least=3, multiple=3)) == 6
    assert least(monkeypatch, {3: 1.0, 4: 0.5}.__getitem__, PassRule(least=3, multiple=3, free=frozenset({4}))) == 4


def test_weights_that_stay_in_the_caches_tell_nothing_and_large_models_are_not_timed_as_a_whole(monkeypatch):
    calls = []

    def seconds(rows):
        calls.append(rows)
        return 1.0 / rows

    assert least(monkeypatch, seconds, PassRule(), size=2**10) == 1
    calls.clear()
    assert least(monkeypatch, seconds, PassRule(), layers=100, size=2**13) == 4
    assert len(calls) < 40


def test_a_product_that_serves_several_layers_is_timed_once(monkeypatch):
    counts = []
    for layers in (1, 3):
        calls = []
        least(monkeypatch, lambda rows, calls=calls: calls.append(rows) or 1.0, PassRule(), layers)
        counts.append(len(calls))
    assert counts[1] == 3 * counts[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_text_is_the_same(monkeypatch, without_native, dtype):
    prompt, sampling = list(range(1, 40)), SamplingParams(temperature=0.8, seed=2)
    least, texts = [], []
    for wider in (1, 4):
        monkeypatch.setattr(
            bitwise_test,
            "cheaper_least",
            lambda target, rule, wider=wider: max(rule.least, wider + rule.padding(wider)),
        )
        model = tiny_llama(dtype)
        dec = Decoder(model, heads=all_heads(model), bitwise=True)
        outputs = [dec.generate(prompt, 40, method, sampling, return_logprobs=True) for method in ("ar", "auto")]
        outputs += dec.generate_batch([prompt, prompt], 40, "ar", sampling, return_logprobs=True)
        texts += [(output.token_ids, output.logprobs) for output in outputs]
        least.append(dec.target.bitwise.rule.least)
    assert least[0] < least[1] == 4
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("method", ["ar", "auto"])
def test_a_text_goes_on_when_another_rule_is_found_meanwhile(monkeypatch, without_native, method):
    """Its cache was made for passes of one token, and its last ones are padded."""
    prompt, sampling, wider = list(range(1, 40)), SamplingParams(temperature=0.8, seed=2), [0]

    def least(target, rule):
        return max(rule.least, wider[0])

    def change_the_model(now):
        wider[0] = now
        model.model.norm.register_forward_hook(lambda module, inputs, output: None)

    monkeypatch.setattr(bitwise_test, "cheaper_least", least)
    model = tiny_llama(torch.bfloat16)
    dec = Decoder(model, heads=all_heads(model), bitwise=True)
    expected = dec.generate(prompt, 20, "ar", sampling).token_ids
    chunks = dec.stream(prompt, 20, method, sampling)
    found = list(next(chunks).token_ids)
    change_the_model(70)  # more than the slots that `auto` has to spare
    assert dec.generate(prompt, 5, method, sampling).token_ids == expected[:5]
    assert dec.target.bitwise.rule.least == 70
    assert found + [token for chunk in chunks for token in chunk.token_ids] == expected
    # And between two texts.
    change_the_model(71)
    assert dec.generate(prompt, 20, method, sampling).token_ids == expected
