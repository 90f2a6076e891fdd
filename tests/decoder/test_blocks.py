"""Blocks: caches of several texts beside each other, places that are taken again, growth, and what admission counts."""

import gc
import weakref
from collections import Counter

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.admission import Admission, CacheBytes
from decoder.arguments import check_arguments
from decoder.cache import blocks as blocks_module
from decoder.cache.blocks import Blocks
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.full import FullCache
from decoder.kernels import bitwise_pass
from decoder.kernels.bitwise_batch import BatchedTexts
from decoder.kernels.self_test import AttentionShape
from decoder.model import bitwise_attention_test

from .conftest import VOCAB, tiny_llama

pytestmark = pytest.mark.usefixtures("without_native")

SHAPE = AttentionShape(4, 2, 8, 8, torch.float32)
LAYERS = 3
PAIR_BYTES = 2 * LAYERS * 2 * 8 * 4


def filled(blocks, count, capacity=300, seed=0, growable=False):
    """A cache with so many random pairs, and copies of these."""
    cache = FullCache(capacity, growable)
    cache.beside = blocks
    cache.prepare(LAYERS, spare=128)
    pairs = torch.randn(2, LAYERS, 1, 2, count, 8, generator=torch.Generator().manual_seed(seed)).unbind()
    cache.begin_with(pairs, SHAPE, torch.device("cpu"))
    return cache, pairs


def holds(cache, pairs):
    return all(torch.equal(*each) for each in zip(cache.copied(pairs[0].shape[3]), pairs, strict=True))


def test_caches_of_a_block_stand_beside_each_other_and_do_not_touch():
    blocks = Blocks()
    caches = [filled(blocks, 20 + number, seed=number) for number in range(10)]
    assert [cache.place for cache, _ in caches] == [*range(8), 0, 1]
    assert len({id(cache.block) for cache, _ in caches}) == 2
    for cache, _ in caches[::2]:
        cache.begin(2)
        for layer in range(LAYERS):
            cache.update(*torch.full((2, 1, 2, 2, 8), 7.0), layer)
        cache.keep([1])
    for cache, pairs in caches:
        assert holds(cache, pairs)
    assert (caches[4][0].keys[:, :, :, 24] == 7).all()
    # A text of another length class has a block of its own.
    assert filled(blocks, 600, 900)[0].block not in {cache.block for cache, _ in caches}


def test_the_place_of_an_ended_text_is_taken_again_and_a_block_goes_with_its_last_text():
    blocks = Blocks()
    caches = [filled(blocks, 20, seed=number)[0] for number in range(3)]
    block = caches[0].block
    del caches[1]
    gc.collect()
    assert blocks.idle_bytes(3000) == 512 * PAIR_BYTES and blocks.idle_bytes(300) == 0
    assert filled(blocks, 40)[0].place == 1
    again, pairs = filled(blocks, 30, seed=9)
    assert (again.block, again.place) == (block, 1) and holds(again, pairs)
    del caches, again, block
    gc.collect()
    assert not list(blocks._blocks)


def test_a_cache_that_grows_leaves_its_block():
    blocks = Blocks()
    neighbour, others = filled(blocks, 100, seed=1)
    cache, pairs = filled(blocks, 300, seed=2, growable=True)
    block = cache.block
    assert cache.keys.shape[3] == 512 and cache.place == 1
    cache.begin(200)
    assert cache.block is None and cache.keys.shape[3] >= 500 and holds(cache, pairs)
    assert block.free == {*range(1, 8)} and holds(neighbour, others)
    # Slots behind the text hold numbers, as attention by position needs it.
    cache.slots_for(*torch.zeros(2, 1, 2, 5, 8), 0)
    assert cache.keys[:, :, :, 300 : 305 + 128].isfinite().all()


