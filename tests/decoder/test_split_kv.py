"""Split-KV attention against the obvious version in float64: on a GPU, or emulated on a CPU."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is built for Linux only")

from decoder.backends.base import AttentionShape
from decoder.backends.cuda.kernel_check import split_kv_fault
from decoder.backends.cuda.split_kv import Device, launch_shape, split_kv_attention, unavailable
from tests.decoder.compile_kernels import GPUS
from tests.decoder.conftest import some
from tests.decoder.triton_emulation import repair_emulation

repair_emulation()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EVERY_DAY = (torch.float32, torch.bfloat16)
SCALING = 0.3


def case(heads, groups, dim, cached, new, dtype=torch.float32, batch=1, value_dim=None, spare=3, seed=0):
    """Query as models lay it out, and a cache with nothing but NaN behind the new tokens."""
    torch.manual_seed(seed)
    like = dict(device=DEVICE, dtype=dtype)
    query = torch.randn(batch, new, heads, dim, **like).transpose(1, 2)
    key, value = (torch.randn(batch, groups, cached + new + spare, size, **like) for size in (dim, value_dim or dim))
    for buffer in (key, value):
        buffer[:, :, cached + new :] = torch.nan
    return query, key, value


def random_mask(new):
    """Each new token sees itself and any of those before it."""
    return (torch.rand(new, new) < 0.5).tril().fill_diagonal_(True).to(DEVICE)


def length(cached):
    return torch.tensor([cached], device=DEVICE)


def obvious(query, key, value, cached, mask, scaling=SCALING):
    """Keys replicated, one masked softmax, in float64; one head at a time, for long texts."""
    new = query.shape[2]
    repeats, end = query.shape[1] // key.shape[1], cached + new
    block = query.new_ones(new, new, dtype=torch.bool).tril() if mask is None else mask
    visible = torch.cat((block.new_ones(new, cached), block), dim=1)
    heads = []
    for head in range(query.shape[1]):
        keys, values = (x[:, head // repeats, :end].double() for x in (key, value))
        scores = (query[:, head].double() @ keys.mT * scaling).masked_fill(~visible, -torch.inf)
        heads.append(scores.softmax(-1).nan_to_num(0.0) @ values)
    return torch.stack(heads, dim=1)


def assert_obvious(query, key, value, cached, mask=None):
    actual = split_kv_attention(query, key, value, length(cached), mask, SCALING)
    assert actual.dtype == query.dtype
    allowed = TOLERANCE[query.dtype]
    expected = obvious(query, key, value, cached, mask)
    # The mean of many values is small, and so must be its error.
    scale = expected.square().mean().sqrt().clamp(max=1.0).item()
    torch.testing.assert_close(actual.double(), expected, rtol=allowed, atol=allowed * scale)


@pytest.mark.parametrize(
    "dtype",
    # float64 is also in the tests of the capacity and of random shapes.
    [pytest.param(dtype, marks=[] if dtype in EVERY_DAY else pytest.mark.slow, id=str(dtype)) for dtype in TOLERANCE],
)
@pytest.mark.parametrize(
    "heads, groups, dim, cached, new",
    [
        (3, 3, 16, 150, 1),  # every head its own keys
        (4, 2, 64, 100, 5),
        (7, 1, 32, 90, 9),  # one KV head, and rows that fill no block
        (5, 1, 80, 70, 3),  # a head size that is no power of two
        (2, 1, 8, 20, 2),  # smaller than a block
        (2, 1, 128, 70, 33),
        (2, 2, 256, 40, 1),
    ],
)
def test_as_obvious_in_all_shapes_and_types(heads, groups, dim, cached, new, dtype):
    query, key, value = case(heads, groups, dim, cached, new, dtype, batch=2 if new == 5 else 1)
    assert_obvious(query, key, value, cached, random_mask(new))
    # What is seen does not depend on the type of what is read.
    if dtype == torch.float32:
        assert_obvious(query, key, value, cached)


ENDS = [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 191]


@pytest.mark.parametrize(("cached", "tree"), [*product(ENDS, [False]), *product([0, 33, 64, 191], [True])])
def test_as_obvious_at_every_end_of_a_block(cached, tree):
    query, key, value = case(4, 2, 32, cached, 3, spare=70 if tree else 0)
    assert_obvious(query, key, value, cached, random_mask(3) if tree else None)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (3, 3)]),
    st.sampled_from([(8, 8), (16, 40), (24, 16), (64, 64)]),
    st.integers(0, 200),
    st.integers(1, 40),
    st.integers(0, 150),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_as_obvious_in_random_shapes(heads, dims, cached, new, spare, dtype, tree):
    query, key, value = case(*heads, dims[0], cached, new, dtype, value_dim=dims[1], spare=spare)
    assert_obvious(query, key, value, cached, random_mask(new) if tree else None)


def test_one_launch_serves_every_length():
    query, key, value = case(4, 2, 16, cached=160, new=4)
    for cached in (0, 50, 100, 160):
        assert_obvious(query, key, value, cached)


def test_prefill_of_many_rows_over_a_short_cache():
    query, key, value = case(4, 1, 16, cached=70, new=130)
    assert_obvious(query, key, value, 70)


def test_views_of_larger_buffers_are_read_where_they_lie():
    layers = torch.full((2, 1, 160, 3, 32), torch.nan, device=DEVICE)  # [B, C, G, D], wider than what is used
    key, value = (layers[layer, :, :, :2, :24].transpose(1, 2) for layer in range(2))
    key[:, :, :97], value[:, :, :97] = torch.randn(2, 1, 2, 97, 24, device=DEVICE)
    query = torch.randn(1, 5, 4, 3, 24, device=DEVICE)[:, :, :, 1].transpose(1, 2)
    wide = torch.ones(9, 9, dtype=torch.bool, device=DEVICE)
    wide[2:7, 3:8] = random_mask(5)
    lengths = torch.tensor([5, 92, 7], device=DEVICE)
    actual = split_kv_attention(query, key, value, lengths[1:2], wide[2:7, 3:8], SCALING)
    expected = obvious(query, key, value, 92, wide[2:7, 3:8])
    torch.testing.assert_close(actual.double(), expected, rtol=5e-5, atol=5e-5)


def test_query_numbers_need_not_lie_next_to_each_other():
    query, key, value = case(4, 2, 16, cached=40, new=3)
    assert_obvious(query.mT.contiguous().mT, key, value, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_that_sees_nothing_is_zero(dtype):
    query, key, value = case(4, 2, 16, cached=0, new=5, dtype=dtype)
    mask = random_mask(5)
    mask[3] = False
    assert_obvious(query, key, value, 0, mask)


def test_high_scores_neither_overflow_nor_lose_the_rest():
    query, key, value = case(2, 1, 16, cached=150, new=2)
    key[:, :, 10] *= 1000
    assert_obvious(query, key, value, 150)


def test_same_call_same_bits():
    query, key, value = case(4, 2, 64, cached=190, new=6, dtype=torch.bfloat16)
    first, second = (split_kv_attention(query, key, value, length(190), None, SCALING) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16, torch.float64], [torch.bfloat16]))
def test_the_bits_of_a_result_do_not_depend_on_the_capacity(dtype):
    """One text over buffers of several sizes: neither the number of splits nor their borders may follow from these."""
    for new, cached, mask in ((1, 90, None), (5, 200, random_mask(5))):
        query, key, value = case(4, 2, 32, cached, new, dtype, spare=0)
        expected = split_kv_attention(query, key, value, length(cached), mask, SCALING)
        for spare in (60, 1000):
            buffers = (torch.cat((x, x.new_full((1, 2, spare, 32), torch.nan)), 2) for x in (key, value))
            assert torch.equal(split_kv_attention(query, *buffers, length(cached), mask, SCALING), expected)


def test_for_cuda_alone():
    assert unavailable(torch.device("cpu")) == "for CUDA only"
    assert unavailable(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_passes_its_own_test_on_a_gpu():
    for dtype in TOLERANCE:
        assert split_kv_fault(AttentionShape(32, 8, 128, 128, dtype), torch.device("cuda", 0)) is None


@pytest.mark.parametrize("gpu", GPUS)
def test_launches_fit_the_device_and_fill_it(gpu):
    capability, multiprocessors, shared = GPUS[gpu]
    device = Device(multiprocessors, shared, hopper=capability == 90)
    for dtype in TOLERANCE:
        for dim in (8, 64, 96, 128, 256):
            for rows in (1, 4, 7, 28, 96, 256, 2048):
                shape = launch_shape(rows, 8, dim, dim, dtype, device)
                # What no stage is left to take from is two tiles of what is next: 64 KiB at most.
                assert shape.stages == 1 or shape.shared_memory(dim, dim, dtype, device.hopper) <= shared
                programs = -(-rows // shape.block_m) * 8 * shape.splits
                assert programs >= multiprocessors / 2
                assert shape.splits == 1 or programs <= multiprocessors * 8 // shape.warps


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, groups, dim, dtypes",
    [
        (8, 8, 64, [HALF, DOUBLE]),
        (14, 2, 64, [HALF]),
        (32, 8, 80, [HALF, SINGLE]),
        (16, 16, 128, [HALF, SINGLE]),
        (32, 8, 128, [HALF, SINGLE, DOUBLE]),
        (28, 4, 128, [HALF]),
        (8, 2, 256, [HALF, DOUBLE]),
        (8, 1, 256, [HALF, SINGLE]),
    ],
)
@pytest.mark.parametrize("new", [1, 7, 64, 128])
def test_as_obvious_on_a_gpu(new, heads, groups, dim, dtypes):
    for dtype in dtypes:
        for cached in (1, 63, 1000, 32_768, 100_000):
            query, key, value = case(heads, groups, dim, cached, new, dtype)
            assert_obvious(query, key, value, cached, random_mask(new))
            assert_obvious(query, key, value, cached)


@pytest.mark.gpu
def test_as_obvious_where_offsets_pass_31_bits():
    new, cached = 4, 131_072 - 4
    buffers = torch.randn(2, 20, 8, cached + new, 128, device=DEVICE, dtype=torch.bfloat16)
    query = torch.randn(20, 32, new, 128, device=DEVICE, dtype=torch.bfloat16)
    actual = split_kv_attention(query, *buffers, length(cached), None, SCALING)
    expected = obvious(query[-1:], *buffers[:, -1:], cached, None)
    torch.testing.assert_close(actual[-1:].double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 24, 64])
def test_a_captured_graph_follows_the_length(new):
    query, key, value = case(32, 8, 128, cached=40_000, new=new, dtype=torch.bfloat16)
    committed, mask = length(0), random_mask(new)
    split_kv_attention(query, key, value, committed, mask, SCALING)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = split_kv_attention(query, key, value, committed, mask, SCALING)
    for cached in (0, 1, 129, 5_000, 40_000):
        committed.fill_(cached)
        graph.replay()
        expected = obvious(query, key, value, cached, mask)
        torch.testing.assert_close(output.double(), expected, rtol=3e-2, atol=3e-2)
        assert torch.equal(output, split_kv_attention(query, key, value, committed, mask, SCALING))


@pytest.mark.gpu
def test_the_host_never_waits_for_the_length():
    query, key, value = case(32, 8, 128, cached=1000, new=8, dtype=torch.bfloat16)
    committed, mask = length(1000), random_mask(8)
    split_kv_attention(query, key, value, committed, mask, SCALING)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        split_kv_attention(query, key, value, committed, mask, SCALING)
    finally:
        torch.cuda.set_sync_debug_mode("default")
