"""Tree, n-gram table and caches against slow and obvious versions."""

import gc
import weakref
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import TokenSwiftOptions
from decoder.backends.base import BackendFault
from decoder.backends.forwards import replaced
from decoder.backends.native import packed_linear as linear
from decoder.backends.native.packed_linear import packing
from decoder.backends.native.packed_weight import Fp32Weight, NativeWeight, pack
from decoder.cache import partial as partial_cache
from decoder.cache.full import FullCache
from decoder.cache.layout import Layout
from decoder.cache.partial import PartialCache
from decoder.cache.streaming import RecentCache
from decoder.draft_heads import DraftHeads
from decoder.drafters.retrieval.ngram_table import NgramTable
from decoder.drafters.retrieval.suffix_index import SuffixIndex
from decoder.model.gguf import formats as gguf_formats
from decoder.model.rounding import rounded
from decoder.sampling.token_tree import TokenTree, rank_paths
from decoder.work import finish


def test_tree_merges_sources_as_a_trie():
    tree = TokenTree(9)
    tree.add_ranked([[1], [2, 3]], rank_paths((1, 2), 2), "heads")
    node = tree.add_path([1, 3, 4], "ngrams")
    assert tree.tokens == [9, 1, 2, 3, 4]
    assert tree.parents == [-1, 0, 1, 1, 3]
    assert tree.depths == [0, 1, 2, 2, 3]
    assert tree.depth == 3
    assert tree.sources[node] == {"ngrams"}
    assert tree.sources[3] == {"heads", "ngrams"}
    assert tree.child(1, 3) == 3
    assert tree.child(1, 7) is None


@pytest.mark.parametrize("tree, nodes", [((1, 3, 3, 3), 40), ((3, 3, 3, 3), 120), ((1, 9, 9, 9), 820), ((2,) * 7, 254)])
def test_branching_is_every_combination_of_ranks(tree, nodes):
    paths = rank_paths(tree, len(tree))
    assert len(paths) == len(set(paths)) == nodes
    assert set(paths) == {p for n in range(len(tree)) for p in product(*map(range, tree[: n + 1]))}
    assert rank_paths(tree, 2) == [path for path in paths if len(path) <= 2]


def test_explicit_paths_fill_in_their_prefixes_and_skip_missing_candidates():
    paths = rank_paths(((0, 2, 0), (1,), (0, 0), (1, 1)), 3)
    assert paths == [(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 2, 0)]
    tree = TokenTree(9)
    tree.add_ranked([[5, 6], [1, 2], [7]], paths, "heads")
    assert [[tree.tokens[n] for n in tree.path(leaf)] for leaf in tree.leaves()] == [[9, 5, 1], [9, 6, 2]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=6), st.integers(0, 6))
def test_a_pruned_tree_is_one_grown_from_shorter_paths(paths, depth):
    tree, short = TokenTree(9), TokenTree(9)
    for path in paths:
        tree.add_path(path, "heads")
        short.add_path(path[:depth], "heads")
    tree.prune(depth)
    assert vars(tree) == vars(short)


def test_ancestor_mask_of_the_papers_tree():
    tree = TokenTree(0)
    tree.add_ranked([[1], [2, 3, 4], [5, 6, 7], [8, 9, 10]], rank_paths((1, 3, 3, 3), 4), "heads")
    assert len(tree) == 41
    mask = tree.ancestor_mask()
    for node in range(41):
        ancestors, at = {node}, node
        while tree.parents[at] >= 0:
            at = tree.parents[at]
            ancestors.add(at)
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors


def test_a_chain_needs_no_mask_and_padding_sees_itself_alone():
    chain, tree = TokenTree(9), TokenTree(9)
    assert chain.ancestor_mask() is None
    chain.add_path([1, 2], "heads")
    assert chain.ancestor_mask() is None
    for path in ([1, 2], [3]):
        tree.add_path(path, "heads")
    assert tree.ancestor_mask().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    for grown in (chain, tree):
        for padding in (0, 1, 3):
            mask = grown.ancestor_mask(len(grown) + padding)
            seen = torch.ones(3, 3).tril() if grown is chain else tree.ancestor_mask()
            assert torch.equal(mask, torch.block_diag(seen, torch.eye(padding)).bool())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 4), st.integers(1, 6))
