"""The tests for `backends.bitwise`: rows alone and among others, through linear layers and whole passes.

Those of attention are in `backends.attention_check`.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.backends.native.fused_layer import FusedLayer
from decoder.backends.native.packed_linear import PackedLinears, product_of, replaced
from decoder.backends.native.packed_weight import NativeWeight
from decoder.backends.native.quantised import QuantisedEmbedding
from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHead
from decoder.sampling.token_tree import TokenTree

if TYPE_CHECKING:
    from decoder.backends.bitwise import PassRule
    from decoder.model.target import Target

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 31, 37, 62, 100, 121, 242)
_MOST_ROWS = 320
_ROWS_OF_VOCABULARY = 48
_TEXT = 44
_DECODED = 3


def multiplied_elsewhere(target: "Target") -> str | None:
    """In words, the first layer that the native library does not multiply; None if it multiplies all."""
    within: set[torch.nn.Module] = set()
    with replaced(target.replacements().layers):
        for name, module in target.model.named_modules():
            if isinstance(module, torch.nn.Embedding | QuantisedEmbedding | DraftHead) or module in within:
                continue
            forward = module.__dict__.get("forward")
            if isinstance(forward, FusedLayer):
                within.update(module.modules())
                products: list[PackedLinears | None] = [*forward.products.values()]
            elif not any(own is not None and own.ndim > 1 for own in module._parameters.values()):
                continue
            else:
                products = [product_of(forward)]
            if not all(product and isinstance(product.weight, NativeWeight) for product in products):
                return f"the native library does not multiply {name} ({type(module).__name__})"
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
            if rule.width is not None and compared.differs_in_place():
                return f"{compared.name} gives a row other bits at another place among {compared.rows} rows"
    return None


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
        rows = rule.width or (_ROWS_OF_VOCABULARY if kind[0] is target.lm_head else _MOST_ROWS)
        rows += rule.padding(rows)
        x = torch.randn(1, rows, size, generator=generator).to(target.device, target.dtype)
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
