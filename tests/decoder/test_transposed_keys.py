"""Keys with the slots of each number beside each other: the same pairs and the same bits as in rows, only faster."""

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.cache import base
from decoder.cache.full import FullCache
from decoder.kernels.bitwise_attention import DEPTH, SHORT, SPARE, STRIDE
from decoder.kernels.self_test import AttentionShape
from decoder.model import bitwise_attention_test
from decoder.model.bitwise_attention_test import attention_rule

from .conftest import VOCAB, tiny_llama
from .test_blocks import LAYERS, SHAPE, holds

pytestmark = pytest.mark.usefixtures("without_native")


def filled(capacity, count, dtype=torch.float32, growable=False):
    """A cache with so many random pairs, and copies of these."""
    cache = FullCache(capacity, growable)
    cache.prepare(LAYERS, spare=SPARE, transposed=True)
    pairs = torch.randn(2, LAYERS, 1, 2, count, 8, generator=torch.Generator().manual_seed(count)).to(dtype).unbind()
    cache.begin_with(pairs, SHAPE._replace(dtype=dtype), torch.device("cpu"))
    return cache, pairs


def in_rows(cache):
    return cache.keys.stride(-1) == 1


def test_only_caches_that_one_softmax_covers_are_transposed():
    """Longer ones, and those in half precision, are read by a kernel that wants rows."""
    longest = SHORT + DEPTH + STRIDE - 1
    for capacity, dtype, rows in (
        (50, torch.float32, False),
        (longest, torch.float32, False),
        (longest + 1, torch.float32, True),
        (50, torch.bfloat16, True),
    ):
        cache, pairs = filled(capacity, 20, dtype)
        assert in_rows(cache) == rows
        assert cache.values.stride(-1) == 1
        assert holds(cache, pairs)


def test_a_path_is_kept_and_a_cache_that_grows_beyond_one_softmax_goes_on_in_rows():
    cache, pairs = filled(60, 40, growable=True)
    cache.begin(5)
    new = torch.randn(2, LAYERS, 1, 2, 5, 8)
    for layer in range(LAYERS):
        cache.update(*new[:, layer], layer)
    cache.keep([0, 2, 4])
    expected = [torch.cat((old, more[:, :, :, [0, 2, 4]]), 3) for old, more in zip(pairs, new, strict=True)]
    assert not in_rows(cache) and holds(cache, expected)
    cache.begin(1000)
    assert not in_rows(cache) and cache.capacity > 60 and holds(cache, expected)
    cache.begin(SHORT + DEPTH + STRIDE)
    assert in_rows(cache) and holds(cache, expected)


@pytest.fixture
def dec(monkeypatch):
    monkeypatch.setattr(bitwise_attention_test, "_rules", {})
    dec = Decoder(tiny_llama(torch.float32), bitwise=True)
    if not dec.target.bitwise.rule.transposed:
        pytest.skip("on this machine products with transposed keys have other bits")
    return dec


@pytest.fixture
def made(monkeypatch):
    """The buffers of caches that are made from now on."""
    buffers, buffer = [], base.LayeredCache._buffer
    monkeypatch.setattr(base.LayeredCache, "_buffer", lambda *args: (buffers.append(buffer(*args)), buffers[-1])[1])
    return buffers


@pytest.mark.parametrize("method", ["ar", "suffix", "magicdec"])
def test_a_text_has_the_bits_that_it_has_with_keys_in_rows(dec, made, monkeypatch, method):
    """So a text does not depend on how long it may become, nor on whether its length is open."""
    prompt = torch.randint(VOCAB, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    how = SamplingParams(seed=4, temperature=0.8)
    made.clear()
    found = dec.generate(prompt, 60, method, how, return_logprobs=True)
    assert any(one.stride(-1) != 1 for one in made)
    made.clear()
    monkeypatch.setattr(base, "ends_in_one_softmax", lambda capacity, dtype: False)
    in_rows = dec.generate(prompt, 60, "ar", how, return_logprobs=True)
    assert made and all(one.stride(-1) == 1 for one in made)
    assert (found.token_ids, found.logprobs) == (in_rows.token_ids, in_rows.logprobs)


def test_keys_stay_in_rows_where_their_products_fail_the_test(dec, made, monkeypatch):
    """One that sums transposed keys in another order must be seen at load."""
    honest = torch.baddbmm

    def other_order(start, rows, keys, **named):
        return honest(start, rows, keys, **named) * (1 + 2**-22 * (keys.stride(-1) == 1))

    monkeypatch.setattr(torch, "baddbmm", other_order)
    bitwise_attention_test._rules.clear()
    rule, fault = attention_rule(AttentionShape(6, 2, 16, 16, torch.float32))
    assert fault is None and not rule.transposed
    other = Decoder(tiny_llama(torch.float32, seed=1), bitwise=True)
    assert other.bitwise and not other.target.bitwise.rule.transposed
    made.clear()
    sampled = [other.generate([1, 2, 3] * 9, 40, method, SamplingParams(seed=1)) for method in ("ar", "suffix")]
    assert sampled[0].token_ids == sampled[1].token_ids
    assert made and all(one.stride(-1) == 1 for one in made)
    # Keys in the blocks of a batch are transposed, too, so that there are none.
    assert not other.target.bitwise.rule.batched
