"""The tests for `model.bitwise`: rows alone and among others, through attention, linear layers and whole passes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.cache.blocks import Blocks
from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHead
from decoder.kernels import attention, bitwise_split_kv
from decoder.kernels.bitwise_attention import (
    COLUMNS,
    DEPTH,
    SPARE,
    STRIDE,
    BitwiseText,
    Rule,
    tail_slots,
    wide_dtype,
)
from decoder.kernels.bitwise_batch import BatchedTexts
from decoder.kernels.bitwise_pass import attend_text, attend_texts
from decoder.kernels.bitwise_split_kv import SPLIT
from decoder.kernels.fast_paths import fault_of
from decoder.kernels.packed_linear import product_of, replaced
from decoder.kernels.self_test import ALLOWED, AttentionShape, difference
from decoder.model.fused_layer import FusedLayer
from decoder.sampling.token_tree import TokenTree

if TYPE_CHECKING:
    from decoder.model.bitwise import PassRule
    from decoder.model.target import Target

_MULTIPLES = (4, 8, 16)
_IN_ORDER = 160
# Numbers of cached tokens: where tails begin to move, over the range in which libraries switch between kernels, and on
# both sides of where the prefix is separated. In float64 one in twenty of them was seen to fail.
_LENGTHS = (1, DEPTH + 31, COLUMNS, *range(7, 720, 61), 1500, 3000, 4161, 4200, 6000)
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
_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 14, 31, 37, 62, 100, 121, 242)
_MOST_ROWS = 320
_ROWS_OF_VOCABULARY = 48
# For a device's kernels: where tails begin to move, on both sides of a split, and more splits than are merged at once.
_LENGTHS_ON_DEVICE = (1, DEPTH, COLUMNS, 700, SPLIT + DEPTH - 1, SPLIT + DEPTH + 1, 3000, 20 * SPLIT)
_NODES_ON_DEVICE = (60, 5, 16)
_CPU = torch.device("cpu")
_TEXT = 44
_DECODED = 3


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
                fault = fault_of(partial(attention_fault, shape, partial(_by_blocks, rule)))
                if fault is None:
                    _rules[key] = _batched_rule(shape, rule) or rule, None
                    return _rules[key]
        _rules[key] = None, fault
    return _rules[key]


def _batched_rule(shape: AttentionShape, rule: Rule) -> Rule | None:
    """The same rule for texts that share products; None if they cannot."""
    if wide_dtype(shape.dtype) != shape.dtype or not rule.in_order:
        return None
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

    trees = [_tree(count) for count in (1, 2, 5, 1, 20)]
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
) -> str | None:
    """Compare the tokens of trees and chains, behind texts of several lengths, with each token alone."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(shape.dtype)

    slots = max(lengths) + max(*nodes, _CHAIN) + SPARE
    key, value = random(1, shape.kv_heads, slots, shape.dim), random(1, shape.kv_heads, slots, shape.value_dim)
    query = random(1, shape.heads, max(*nodes, _CHAIN), shape.dim)
    trees = [_tree(count) for count in nodes]
    for number, length in enumerate(lengths):
        tree = trees[number % len(trees)]
        for depths, mask in ((tree.depths, tree.ancestor_mask()), (list(range(_CHAIN)), None)):
            found = attend(query[:, :, : len(depths)], key, value, length, depths, mask)
            for node in (0, 1, len(depths) // 2, len(depths) - 1):
                # Write the token's own path over the tree for a while, which saves a copy of the cache.
                end = length + depths[node] + 1
                others = [states[:, :, length:end].clone() for states in (key, value)]
                for states in (key, value) if mask is not None else ():
                    states[:, :, length:end] = states[:, :, (length + mask[node].nonzero()[:, 0]).to(device)]
                own = attend(query[:, :, node : node + 1], key, value, end - 1, [0], None)
                for states, other in zip((key, value), others, strict=True):
                    states[:, :, length:end] = other
                if not torch.equal(own[0, :, 0], found[0, :, node]):
                    kind = "a run" if mask is None else "a tree"
                    return f"attention gives a token of {kind} of {len(depths)} behind {length} others other bits alone"
    return None


@torch.inference_mode()
def products_fault(target: "Target", rule: "PassRule") -> str | None:
    """For each distinct linear layer, as a pass calls it, compare rows of a long input with the same in short ones."""
    counts = sorted({count + rule.padding(count) for count in _ROWS})
    with replaced(target.replacements().layers):
        for compared in _compared_products(target, rule):
            for count in counts:
                if compared.differs(count):
                    return f"{compared.name} gives a row other bits among {count} rows than among {compared.rows}"
            if rule.most is not None and compared.differs_in_place():
                return f"{compared.name} gives a row other bits at another place among {compared.rows} rows"
    return None


@torch.inference_mode()
def free_counts(target: "Target", rule: "PassRule") -> frozenset[int]:
    """The small numbers of rows, no multiples of the rule's, at which no product gives a row other bits."""
    free = {count for count in range(rule.least, _ROWS_OF_VOCABULARY) if count % rule.multiple}
    with replaced(target.replacements().layers):
        for compared in _compared_products(target, rule):
            free = {count for count in free if not compared.differs(count)}
    return frozenset(free)


class _ComparedProduct(NamedTuple):
    """A product, its output for a long input [1, rows, in], and the name of its layer."""

    name: str
    product: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    whole: torch.Tensor

    @property
    def rows(self) -> int:
        return self.x.shape[1]

    def differs(self, count: int) -> bool:
        """Whether the first or the last ``count`` rows have other bits alone."""
        parts = (slice(0, count), slice(self.rows - count, self.rows)) if count < self.rows else ()
        return any(not torch.equal(self.product(self.x[:, part].contiguous()), self.whole[:, part]) for part in parts)

    def differs_in_place(self) -> bool:
        """Whether a row has other bits at other places."""
        shifts = (1, self.rows // 2 + 1)
        return any(not torch.equal(self.product(self.x.roll(by, 1)), self.whole.roll(by, 1)) for by in shifts)


def _compared_products(target: "Target", rule: "PassRule") -> Iterator[_ComparedProduct]:
    """One product of each kind, whose layers must be replaced."""
    generator, tested = torch.Generator().manual_seed(0), set()
    for name, size, kind, product in _products(target):
        if kind in tested:
            continue
        tested.add(kind)
        rows = rule.most or (_ROWS_OF_VOCABULARY if kind[0] is target.lm_head else _MOST_ROWS)
        rows += rule.padding(rows)
        x = torch.randn(1, rows, size, generator=generator).to(target.device, target.lm_head.weight.dtype)
        yield _ComparedProduct(name, product, x, product(x))


def _products(target: "Target") -> Iterator[tuple[str, int, tuple, Callable[[torch.Tensor], torch.Tensor]]]:
    """The linear layers as a pass calls them: a name, the size of an input row, what equal ones share, and the call.

    Packed products are not rounded to the dtype of the model, which would hide most of their differences.
    """
    layers = target.replacements().layers
    within: set[torch.nn.Module] = set()
    for name, module in target.model.named_modules():
        fused = layers.get(module)
        if isinstance(fused, FusedLayer):
            within.update(module.modules())
            for part, product in fused.products.items():
                kind = part, product.inputs, *product.sizes, product.kind
                yield f"{name}, {part}", product.inputs, kind, product.unrounded
        weight, size = getattr(module, "weight", None), getattr(module, "in_features", None)
        if module in within or size is None or weight is None or isinstance(module, DraftHead):
            continue
        packed = product_of(module.__dict__.get("forward"))
        if packed is not None:
            kind = type(module), size, *packed.sizes, packed.kind
        else:
            kind = type(module), size, getattr(module, "out_features", None), "forward" in module.__dict__
        yield name, size, (module, *kind) if module is target.lm_head else kind, packed.unrounded if packed else module


@torch.inference_mode()
def model_fault(target: "Target") -> str | None:
    """Compare a text that is decoded token by token with the same text verified in a tree, and prefilled.

    This covers everything else that the model does to a row: norms, rotary embeddings, activations, the user's layers.
    """
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (_TEXT,), generator=generator).tolist()
    start = _TEXT - _DECODED
    with target.patched():
        plain = _cache(target)
        target.prefill(text[:start], plain)
        steps = []
        for token in text[start:]:
            [seen] = target.forward([TokenTree(token)], [plain])
            steps.append((seen.hidden[0].clone(), seen.logits[0].clone()))
            plain.keep([0])
        # A tree with the same tokens as a path, and other tokens in between.
        tree, path = TokenTree(text[start]), [0]
        for token in text[start + 1 :]:
            for other in range(2):
                tree.add(path[-1], (token + 1 + other) % target.vocab_size, "test")
            path.append(tree.add(path[-1], token, "test"))
        verified = _cache(target)
        target.prefill(text[:start], verified)
        [seen] = target.forward([tree], [verified])
        for alone, node in zip(steps, path, strict=True):
            of_node = seen.hidden[node], seen.logits[node]
            for name, own, in_tree in zip(("hidden states", "logits"), alone, of_node, strict=True):
                if not torch.equal(own, in_tree):
                    return f"a token's {name} have other bits in a tree of {len(tree)} nodes than alone"
        verified.keep(path)
        prefilled = _cache(target)
        target.prefill(text, prefilled)
        for other, words in ((verified, "verified"), (prefilled, "prefilled")):
            for mine, theirs in ((plain.keys, other.keys), (plain.values, other.values)):
                if not torch.equal(mine[:, :, :, :_TEXT], theirs[:, :, :, :_TEXT]):
                    return f"a text that is {words} has other keys or values than one that is decoded"
    return None


@torch.inference_mode()
def chunk_fault(target: "Target") -> str | None:
    """Compare a prompt that is one chunk, wider than other passes, with the same in passes of the usual width."""
    rule, generator = target.bitwise.rule, torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (rule.chunk,), generator=generator).tolist()
    caches = []
    for own in (rule, rule._replace(chunk=None)):
        target.bitwise.rule = own
        caches.append(FullCache(len(text)))
        with target.patched():
            target.prefill(text, caches[-1])
    whole, pieces = caches
    for one, other in ((whole.keys, pieces.keys), (whole.values, pieces.values)):
        if not torch.equal(one[:, :, :, : len(text)], other[:, :, :, : len(text)]):
            return f"a chunk of {len(text)} tokens has other keys or values than in pieces"
    return None


def _cache(target: "Target") -> FullCache:
    return FullCache(_TEXT + target.slots(3 * _DECODED))


def _tree(nodes: int) -> TokenTree:
    """A tree of a chain, with a sibling for each of its nodes."""
    tree, parent = TokenTree(0), 0
    for token in range(1, nodes):
        child = tree.add(parent, token, "test")
        parent = child if token % 2 else parent
    return tree
