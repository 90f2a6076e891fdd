"""Attention by position on a device: the kernels themselves, on a GPU or emulated on a CPU."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from decoder.backends.attention import Scores
from decoder.backends.base import AttentionShape
from decoder.backends.cuda import attention_check, bitwise_split_kv
from decoder.backends.cuda.bitwise_split_kv import bitwise_split_kv_attention
from decoder.backends.cuda.rotary import rotate
from decoder.backends.cuda.tails import COLUMNS, DEPTH, STRIDE, tail_slots
from decoder.backends.reference.attention import masked_softmax
from decoder.sampling.token_tree import TokenTree
from tests.decoder.conftest import some
from tests.decoder.triton_emulation import repair_emulation

repair_emulation()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}
SPLIT = 64  # of two blocks of keys, so that short texts have several
NODES = 16
SCALING = 0.3


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    monkeypatch.setattr(bitwise_split_kv, "SPLIT", SPLIT)


def case(length, dtype, heads=2, kv_heads=1, dim=16, value_dim=None, new=NODES, spare=3):
    """Query as models lay it out, and a cache with nothing but NaN behind the new tokens."""
    torch.manual_seed(length)
    like = dict(device=DEVICE, dtype=dtype)
    query = torch.randn(1, new, heads, dim, **like).transpose(1, 2)
    key, value = (torch.randn(1, kv_heads, length + new + spare, size, **like) for size in (dim, value_dim or dim))
    for buffer in (key, value):
        buffer[:, :, length + new :] = torch.nan
    return query, key, value


def random_tree(seed, nodes=NODES):
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree(0)
    while len(tree) < nodes:
        tree.add(int(torch.randint(max(0, len(tree) - 4), len(tree), (), generator=generator)), len(tree), "test")
    return tree


def attend(query, key, value, length, depths, mask=None):
    tails = tail_slots(length, depths, mask, query.shape[2]).to(DEVICE)
    return bitwise_split_kv_attention(query, key, value, tails, SCALING)


def alone(query, key, value, length, tree, node):
    """A node's attention in plain decoding, where its path is text."""
    path = tree.path(node)
    own = [pairs[:, :, : length + len(path)].clone() for pairs in (key, value)]
    for mine, theirs in zip(own, (key, value), strict=True):
        mine[:, :, length:] = theirs[:, :, [length + at for at in path]]
    return attend(query[:, :, node : node + 1], *own, length + len(path) - 1, [0])


def obvious(query, key, value, length, mask=None):
    """One masked softmax in float64."""
    new = query.shape[2]
    seen = torch.ones(new, new, dtype=torch.bool).tril() if mask is None else mask
    wide = (pairs[:, :, : length + new].double() for pairs in (key, value))
    return masked_softmax(query.double(), *wide, ~seen.to(DEVICE), Scores(SCALING))


# Where a tail begins to move and moves on, where a split begins, and where more splits than one tile holds are merged.
BORDERS = [0, 1, DEPTH, COLUMNS - 2, COLUMNS, SPLIT + DEPTH - 1, SPLIT + DEPTH, SPLIT + COLUMNS, 300, 1130]


