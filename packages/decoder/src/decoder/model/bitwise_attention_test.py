"""The tests of attention by position: tokens alone and among others, of one text and of several."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from decoder.cache.blocks import Blocks
from decoder.cache.full import FullCache
from decoder.kernels import attention, bitwise_split_kv, native
from decoder.kernels.bitwise_attention import (
    COLUMNS,
    DEPTH,
    SHORT,
    SPARE,
    STRIDE,
    BitwiseText,
    Rule,
    empty_transposed,
    ends_in_one_softmax,
    tail_slots,
    wide_dtype,
)
from decoder.kernels.bitwise_batch import BatchedTexts
from decoder.kernels.bitwise_pass import attend_text, attend_texts
from decoder.kernels.bitwise_split_kv import SPLIT
from decoder.kernels.fast_paths import fault_of
from decoder.kernels.native_attention import NewTokens, native_attention
from decoder.kernels.self_test import ALLOWED, AttentionShape, difference
from decoder.sampling.token_tree import TokenTree

_MULTIPLES = (4, 8, 16)
_IN_ORDER = 160
# Numbers of cached tokens: where tails begin to move, over the range in which libraries switch between kernels, and on
# both sides of where the prefix is separated. In float64 one in twenty of them was seen to fail.
_LENGTHS = (1, DEPTH + 31, COLUMNS, *range(7, 720, 61), 1500, 3000, 4161, 6000, SHORT + DEPTH, SHORT + 108)
# For texts together, whose products must be those of each alone: on all sides of where sums begin to be cut in pieces.
_BATCHES = (
    (5, 90, 100, 3, 40, 60, 160, 20),
    (150, 230, 480, 520),
    (70, 250, 600, 900),
    (200, 1100, 2000, 2600),
    (100, 3400, 3800),
)
_MOST_COLUMNS, _MOST_UNEVEN = 2048, 1024
_NODES = (5, 13, 60, 30, 90)  # the widest is gathered under every rule
_CHAIN = 45
# For a device's kernels: where tails begin to move, on both sides of a split, and more splits than are merged at once.
_LENGTHS_ON_DEVICE = (1, DEPTH, COLUMNS, 700, SPLIT + DEPTH - 1, SPLIT + DEPTH + 1, 3000, 20 * SPLIT)
_NODES_ON_DEVICE = (60, 5, 16)
_CPU = torch.device("cpu")


class OneLayer:
    """The buffers of a cache with one layer, made from its keys [1, G, slots, D] and values [1, G, slots, Dv]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor):
        self.keys, self.values = key[None], value[None]
        self.block, self.place = None, 0

    def make_finite(self, end: int) -> None:
        """Nothing is left to do."""


_rules: dict[tuple[AttentionShape, int], tuple[Rule | None, str | None]] = {}


def attention_rule(shape: AttentionShape) -> tuple[Rule | None, str | None]:
    """The cheapest rule under which a token's attention has the same bits alone and with others.

    If no rule holds, it is None, and what is wrong is returned with it. The search is made once for each shape and
    number of threads.
    """
    key = shape, torch.get_num_threads()
    if key not in _rules:
        fault = None
        for multiple in _MULTIPLES:
            for in_order in (_IN_ORDER, 0):
                rule = Rule(multiple, in_order)
                by_blocks = partial(_by_blocks, rule)
                fault = fault_of(partial(attention_fault, shape, by_blocks))
                if fault is None:
                    if wide_dtype(shape.dtype) == shape.dtype:
                        # Only as far as one softmax reaches: the keys of longer texts are not transposed.
                        other_bits = fault_of(partial(attention_fault, shape, by_blocks, transposed=True))
                        rule = rule._replace(transposed=other_bits is None)
                    _rules[key] = _batched_rule(shape, rule) or rule, None
                    return _rules[key]
        _rules[key] = None, fault
    return _rules[key]


def _batched_rule(shape: AttentionShape, rule: Rule) -> Rule | None:
    """The same rule for texts that share products; None if they cannot."""
    if not rule.transposed or not rule.in_order:
        return None  # keys in blocks are transposed
    found: list[tuple[int, int]] = []
    if fault_of(partial(_find_uneven, shape, rule.multiple, found)) is not None:
        return None
    batched = rule._replace(batched=True, uneven=found[0])
    return batched if fault_of(partial(batch_fault, shape, batched)) is None else None


