"""Attention over a cache against the obvious version: keys replicated, one masked softmax, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.backends.attention import tree_attention
from decoder.backends.native.native_attention import NewTokens
from decoder.backends.reference.attention import Masked
from decoder.cache.full import FullCache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}

# All scores at once, or cut along the queries.
WAYS = {"at once": 2**26, "rows": 1}


class Layer:
    layer_idx = 0


def use(way, monkeypatch):
    monkeypatch.setattr("decoder.backends.reference.attention._MAX_SCORES", WAYS[way])


def case(heads, groups, dim, cached, new, dtype=torch.float64, batch=1, seed=0):
    """Query, and key and value as views of a longer cache, in the layouts models and caches hand them in."""
    torch.manual_seed(seed)
    query = torch.randn(batch, new, heads, dim, dtype=torch.float64).to(dtype).transpose(1, 2)
    buffers = torch.randn(2, batch, groups, cached + new + 3, dim, dtype=torch.float64).to(dtype)
    # What lies behind the new entries belongs to nobody.
    buffers[:, :, :, cached + new :] = torch.nan
    return query, *buffers[:, :, :, : cached + new]


def random_tree_mask(new):
    mask = torch.eye(new, dtype=torch.bool)
    for node in range(1, new):
        mask[node] |= mask[torch.randint(node, ())]
    return mask


def obvious(query, key, value, mask, scaling):
    query, key, value = query.double(), key.double(), value.double()
    repeats, new, length = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    block = torch.ones(new, new, dtype=torch.bool).tril() if mask is None else mask
    visible = torch.cat((torch.ones(new, length - new, dtype=torch.bool), block), dim=1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def assert_obvious(query, key, value, mask=None, scaling=0.3):
    actual, weights = tree_attention(
        Layer, query, key, value, None, scaling=scaling, sequences=[Masked(query.shape[2], mask)]
    )
    assert weights is None
    assert actual.dtype == query.dtype
    assert actual.is_contiguous()
    allowed = TOLERANCE[query.dtype]
    torch.testing.assert_close(actual.double(), obvious(query, key, value, mask, scaling), rtol=allowed, atol=allowed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(4, 4), (6, 2), (8, 2), (3, 1), (1, 1)]),
    dim=st.sampled_from([8, 64, 80, 128, 256]),
    cached=st.one_of(st.integers(0, 40), st.sampled_from([511, 512, 513, 1025])),
    new=st.one_of(st.integers(1, 9), st.sampled_from([16, 33, 64, 65, 128])),
    batch=st.integers(1, 2),
    tree=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_equals_the_obvious_one(way, dtype, heads, dim, cached, new, batch, tree, seed):
    query, key, value = case(*heads, dim, cached, new, dtype, batch, seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(way, monkeypatch)
        assert_obvious(query, key, value, random_tree_mask(new) if tree else None, scaling=dim**-0.5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, groups, cached, new", [(2, 2, 100_000, 1), (6, 2, 49_999, 7), (3, 1, 10_000, 128)])
def test_attention_over_a_long_text_equals_the_obvious_one(heads, groups, cached, new, dtype):
    assert_obvious(*case(heads, groups, 64, cached, new, dtype), random_tree_mask(new))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("new", [1, 5])
def test_large_scores_on_either_side_neither_overflow_nor_vanish(way, new, monkeypatch):
    use(way, monkeypatch)
    query, key, value = case(4, 2, 64, cached=20, new=new)
    key[:, :, 3] *= 30
    key[:, :, -1] *= 30
    assert_obvious(query * 10, key, value, scaling=1.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", WAYS)
def test_many_small_weights_still_sum_to_one(way, dtype, monkeypatch):
    use(way, monkeypatch)
    query, key, _ = case(4, 2, 64, cached=20_000, new=3, dtype=dtype)
    actual, _ = tree_attention(Layer, query * 0, key, torch.ones_like(key), None, sequences=[Masked(3)])
    torch.testing.assert_close(actual, torch.ones_like(actual), rtol=4e-3 if dtype == torch.bfloat16 else 5e-4, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("new", [1, 6])
def test_any_layout_is_read_as_it_lies(way, new, monkeypatch):
    use(way, monkeypatch)
    plain = case(4, 2, 16, cached=9, new=new)
    for chosen in range(3):
        laid_out = [x.repeat_interleave(2, dim=-1)[..., ::2] if i == chosen else x for i, x in enumerate(plain)]
        assert laid_out[chosen].stride(-1) != 1
        assert_obvious(*laid_out)


def test_queries_are_left_for_the_drafter():
    query, key, value = case(4, 2, 8, cached=13, new=3)
    recorded = {}
    tree_attention(Layer, query, key, value, None, sequences=[Masked(3)], queries=recorded, observed=3)
    assert torch.equal(recorded[0], query)
    tree_attention(Layer, query, key, value, None, sequences=[Masked(3)], queries=recorded, observed=2)
    assert torch.equal(recorded[0], query[:, :, 1:])
    assert recorded[0].untyped_storage().nbytes() < query.untyped_storage().nbytes(), "a view keeps a whole chunk"


def allocated(function):
    """Bytes of all memory asked for during a call, freed since or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


@pytest.mark.parametrize("new", [1, 4, 64])
def test_no_step_copies_the_cache_or_holds_all_scores_of_a_long_text(with_native, new):
    heads, groups, dim, cached = 8, 2, 128, 20_000
    cache = FullCache(cached + new + 100)
    cache.update(*torch.randn(2, 1, groups, cached, dim), layer_idx=0)
    cache.keep(range(cached))
    query = torch.randn(1, heads, new, dim)
    fresh = torch.randn(2, 1, groups, new, dim)

    def step():
        key, value = cache.update(*fresh, layer_idx=0)
        assert key.data_ptr() == cache.keys[0].data_ptr()
        assert value.data_ptr() == cache.values[0].data_ptr()
        texts = [NewTokens(cached, new, None)]
        tree_attention(Layer, query, key, value, None, sequences=texts)

    assert allocated(step) < cache.keys[0].nbytes / 2


def test_the_memory_test_sees_a_copy():
    x = torch.randn(1, 2, 20_000, 128)
    assert allocated(lambda: x[:, :, :19_000].contiguous()) >= 2 * 19_000 * 128 * 4