def test_ngram_table_equals_counting_anew(text, n, k):
    table = NgramTable(n)
    for token in text:
        table.extend([token])
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    counts, last = Counter(grams), {gram: i for i, gram in enumerate(grams)}
    for first in range(4):
        mine = sorted((g for g in counts if g[0] == first), key=lambda g: (-counts[g], -last[g]))
        assert table.most_frequent(first, k) == mine[:k]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 3), st.integers(1, 9))
def test_prompt_lookup_equals_searching_the_text(text, longest, count):
    index = SuffixIndex(longest, occurrences=1)
    index.extend(text)
    expected = []
    for n in range(min(longest, len(text) - 1), 0, -1):
        places = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
        if places:
            copied = list(text)
            for i in range(count):
                copied.append(copied[places[-1] + i])
            expected = copied[len(text) :]
            break
    assert index.chain(count) == expected


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 513])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_packed_linear_layers_equal_torch_and_each_row_stands_alone(with_native, rows, bias, dtype, tolerance):
    torch.manual_seed(0)
    module = torch.nn.Linear(12, 7, bias=bias).to(dtype)
    # Strides that the kernel does not ask for.
    module.weight.data = torch.randn(12, 7, dtype=dtype).T
    if bias:
        module.bias.data = torch.randn(14, dtype=dtype)[::2]
    x = torch.randn(1, rows, 12, dtype=dtype)
    expected = module(x)
    packed = finish(packing([module]))
    assert packed[module].__self__.kind is (NativeWeight if dtype == torch.bfloat16 else Fp32Weight)
    with torch.inference_mode(), replaced(packed):
        actual = module(x)
        alone = [module(x[:, row : row + 1]) for row in range(rows)]
    assert "forward" not in module.__dict__
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(actual[:, row : row + 1], one) for row, one in enumerate(alone))


def test_weights_are_packed_only_where_that_serves_and_fits(with_native, monkeypatch):
    layer = torch.nn.Linear(12, 7)

    class Own(torch.nn.Linear):
        pass

    assert finish(packing([layer, Own(12, 7), layer.double()])) == {}
    layer.float()
    memory = "decoder.backends.native.packed_linear.available_memory"
    monkeypatch.setattr(memory, lambda device: 2 * layer.weight.nbytes - 1)
    with pytest.raises(BackendFault, match="no memory for a packed copy"):
        finish(packing([layer]))
    monkeypatch.setattr(memory, lambda device: 10 * layer.weight.nbytes)
    assert list(finish(packing([layer]))) == [layer]
    monkeypatch.setattr(memory, lambda device: 0)
    assert list(finish(packing([layer]))) == [layer], "what is packed already takes nothing more"


def test_packed_layers_are_shared_renewed_and_freed(with_native):
    layer = torch.nn.Linear(12, 7)
    x = torch.randn(3, 12)
    first, second = finish(packing([layer])), finish(packing([layer]))
    assert first[layer] == second[layer]
    layer.weight.data.mul_(2)
    finish(packing([layer]))
    torch.testing.assert_close(first[layer](x), layer(x))
    gone = weakref.ref(layer)
    del layer, first, second
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_packed_again_when_and_only_when_they_have_changed(with_native, monkeypatch, dtype):
    layer, packings = torch.nn.Linear(8, 12).to(dtype), []
    monkeypatch.setattr(linear, "pack", lambda *given: packings.append(1) or pack(*given))
    x = torch.randn(3, 8, dtype=dtype)

    def swap(weight):
        weight[[0, 1]] = weight[[1, 0]]

    def least(weight):
        weight.view(torch.int16)[1, 1] += 1

    for change, count in ((None, 1), (None, 1), (swap, 2), (least, 3), (None, 3)):
        if change is not None:
            change(layer.weight.data)
        packed = finish(packing([layer]))
        assert len(packings) == count
        torch.testing.assert_close(packed[layer](x), layer(x), rtol=1e-2, atol=1e-2)


def attention_like(bias=(False, False, False), kind=torch.nn.Linear):
    parent = torch.nn.Module()
    for name, size, has in zip(("q_proj", "k_proj", "v_proj"), (12, 4, 6), bias, strict=True):
        setattr(parent, name, kind(8, size, bias=has))
    return parent


