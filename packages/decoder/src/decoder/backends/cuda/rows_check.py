"""The tests of products and of pieces of prompts on a device, for `CudaBackend.rule`: rows alone and among others."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.backends.base import FREE, Forwards, PassRule
from decoder.backends.forwards import replaced
from decoder.cache.full import FullCache

if TYPE_CHECKING:
    from decoder.model.target import Target

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 31, 37, 62, 100, 121, 242)
_MOST_ROWS = 320
_ROWS_OF_VOCABULARY = 48


@torch.inference_mode()
def products_fault(target: "Target", rule: PassRule, forwards: Forwards) -> str | None:
    """For each distinct linear layer, as a pass calls it, compare rows of a long input with the same in short ones."""
    counts = sorted({count + rule.padding(count) for count in _ROWS})
    with replaced(forwards):
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
    """The linear layers as a pass calls them: a name, the size of an input row, what equal ones share, and the call."""
    for name, module in target.model.named_modules():
        weight, size = getattr(module, "weight", None), getattr(module, "in_features", None)
        if size is None or weight is None:
            continue
        kind = type(module), size, getattr(module, "out_features", None), "forward" in module.__dict__
        yield name, size, (module, *kind) if module is target.lm_head else kind, module


@torch.inference_mode()
def chunk_fault(target: "Target") -> str | None:
    """Compare a prompt that is one chunk, wider than other passes, with the same in passes of the usual width."""
    rule, generator = target.bitwise.rule or FREE, torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (rule.chunk or 1,), generator=generator).tolist()
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