@torch.inference_mode()
def _find_uneven(shape: AttentionShape, multiple: int, found: list[tuple[int, int]]) -> str | None:
    """Add `Rule.uneven` to ``found``; what is wrong, in words, if sums do not keep their order at all.

    MKL was measured to sum 224 to 352 columns in two halves, and others in pieces whose borders are always the same.
    """
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(shape.kv_heads, multiple, _MOST_COLUMNS, generator=generator).to(shape.dtype)
    values = torch.randn(shape.kv_heads, _MOST_COLUMNS, shape.value_dim, generator=generator).to(shape.dtype)
    uneven = []
    for columns in range(STRIDE, _MOST_UNEVEN + 1, STRIDE):
        short = torch.bmm(weights[:, :, :columns].contiguous(), values[:, :columns])
        longer = weights.clone()
        longer[:, :, columns:] = 0
        if not torch.equal(torch.bmm(longer, values), short):
            uneven.append(columns)
    if uneven and uneven[-1] == _MOST_UNEVEN:
        return f"zeros behind {_MOST_UNEVEN} weights change their sum"
    found.append((uneven[0], uneven[-1] + STRIDE) if uneven else (0, 0))
    return None


@torch.inference_mode()
def batch_fault(shape: AttentionShape, rule: Rule) -> str | None:
    """Compare the tokens of several texts of different lengths, whose caches are in one block, with each alone."""
    generator = torch.Generator().manual_seed(3)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(shape.dtype)

    def attend(texts: Sequence[BitwiseText], query: torch.Tensor) -> torch.Tensor:
        return attend_texts(texts, query, shape.heads, 0, shape.dim**-0.5, all_together=True)

    trees = [tree_of(count) for count in (1, 2, 5, 1, 20)]
    for lengths in _BATCHES:
        blocks, texts, alone = Blocks(), [], []
        for number, length in enumerate(lengths):
            tree = trees[number % len(trees)]
            pairs = [random(1, 1, shape.kv_heads, length + len(tree), dim) for dim in (shape.dim, shape.value_dim)]
            cache = FullCache(max(lengths) + len(trees[-1]))
            cache.beside = blocks
            cache.prepare(1, spare=SPARE)
            cache.begin_with(pairs, shape, _CPU)
            cache.make_finite(length + len(tree) + SPARE)
            # Alone it has keys that lie as in a cache of its own.
            own = OneLayer(cache.keys[0].contiguous(), cache.values[0].contiguous())
            given = length, tree.depths, tree.ancestor_mask(), rule
            texts.append(BitwiseText(cache, *given))
            alone.append(BitwiseText(own, *given))
        if len(texts) > 4:
            # The cache of a text that takes no part stands between the others.
            del texts[1], alone[1]
        queries = [random(text.count, shape.heads, shape.dim) for text in texts]
        together = attend(texts, torch.cat(queries))
        if not any(isinstance(part, BatchedTexts) for part in texts[0].plan[1].parts):
            return f"texts of {lengths} tokens share no products"
        for text, query, found in zip(alone, queries, together.split([text.count for text in texts]), strict=True):
            if not torch.equal(attend([text], query), found):
                return f"attention gives a text of {text.length} tokens other bits alone than beside texts of {lengths}"
    return None


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sequence[int], torch.Tensor | None], torch.Tensor]
"""Attention by position of queries [1, H, T, D] over a cache's keys and values, where the new tokens' pairs stand
behind the cached ones: takes these three, the cached tokens' number, the depths of the new ones, and their mask."""


def _by_blocks(rule, query, key, value, length, depths, mask) -> torch.Tensor:
    text = BitwiseText(OneLayer(key, value), length, depths, mask, rule)
    return attend_text(text, query, 0, query.shape[-1] ** -0.5)


def _by_kernel(query, key, value, length, depths, mask) -> torch.Tensor:
    tails = tail_slots(length, depths, mask, len(depths)).to(query.device)
    return bitwise_split_kv.bitwise_split_kv_attention(query, key, value, tails, query.shape[-1] ** -0.5)