def test_what_an_ended_text_has_left_does_not_reach_the_next_one_in_its_place():
    blocks = Blocks()
    staying, _ = filled(blocks, 20)
    ended, _ = filled(blocks, 200)
    ended.keys.fill_(torch.nan)
    ended.values.fill_(torch.inf)
    del ended
    gc.collect()
    cache, pairs = filled(blocks, 30, seed=3)
    assert (cache.block, cache.place) == (staying.block, 1)
    cache.slots_for(*torch.zeros(2, 1, 2, 5, 8), 0)
    cache.make_finite(400)
    assert holds(cache, pairs) and cache.keys[:, :, :, 35:400].isfinite().all()
    assert cache.values[:, :, :, 35:400].isfinite().all()


def test_what_does_not_suit_a_block_has_buffers_of_its_own(monkeypatch):
    """A long text; half precision, whose keys no kernel takes transposed; and where eight caches do not fit."""
    cache, pairs = filled(Blocks(), 50, capacity=blocks_module._LARGEST)
    assert cache.block is None and holds(cache, pairs)
    half = torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    assert Blocks().enter(half, half, LAYERS, 300) is None

    def full(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(blocks_module, "Block", full)
    cache, pairs = filled(Blocks(), 50)
    assert cache.block is None and holds(cache, pairs)


def test_all_texts_of_a_block_are_written_to_in_one_call_and_other_texts_as_ever():
    blocks, alone = Blocks(), Blocks()
    generator = torch.Generator().manual_seed(4)
    for capacities in ((300, 300, 300), (300, 900, 300), (300, 9000, 300)):
        together = [filled(blocks, 10 * number + 5, each, number)[0] for number, each in enumerate(capacities)]
        apart = [filled(alone, 10 * number + 5, each, number)[0] for number, each in enumerate(capacities)]
        counts = [1, 4, 2]
        flattened = FlattenedCaches(together, counts)
        for cache, count in zip(together, counts, strict=True):
            cache.begin(count)
        for layer in range(LAYERS):
            keys, values = torch.randn(2, 1, 2, 7, 8, generator=generator)
            seen = flattened.update(keys, values, layer)
            for number, (cache, key, value) in enumerate(
                zip(apart, keys.split(counts, 2), values.split(counts, 2), strict=True)
            ):
                cache.update(key, value, layer)
                assert seen[0][number].data_ptr() == together[number].keys[layer].data_ptr()
        assert bool(flattened._writes) == (9000 not in capacities)
        for one, other, count in zip(together, apart, counts, strict=True):
            end = one.length + count
            assert torch.equal(one.keys[:, :, :, :end], other.keys[:, :, :, :end])
            assert torch.equal(one.values[:, :, :, :end], other.values[:, :, :, :end])


class Text:
    """What admission knows of a sequence."""

    def __init__(self, cache):
        self.cache = cache


def test_admission_counts_what_ended_texts_have_left_behind():
    """Places that the candidate can take are no loss to it, others are."""
    blocks, admission = Blocks(), Admission(8, CacheBytes(10_000_000, 0))
    staying, leaving = (filled(blocks, 400, 700, seed)[0] for seed in range(2))
    running, same, other = (Text(cache) for cache in (staying, FullCache(700), FullCache(3000)))
    for one in (running, same, other):
        one.cache.beside = blocks
        admission.plan(one, lambda one: CacheBytes(2_900_000))
    assert admission([running], other)
    del leaving
    gc.collect()
    assert blocks.idle_bytes(3000) == 1024 * PAIR_BYTES > 200_000
    assert not admission([running], other)
    assert admission([running], same)
    # One that has its place takes no other.
    assert not admission([same], running)
    # Alone it grows out of its block, which goes then.
    admission.plan(running, lambda one: CacheBytes(5_900_000))
    assert admission([], running)


@pytest.fixture
def batched(monkeypatch):
    """How often how many texts have shared products, and a model whose texts may."""
    made = Counter()

    class Counted(BatchedTexts):
        def __init__(self, texts, per_head):
            made[len(texts)] += 1
            super().__init__(texts, per_head)

    monkeypatch.setattr(bitwise_attention_test, "_rules", {})
    model = tiny_llama(torch.float32)
    dec = Decoder(model, bitwise=True)
    if not dec.target.bitwise.rule.attention.batched:
        pytest.skip("on this machine sums over columns do not keep their order")
    monkeypatch.setattr(bitwise_pass, "BatchedTexts", Counted)
    return dec, made


@pytest.mark.parametrize("method", ["ar", "suffix"])
def test_texts_that_come_and_go_have_the_bits_they_have_alone(batched, method):
    """Texts join and leave, take places again, and grow across the borders of tails."""
    dec, made = batched
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (3, 150, 61, 40, 90, 8, 220)]
    lengths = [40, 12, 60, 7, 33, 50, 20]
    params = [SamplingParams(seed=seed, temperature=0.8) for seed in range(7)]
    together = dec.generate_batch(prompts, lengths, method, params, return_logprobs=True, max_batch=4)
    assert made[4] and made[3]
    for prompt, length, how, out in zip(prompts, lengths, params, together, strict=True):
        alone = dec.generate(prompt, length, "ar", how, return_logprobs=True)
        assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)