def packed_together(*layers):
    """The packed product of layers that read the same."""
    finish(linear.packing([], [layers]))
    return linear.joined(layers)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_read_the_same_can_be_one_product(with_native, bias):
    parent = attention_like((bias,) * 3)
    layers, x = list(parent.children()), torch.randn(1, 5, 8)
    product = packed_together(*layers)
    expected = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(product.product(x), expected, rtol=1e-5, atol=1e-5)
    layers[1].weight.data.mul_(2)
    assert packed_together(*layers) is product
    expected = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(product.product(x), expected, rtol=1e-5, atol=1e-5)
    # Of other layers, or of some of these, it is not.
    assert linear.joined(layers[:2]) is None and linear.joined([*layers[:2], torch.nn.Linear(8, 6)]) is None
    alone = finish(packing(layers))
    assert linear.joined(layers) is None
    for layer in layers:
        torch.testing.assert_close(alone[layer](x), layer(x), rtol=1e-5, atol=1e-5)


def test_the_copy_of_layers_that_are_one_product_goes_with_them(with_native):
    """At once, not when the collector comes by: it may be gigabytes."""
    parent = attention_like()
    gone = weakref.ref(packed_together(*parent.children()))
    del parent
    assert gone() is None


@pytest.mark.parametrize("kind", ["chained", "conditioned", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_heads_are_the_heads_and_no_layer_within_is_packed_beside_them(with_native, kind, dtype):
    """Also where the states are wider than the weights."""
    heads = DraftHeads(32, num_heads=2, kind=kind)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        # Weights are packed in four bits, which hold these. Inputs are rounded to eight.
        if parameter.ndim == 2:
            blocks = rounded(parameter, "Q4_1", search=False)
            parameter.data = gguf_formats.unpacked(blocks.numpy(), gguf_formats.FORMATS[3], torch.float32)
    heads, tolerance = heads.to(dtype), 0.03
    hidden = torch.randn(4, 32)
    embedding = torch.randn(4, 32) if heads.conditioned else None

    def assert_near(found, expected):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= tolerance * theirs.norm()

    expected = heads.advance(1, hidden, embedding)
    packed = finish(packing(heads.modules()))
    assert set(packed) == set(heads.heads)
    with torch.inference_mode(), replaced(packed):
        assert_near(heads.advance(1, hidden, embedding), expected)
        alone = heads.advance(1, hidden[0], None if embedding is None else embedding[0])
        assert_near(alone[:1], [expected[0][0]])
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(2)
    expected = heads.advance(1, hidden, embedding)
    finish(packing(heads.modules()))
    with torch.inference_mode(), replaced(packed):
        assert_near(heads.advance(1, hidden, embedding), expected)


class OwnLinear(torch.nn.Linear):
    pass


def with_own_layer(head):
    head.up = OwnLinear(16, 16, bias=False)


def with_bias(head):
    head.linear.bias = torch.nn.Parameter(torch.ones(8))


def with_other_norm(head):
    head.input_norm = torch.nn.Identity()


def with_other_forward(head):
    head.linear.forward = lambda x: 2 * x[..., :8]


def with_hook(head):
    head.down.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("change", [with_own_layer, with_bias, with_other_norm, with_other_forward, with_hook])
def test_a_head_that_the_user_has_changed_is_left_to_itself(with_native, change):
    torch.manual_seed(0)
    heads = DraftHeads(8, num_heads=2, kind="gated")
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    change(heads.heads[0])
    hidden, embedding = torch.randn(3, 8), torch.randn(3, 8)
    packed = finish(packing(heads.modules()))
    assert heads.heads[1] in packed
    with torch.inference_mode():
        expected = heads.advance(0, hidden, embedding)
        with replaced(packed):
            torch.testing.assert_close(heads.advance(0, hidden, embedding), expected, rtol=1e-5, atol=1e-5)


def filled_cache(length, groups=2, dim=4, layers=2, seed=0, room=8):
    generator = torch.Generator().manual_seed(seed)
    cache = FullCache(length + room)
    cache.prepare(Layout.of_full(layers))
    for layer in range(layers):
        pairs = torch.randn(2, 1, groups, length, dim, dtype=torch.float64, generator=generator)
        cache.update(*pairs, layer)
    cache.keep(range(length))
    return cache


def test_full_cache_keeps_the_accepted_nodes_and_forgets_the_rest():
    cache = filled_cache(5)
    before = cache.keys[1][:, :, :5].clone()
    new = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    for layer in range(2):
        seen, _ = cache.update(new + layer, -new, layer)
        assert seen.shape[2] == 11
    storage = cache.keys[1].data_ptr()
    cache.keep([0, 2, 5])
    assert cache.length == 8
    torch.testing.assert_close(cache.keys[1][:, :, :5], before)
    torch.testing.assert_close(cache.keys[1][:, :, 5:8], new[:, :, [0, 2, 5]] + 1)
    torch.testing.assert_close(cache.values[0][:, :, 5:8], -new[:, :, [0, 2, 5]])
    assert cache.keys[1].data_ptr() == storage
    # Nodes that are where they belong are not copied.
    writes = cache.keys._version
    cache.keep([0, 1])
    cache.keep([])
    assert cache.keys._version == writes
    with pytest.raises(ValueError, match="holds 13 positions"):
        cache.update(new, new, 0)


def test_a_growable_cache_keeps_its_pairs_and_grows_seldom():
    """Against the pairs concatenated; each is copied about twice, however long the text becomes."""
    cache, written, copied = FullCache(4, growable=True), [], 0
    cache.prepare(Layout.of_full(2))
    for step in range(600):
        new = torch.full((1, 2, 9, 3), float(step))
        before = cache.capacity
        for layer in range(2):
            cache.update(new + layer, -new, layer)
        copied += cache.length if cache.capacity != before else 0
        cache.keep([0, 3, 5, 6, 7, 8] if step % 2 else range(9))
        written += [step] * (6 if step % 2 else 9)
    expected = torch.tensor(written).float()
    assert cache.length == len(written) == 4500
    torch.testing.assert_close(cache.keys[1][0, 1, :4500, 2], expected + 1)
    torch.testing.assert_close(cache.values[0][0, 0, :4500, 0], -expected)
    assert copied < 2 * cache.length
    assert cache.capacity < 2 * cache.length


def test_memory_of_the_full_cache_is_what_the_formula_says(model, dec, prompt):
    """2 (keys, values) x layers x KV heads x (prompt + output + widest tree) x head size x bytes, from the start on."""
    seen = {}

    class Watched(FullCache):
        def keep(self, path):
            super().keep(path)
            seen[self.nbytes] = self.capacity

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoder.cache.stored.FullCache", Watched)
        dec.generate(prompt, 100, "tokenswift", options=TokenSwiftOptions(tree=(1, 3, 3, 3), ngrams=20))
    positions = 40 + 100 + 41 + 20 * 4
    assert seen == {2 * 2 * 2 * positions * 8 * 8: positions}


def queries_for(cache, heads=4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    dim = cache.keys[0].shape[-1]
    return {i: torch.randn(1, heads, 1, dim, dtype=torch.float64, generator=generator) for i in range(len(cache.keys))}


def test_partial_cache_holds_sink_then_most_important_pairs():
    """Selection against importance summed head by head with replicated keys."""
    full = filled_cache(40)
    queries = queries_for(full)
    partial = PartialCache(budget=12, sink=3)
    partial.append(full, queries)
    assert partial.rebuilds == 1
    for layer in range(2):
        for group in range(2):
            keys, values = full.keys[layer][0, group, :40], full.values[layer][0, group, :40]
            importance = sum(keys @ queries[layer][0, head, 0] for head in (2 * group, 2 * group + 1))
            ranked = sorted(range(3, 40), key=lambda i: -importance[i].item())[:9]
            expected = [0, 1, 2, *ranked]
            torch.testing.assert_close(partial.keys[layer][0, group, :12], keys[expected])
            torch.testing.assert_close(partial.values[layer][0, group, :12], values[expected])


def commit(full, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(full.keys)):
        full.update(*torch.randn(2, 1, 2, count, 4, dtype=torch.float64, generator=generator), layer)
    full.keep(range(count))


def test_accepted_pairs_replace_the_least_important_until_a_rebuild_is_due():
    full = filled_cache(40, room=960)
    partial = PartialCache(budget=12, sink=3)
    partial.append(full, queries_for(full))
    kept = partial.keys[0].clone()
    commit(full, 3, seed=5)
    partial.append(full, {})
    torch.testing.assert_close(partial.keys[0][:, :, 9:12], full.keys[0][:, :, 40:43])
    torch.testing.assert_close(partial.keys[0][:, :, :9], kept[:, :, :9])
    commit(full, 5, seed=6)
    partial.append(full, {})
    torch.testing.assert_close(partial.keys[0][:, :, 4:9], full.keys[0][:, :, 43:48])
    # The last pair that is not of the sink is replaced, too.
    commit(full, 1, seed=9)
    partial.append(full, {})
    torch.testing.assert_close(partial.keys[0][:, :, 3:4], full.keys[0][:, :, 48:49])
    assert partial.rebuilds == 1
    commit(full, 1, seed=7)
    partial.append(full, queries_for(full, seed=8))
    assert partial.rebuilds == 2

    static = PartialCache(budget=12, sink=3, dynamic=False)
    static.append(full, queries_for(full))
    for count, slots in ((4, slice(8, 12)), (5, slice(3, 8)), (1, slice(11, 12))):
        commit(full, count, seed=count)
        static.append(full, {})
        torch.testing.assert_close(static.keys[0][:, :, slots], full.keys[0][:, :, full.length - count : full.length])
    for step in range(30):
        commit(full, 1 + step % 4, seed=step)
        static.append(full, {})
    assert static.rebuilds == 1
    torch.testing.assert_close(static.keys[0][:, :, :3], full.keys[0][:, :, :3])


def test_more_accepted_tokens_than_there_are_slots_to_replace_leave_the_sink():
    full = filled_cache(40, room=40)
    static = PartialCache(budget=12, sink=3, dynamic=False)
    static.append(full, queries_for(full))
    commit(full, 11, seed=1)
    static.append(full, {})
    torch.testing.assert_close(static.keys[:, :, :, :3], full.keys[:, :, :, :3])
    torch.testing.assert_close(static.keys[:, :, :, 3:12], full.keys[:, :, :, 42:51])


def test_a_text_shorter_than_the_budget_is_held_whole():
    full = filled_cache(10)
    partial = PartialCache(budget=64, sink=16)
    partial.append(full, {})
    torch.testing.assert_close(partial.keys[1][:, :, :10], full.keys[1][:, :, :10])
    assert partial.rebuilds == 0
    key, _ = partial.update(torch.ones(1, 2, 1, 4).double(), torch.ones(1, 2, 1, 4).double(), 0)
    assert key.shape[2] == 11
    with pytest.raises(ValueError, match="room for 1 drafted tokens"):
        PartialCache(budget=2, sink=1).update(torch.ones(1, 2, 4, 4), torch.ones(1, 2, 4, 4), 0)


def test_drafted_tokens_that_are_held_are_counted_where_there_is_no_room_for_more():
    cache, new = PartialCache(budget=2, sink=1, room=5), torch.ones(1, 2, 4, 4)
    cache.update(new, new, 0)
    cache.hold(3)
    cache.update(new[:, :, :2], new[:, :, :2], 0)
    with pytest.raises(ValueError, match="room for 5 drafted tokens; 7 came"):
        cache.update(new, new, 0)


def test_a_text_that_just_fills_the_budget_is_held_whole():
    """Nothing is selected, so that no queries are needed; one more token makes it a selection."""
    full = filled_cache(12)
    partial = PartialCache(budget=12, sink=3)
    partial.append(full, {})
    assert partial.rebuilds == 0
    torch.testing.assert_close(partial.keys[:, :, :, :12], full.keys[:, :, :, :12])
    commit(full, 1, seed=1)
    partial.append(full, queries_for(full))
    assert partial.rebuilds == 1


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 21])
def test_importance_in_pieces_is_that_of_all_keys_at_once(monkeypatch, count):
    monkeypatch.setattr(partial_cache, "_PIECE", 8)
    generator = torch.Generator().manual_seed(count)
    query, keys = (torch.randn(1, 2, size, 4, dtype=torch.float64, generator=generator) for size in (1, count))
    expected = torch.einsum("bgqd,bgnd->bgn", query, keys)
    torch.testing.assert_close(partial_cache.products(query, keys), expected)


def test_importance_is_that_for_the_newest_committed_token():
    """Behind it in the pass stand tokens of the tree that were not accepted, whose queries are of no interest."""
    full = filled_cache(40)
    queries = queries_for(full)
    rejected = queries_for(full, seed=4)
    alone, among = PartialCache(budget=12, sink=3), PartialCache(budget=12, sink=3)
    alone.append(full, queries)
    among.append(full, {layer: torch.cat((queries[layer], rejected[layer]), 2) for layer in queries}, newest=0)
    torch.testing.assert_close(among.keys[:, :, :, :12], alone.keys[:, :, :, :12])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 3), st.integers(1, 9), st.booleans())
