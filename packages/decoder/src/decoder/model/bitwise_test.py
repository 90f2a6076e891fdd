"""The tests for `model.bitwise`: rows alone and among others, through attention, linear layers and whole passes."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHead
from decoder.kernels.bitwise_attention import COLUMNS, DEPTH, LONG, SPARE, BitwiseText, Rule
from decoder.kernels.fast_paths import fault_of
from decoder.kernels.packed_linear import fast_bfloat16, product_of, replaced
from decoder.kernels.self_test import AttentionShape
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
_LONG = (LONG + 90, 20011)  # products of matrices may sum long rows in another way than short ones
_NODES = (5, 13, 60, 30, 90)  # the widest is gathered under every rule
_CHAIN = 45
_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 14, 31, 37, 62, 100, 121, 242)
_MOST_ROWS = 320
_ROWS_OF_VOCABULARY = 48
_TEXT = 44
_DECODED = 3


class OneLayer:
    """The buffers of a cache with one layer, made from its keys [1, G, slots, D] and values [1, G, slots, Dv]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor):
        self.keys, self.values = key[None], value[None]


_rules: dict[tuple[AttentionShape, int], tuple[Rule | None, str | None]] = {}


def attention_rule(shape: AttentionShape) -> tuple[Rule | None, str | None]:
    """The cheapest rule under which a token's attention has the same bits alone and with others.

    If no rule holds, it is None, and what is wrong is returned with it. The search is made once for each shape and
    number of threads.
    """
    key = shape, torch.get_num_threads()
    if key not in _rules:
        fault = None
        # Without such instructions products of bfloat16 are slower than flash attention.
        fast = shape.dtype == torch.bfloat16 and fast_bfloat16(torch.device("cpu"))
        for multiple in _MULTIPLES:
            for in_order, products in itertools.product((_IN_ORDER, 0), (True, False) if fast else (False,)):
                rule = Rule(multiple, in_order, products)
                fault = fault_of(partial(attention_fault, shape, rule))
                if fault is None:
                    _rules[key] = rule, None
                    return _rules[key]
        _rules[key] = None, fault
    return _rules[key]


@torch.inference_mode()
def attention_fault(shape: AttentionShape, rule: Rule) -> str | None:
    """Compare the tokens of trees and chains, behind texts of several lengths, with each token alone."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(shape.dtype)

    lengths = (*_LENGTHS, *_LONG) if rule.products else _LENGTHS
    slots = max(lengths) + max(_NODES) + SPARE
    key, value = random(1, shape.kv_heads, slots, shape.dim), random(1, shape.kv_heads, slots, shape.value_dim)
    query, pairs = random(1, shape.heads, max(_NODES), shape.dim), OneLayer(key, value)
    trees = [_tree(nodes) for nodes in _NODES]
    for number, length in enumerate(lengths):
        tree = trees[number % len(trees)]
        for depths, mask in ((tree.depths, tree.ancestor_mask()), (list(range(_CHAIN)), None)):
            together = BitwiseText(pairs, length, depths, mask, rule)
            found = together.attend(query[:, :, : len(depths)], 0, shape.dim**-0.5)
            for node in (0, 1, len(depths) // 2, len(depths) - 1):
                # Write the token's own path over the tree for a while, which saves a copy of the cache.
                end = length + depths[node] + 1
                others = [states[:, :, length:end].clone() for states in (key, value)]
                for states in (key, value) if mask is not None else ():
                    states[:, :, length:end] = states[:, :, length + mask[node].nonzero()[:, 0]]
                plain = BitwiseText(pairs, end - 1, [0], None, rule)
                own = plain.attend(query[:, :, node : node + 1], 0, shape.dim**-0.5)
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


def _compared_products(target: "Target", rule: "PassRule") -> Iterator[_ComparedProduct]:
    """One product of each kind, whose layers must be replaced."""
    generator, tested = torch.Generator().manual_seed(0), set()
    for name, size, kind, product in _products(target):
        if kind in tested:
            continue
        tested.add(kind)
        rows = rule.most or (_ROWS_OF_VOCABULARY if kind[0] is target.lm_head else _MOST_ROWS)
        rows += rule.padding(rows)
        x = torch.randn(1, rows, size, generator=generator).to(target.lm_head.weight.dtype)
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


def _cache(target: "Target") -> FullCache:
    return FullCache(_TEXT + target.slots(3 * _DECODED))


def _tree(nodes: int) -> TokenTree:
    """A tree of a chain, with a sibling for each of its nodes."""
    tree, parent = TokenTree(0), 0
    for token in range(1, nodes):
        child = tree.add(parent, token, "test")
        parent = child if token % 2 else parent
    return tree