# Where blocks begin does not depend on the type of what is read.
@pytest.mark.parametrize(
    "length, dtype",
    some(
        product(BORDERS, [torch.float32, torch.bfloat16]),
        [*product(BORDERS, [torch.float32]), *product([0, SPLIT + DEPTH, 300], [torch.bfloat16])],
    ),
    ids=str,
)
def test_a_node_has_the_bits_it_has_alone_and_those_of_softmax(length, dtype):
    query, key, value = case(length, dtype)
    tree = random_tree(length)
    found = attend(query, key, value, length, tree.depths, tree.ancestor_mask())
    expected = obvious(query, key, value, length, tree.ancestor_mask())
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for node in (0, NODES // 2, NODES - 1):
        own = alone(query, key, value, length, tree, node)
        assert torch.equal(own[:, :, 0], found[:, :, node]), node


@pytest.mark.parametrize("length", [0, COLUMNS - 2, SPLIT + DEPTH - 3])
def test_a_run_of_any_length_gives_the_same_bits(length):
    query, key, value = case(length, torch.float32)
    chain = attend(query, key, value, length, range(NODES))
    for first, end in ((0, 1), (3, 7), (NODES - 1, NODES)):
        part = attend(query[:, :, first:end], key, value, length + first, range(end - first))
        assert torch.equal(part, chain[:, :, first:end])


@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim, dtype",
    [
        (4, 2, 32, 32, torch.bfloat16),
        (3, 3, 8, 8, torch.float32),  # every head its own keys
        (3, 1, 24, 40, torch.float32),  # sizes that are no powers of two
        (2, 1, 64, 64, torch.float64),
    ],
)
def test_in_all_shapes(heads, kv_heads, dim, value_dim, dtype):
    """Several row blocks, grouped heads, and values of another size."""
    length, nodes = 200, 36 if dtype == torch.bfloat16 else 6
    query, key, value = case(length, dtype, heads, kv_heads, dim, value_dim, nodes)
    tree = random_tree(dim, nodes)
    found = attend(query, key, value, length, tree.depths, tree.ancestor_mask())
    expected = obvious(query, key, value, length, tree.ancestor_mask())
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for node in (1, nodes - 1):
        assert torch.equal(alone(query, key, value, length, tree, node)[:, :, 0], found[:, :, node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_capacity_nor_padding_nor_layout_change_a_bit(dtype):
    length = 250
    query, key, value = case(length, dtype, new=4, spare=0)
    expected = attend(query, key, value, length, range(4))
    for spare in (1, 60, 1500):
        # As in a buffer of all layers, where a layer's pairs begin anywhere.
        buffers = [torch.full((3, 1, 1, length + 4 + spare, 16), torch.nan).to(x) for x in (key, value)]
        for buffer, pairs in zip(buffers, (key, value), strict=True):
            buffer[1, :, :, : length + 4] = pairs
        assert torch.equal(attend(query, *(buffer[1] for buffer in buffers), length, range(4)), expected)
    padded = torch.cat((query, query[:, :, :1].expand(-1, -1, 8, -1)), 2)
    pairs = (torch.cat((x, x[:, :, :8]), 2) for x in (key, value))
    found = attend(padded, *pairs, length, range(4))
    assert torch.equal(found[:, :, :4], expected) and found.isfinite().all()
    assert torch.equal(attend(query, *(x.mT.contiguous().mT for x in (key, value)), length, range(4)), expected)


def test_many_tokens_in_parts(monkeypatch):
    """A chunk of a prompt attends to itself as well, in more launches than one."""
    monkeypatch.setattr(bitwise_split_kv, "_TOKENS", 8)
    query, key, value = case(90, torch.float32, heads=1, new=70)
    whole = attend(query, key, value, 90, range(70))
    torch.testing.assert_close(whole.double(), obvious(query, key, value, 90), rtol=5e-6, atol=5e-6)
    monkeypatch.undo()
    monkeypatch.setattr(bitwise_split_kv, "SPLIT", SPLIT)
    part = attend(query[:, :, 65:], key, value, 155, range(5))
    assert torch.equal(part, whole[:, :, 65:])


def test_where_tokens_look():
    """Below T(p) at every slot; from there on at the committed text, their ancestors and themselves, in this order."""
    for length in (0, 5, 70, 100, 500):
        tree = random_tree(length)
        slots = tail_slots(length, tree.depths, tree.ancestor_mask(), NODES + 2)
        for node, depth in enumerate(tree.depths):
            start = STRIDE * (max(0, length + depth - DEPTH) // STRIDE)
            expected = [*range(start, length), *(length + at for at in tree.path(node))]
            assert slots[node].tolist() == [start, *expected] + [-1] * (COLUMNS - len(expected))
        assert all(slots[row, :3].tolist() == [0, length + row, -1] for row in (NODES, NODES + 1))
    chain = tail_slots(80, range(40), None, 40)
    assert torch.equal(chain, tail_slots(80, range(40), torch.ones(40, 40, dtype=torch.bool).tril(), 40))


SHAPE = AttentionShape(2, 1, 16, 16, torch.float32)


@pytest.fixture
def short_test(monkeypatch):
    """The test at load, of as much as an emulation does in a second."""
    for name, value in dict(_LENGTHS=(SPLIT + DEPTH + 1, 150), _NODES=(9, 3), _CHAIN=5).items():
        monkeypatch.setattr(attention_check, name, value)


def test_the_test_at_load_passes(short_test):
    assert attention_check.kernel_fault(SHAPE, DEVICE) is None


def test_splits_that_follow_from_the_number_of_rows_are_caught(short_test, monkeypatch):
    attention = bitwise_split_kv_attention

    def leaning(query, key, value, tails, scaling):
        monkeypatch.setattr(bitwise_split_kv, "SPLIT", SPLIT if query.shape[2] == 1 else SPLIT // 2)
        return attention(query, key, value, tails, scaling)

    monkeypatch.setattr(bitwise_split_kv, "bitwise_split_kv_attention", leaning)
    assert "other bits alone" in attention_check.kernel_fault(SHAPE, DEVICE)


def test_wrong_numbers_are_caught(short_test, monkeypatch):
    attention = bitwise_split_kv_attention
    # For every row in the same way, so that bits alone would not tell.
    monkeypatch.setattr(
        bitwise_split_kv, "bitwise_split_kv_attention", lambda q, k, v, tails, s: attention(q, k, v.flip(2), tails, s)
    )
    assert "differ from the plain function's" in attention_check.kernel_fault(SHAPE, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_is_rotated_as_it_is_alone(dtype):
    torch.manual_seed(0)
    q, k = (torch.randn(1, NODES, heads, 16, device=DEVICE, dtype=dtype).transpose(1, 2) for heads in (3, 1))
    cos, sin = (torch.randn(1, NODES, 16, device=DEVICE, dtype=dtype) for _ in range(2))
    together = rotate(q, k, cos, sin)
    for token in range(NODES):
        at = slice(token, token + 1)
        for one, all_of_them in zip(rotate(q[:, :, at], k[:, :, at], cos[:, at], sin[:, at]), together, strict=True):
            assert torch.equal(one, all_of_them[:, :, at])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(32, 8, 128), (9, 3, 64), (14, 2, 64), (8, 2, 256)])
def test_passes_its_own_test_on_a_gpu(monkeypatch, heads, kv_heads, dim, dtype):
    monkeypatch.undo()
    assert attention_check.kernel_fault(AttentionShape(heads, kv_heads, dim, dim, dtype), DEVICE) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_graph_follows_the_text_with_the_bits_of_a_launch(monkeypatch, dtype):
    monkeypatch.undo()
    query, key, value = case(40_000, dtype, 32, 8, 128)
    trees = [(length, random_tree(length)) for length in (0, 95, 1087, 5000, 40_000)]
    slots = [tail_slots(length, tree.depths, tree.ancestor_mask(), NODES).to(DEVICE) for length, tree in trees]
    key[key.isnan()] = value[value.isnan()] = 0
    tails = slots[0].clone()
    bitwise_split_kv_attention(query, key, value, tails, SCALING)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = bitwise_split_kv_attention(query, key, value, tails, SCALING)
    for (length, tree), own in zip(trees, slots, strict=True):
        tails.copy_(own)
        graph.replay()
        assert torch.equal(output, bitwise_split_kv_attention(query, key, value, own, SCALING))
        for node in (0, NODES - 1):
            assert torch.equal(alone(query, key, value, length, tree, node)[:, :, 0], output[:, :, node])