def test_texts_are_attended_to_one_by_one_where_products_for_several_fail_their_test(batched, monkeypatch):
    """The bits of a text would depend on the others; the test at load must see it."""
    _, made = batched
    honest = BatchedTexts.attend

    def other_order(self, texts, rows, per_head, layer, scaling):
        output = honest(self, texts, rows, per_head, layer, scaling)
        return output * (1 + 2**-22 * len(rows))

    monkeypatch.setattr(BatchedTexts, "attend", other_order)
    bitwise_attention_test._rules.clear()
    made.clear()
    other = Decoder(tiny_llama(torch.float32, seed=1), bitwise=True)
    rule = other.target.bitwise.rule
    assert rule is not None and not rule.attention.batched
    made.clear()
    outs = other.generate_batch([[1, 2, 3], [4, 5]], 10, "ar")
    assert not made
    assert [out.token_ids for out in outs] == [other.generate(p, 10, "ar").token_ids for p in ([1, 2, 3], [4, 5])]


def test_caches_go_with_their_texts_and_not_when_memory_is_looked_through(batched, monkeypatch):
    """What a pass has prepared for attention must not refer to itself: long caches would wait for the collector."""
    dec, _ = batched
    living = []
    init = FullCache.__init__

    def noted(self, *arguments, **named):
        init(self, *arguments, **named)
        living.append(weakref.ref(self))

    monkeypatch.setattr(FullCache, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        dec.generate([1, 2, 3], 8, "ar")
        dec.generate_batch([[1, 2, 3], [4] * 90, [5, 6]], 8, "ar", max_batch=2)
        assert len(living) >= 4 and not any(cache() for cache in living)
    finally:
        gc.enable()


def test_pairs_of_another_dtype_are_converted_for_every_layer():
    """As under autocast that is entered between two chunks of a stream."""
    caches = [filled(Blocks(), 5, seed=seed)[0] for seed in range(2)]
    for cache in caches:
        cache.begin(1)
    flattened = FlattenedCaches(caches, [1, 1])
    for layer in range(LAYERS):
        flattened.update(*torch.full((2, 1, 2, 2, 8), 1.5, dtype=torch.bfloat16), layer)
    assert all((cache.keys[:, :, :, 5] == 1.5).all() for cache in caches)


@pytest.mark.parametrize("new", [236, 283, 284, 796])
@pytest.mark.parametrize("method", ["ar", "suffix"])
def test_what_is_planned_for_a_text_is_its_place(batched, method, new):
    dec, _ = batched
    engine = dec.engine(Admission(4, CacheBytes(10**9)))
    arguments = check_arguments(dec, [1] * 100, new, method, None, None, None, True, False, None, 0)
    sequence = dec.sequence(engine, arguments)
    without_draft = dec.cache_bytes(arguments, sequence).device - dec.target.kv_bytes * 100
    sequence.cache.prepare(dec.target.layers, None, dec.target.spare)
    shape = dec.target.attention_shape
    sequence.cache._allocate(*torch.zeros(2, 1, shape.kv_heads, 1, shape.dim))
    assert sequence.cache.block is not None and without_draft == sequence.cache.nbytes