def _natively(query, key, value, length, depths, mask) -> torch.Tensor:
    heads = query[0].transpose(0, 1).contiguous()
    new = NewTokens(length, len(heads), mask)
    output = native_attention(heads, heads.shape[1], [key], [value], [new], query.shape[-1] ** -0.5)
    return output.view(*heads.shape[:2], -1).transpose(0, 1)[None]


def native_fault(shape: AttentionShape) -> str | None:
    """Test whether the native library gives tokens the same bits alone and with others."""
    split = native.library().keys_together()
    lengths = (1, split - 10, split - 1, split, 700, 1500, 8 * split - 30, 5000)
    return attention_fault(shape, _natively, lengths, _NODES)


@torch.inference_mode()
def kernel_fault(shape: AttentionShape, device: torch.device) -> str | None:
    """Test the kernels of a device against one softmax in float64, and the bits of tokens as `attention_fault` does."""
    generator = torch.Generator(device).manual_seed(1)
    for length in _LENGTHS_ON_DEVICE:
        query, key, value = (
            torch.randn(1, heads, slots, dim, generator=generator, device=device).to(shape.dtype)
            for heads, slots, dim in (
                (shape.heads, _CHAIN, shape.dim),
                (shape.kv_heads, length + _CHAIN, shape.dim),
                (shape.kv_heads, length + _CHAIN, shape.value_dim),
            )
        )
        actual = _by_kernel(query, key, value, length, range(_CHAIN), None)
        blocked = torch.ones(_CHAIN, _CHAIN, dtype=torch.bool, device=device).triu(1)
        expected = attention._one_softmax(query.double(), key.double(), value.double(), blocked, shape.dim**-0.5)
        fault = difference(actual, expected, ALLOWED[shape.dtype])
        if fault:
            return f"{fault} in attention by position behind {length} tokens"
    return attention_fault(shape, _by_kernel, _LENGTHS_ON_DEVICE, _NODES_ON_DEVICE, device)


@torch.inference_mode()
def attention_fault(
    shape: AttentionShape,
    attend: Attend,
    lengths: Sequence[int] = _LENGTHS,
    nodes: Sequence[int] = _NODES,
    device: torch.device = _CPU,
    transposed: bool = False,
) -> str | None:
    """Compare the tokens of trees and chains, behind texts of several lengths, with each token alone.

    With ``transposed`` they find their keys transposed, and each alone both so and as the keys lie elsewhere.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(shape.dtype)

    most = max(*nodes, _CHAIN)
    slots = max(lengths) + most + SPARE
    key, value = random(1, shape.kv_heads, slots, shape.dim), random(1, shape.kv_heads, slots, shape.value_dim)
    keys = [key, empty_transposed(key, *key.shape).copy_(key)] if transposed else [key]
    query = random(1, shape.heads, most, shape.dim)
    trees = [tree_of(count) for count in nodes]
    for number, length in enumerate(lengths):
        tree = trees[number % len(trees)]
        if transposed and not ends_in_one_softmax(length + most, shape.dtype):
            continue
        for depths, mask in ((tree.depths, tree.ancestor_mask()), (list(range(_CHAIN)), None)):
            found = attend(query[:, :, : len(depths)], keys[-1], value, length, depths, mask)
            for node in (0, 1, len(depths) // 2, len(depths) - 1):
                # Write the token's own path over the tree for a while, which saves a copy of the cache.
                end = length + depths[node] + 1
                others = [states[:, :, length:end].clone() for states in (*keys, value)]
                if mask is not None:
                    path = (length + mask[node].nonzero()[:, 0]).to(device)
                    for states in (*keys, value):
                        states[:, :, length:end] = states[:, :, path]
                own = [attend(query[:, :, node : node + 1], one, value, end - 1, [0], None) for one in keys]
                for states, other in zip((*keys, value), others, strict=True):
                    states[:, :, length:end] = other
                if any(not torch.equal(alone[0, :, 0], found[0, :, node]) for alone in own):
                    kind = "a run" if mask is None else "a tree"
                    return f"attention gives a token of {kind} of {len(depths)} behind {length} others other bits alone"
    return None


def tree_of(nodes: int) -> TokenTree:
    """A tree of a chain, with a sibling for each of its nodes."""
    tree, parent = TokenTree(0), 0
    for token in range(1, nodes):
        child = tree.add(parent, token, "test")
        parent = child if token % 2 else parent
    return tree