def test_recent_cache_holds_the_sink_and_the_newest(counts, sink, window, from_itself):
    """Whether its pairs come from a full cache or from its own drafted tokens, and with drafted tokens held."""
    full, recent = FullCache(200), RecentCache(budget=sink + window, sink=sink, room=9)
    for count in counts:
        numbers = torch.arange(full.length, full.length + count).double() + 1
        pairs = numbers.view(1, 1, count, 1).expand(1, 2, count, 3)
        full.update(pairs, -pairs, 0)
        full.keep(range(count))
        if from_itself:
            recent.update(pairs, -pairs, 0)
            recent.commit(count)
        else:
            recent.append(full)
        drafted = torch.full((1, 2, 4, 3), 500.0).double()
        recent.update(drafted, drafted, 0)
        recent.hold(3)
        key, value = recent.update(drafted[:, :, :2], drafted[:, :, :2], 0)
        kept = [p + 1 for p in range(full.length) if p < sink or p >= full.length - window]
        assert sorted(key[0, 1, :, 0].tolist()) == [*kept, *[500.0] * 5]
        assert sorted(-value[0, 0, : len(kept), 2]) == kept
        recent.hold(0)


def test_snapkv_keeps_what_the_end_of_the_prompt_attends_to():
    """Against attention head by head with replicated keys; afterwards the newest pairs go round as before."""
    full = filled_cache(60)
    queries = {
        layer: torch.randn(1, 4, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(layer))
        for layer in range(2)
    }
    snap = RecentCache(budget=20, sink=10, room=2)
    snap.append(full)
    snap.select(full, queries)
    for layer in range(2):
        for group in range(2):
            keys = full.keys[layer][0, group, :50]
            weights = sum(
                (queries[layer][0, head] @ keys.T / 2).softmax(-1).sum(0) for head in (2 * group, 2 * group + 1)
            )
            smoothed = [weights[max(0, i - 3) : i + 4].max().item() for i in range(50)]
            tenth = sorted(smoothed, reverse=True)[9]
            held = {
                int((full.keys[layer][0, group] == key).all(-1).nonzero()[0]) for key in snap.keys[layer][0, group, :10]
            }
            assert len(held) == 10 and all(smoothed[i] >= tenth for i in held)
            newest = {
                int((full.keys[layer][0, group] == key).all(-1).nonzero()[0])
                for key in snap.keys[layer][0, group, 10:20]
            }
            assert newest == set(range(50, 60))
    chosen = snap.keys[0][:, :, :10].clone()
    commit(full, 3, seed=1)
    snap.append(full)
    torch.testing.assert_close(snap.keys[0][:, :, :10], chosen)
    short = RecentCache(budget=80, sink=40, room=2)
    short.append(full)
    short.select(full, queries)
    torch.testing.assert_close(short.keys[0][:, :, :63], full.keys[0][:, :, :63])


def test_snapkv_takes_three_neighbours_on_each_side_of_an_important_pair():
    full, snap = FullCache(60), RecentCache(budget=17, sink=7, room=2)
    values = torch.arange(60.0).view(1, 1, 60, 1).expand(1, 1, 60, 4)
    full.update(torch.zeros(1, 1, 60, 4).index_fill(2, torch.tensor([30]), 2.0), values, 0)
    full.keep(range(60))
    snap.append(full)
    snap.select(full, {0: torch.ones(1, 1, 3, 4)})
    assert sorted(snap.values[0, 0, 0, :7, 0].tolist()) == [27, 28, 29, 30, 31, 32, 33]


@pytest.mark.parametrize("cache", [PartialCache(12, 3, room=5), RecentCache(12, 3, room=5)], ids=["partial", "recent"])
def test_memory_of_a_draft_cache_is_what_the_formula_says(cache):
    """2 (keys, values) x layers x KV heads x (budget + room) x head size x bytes, however long the text."""
    full = filled_cache(40)
    cache.append(full, queries_for(full)) if isinstance(cache, PartialCache) else cache.append(full)
    assert sum(buffer.nbytes for buffer in (*cache.keys, *cache.values)) == 2 * 2 * 2 * (12 + 5) * 4 * 8
