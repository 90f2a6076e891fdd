"""Linear layers on a CPU with packed weights, so that the few rows of a step cost little more than one.

Layers with the same input can be joined to one product, as the library's whole passes read them.
"""

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from decoder.backends.base import BackendFault
from decoder.backends.forwards import is_changed
from decoder.backends.memory import available_memory
from decoder.backends.native.packed_weight import NativeWeight, pack
from decoder.backends.native.quantised import QuantisedLinear, QuantisedWeight
from decoder.backends.norms import FusedNorm
from decoder.draft_heads import DraftHead, RMSNorm
from decoder.work import Progress, Work, finish

Linear = nn.Linear | QuantisedLinear

TOKENS = 8  # of a text that take about as long as packing a product
SHARE = 0.5  # the share of available memory that packed copies may take
_DEFAULT_EPS = torch.finfo(torch.float32).eps  # of `functional.rms_norm` where it is given none


class DraftRows(nn.Linear):
    """Rows of the language-model head for drafts alone."""


class Packed:
    """Owns a forward with packed weights."""

    @property
    def kind(self) -> type:
        """How the weights are held."""
        raise NotImplementedError


class PackedLinears(Packed):
    """One linear layer, or several with the same input, as one product with a packed copy of their weights.

    Attributes:
        sizes: the number of outputs of each layer.
    """

    def __init__(self, layers: Sequence[Linear]):
        self._fingerprint: list[torch.Tensor] = []
        self._weight: NativeWeight | None = None
        self.pack(layers)

    def pack(self, layers: Sequence[Linear]) -> None:
        """Pack the layers' weights, unless they are those that were packed last."""
        fingerprint = fingerprint_of(layers)
        if same(fingerprint, self._fingerprint):
            return
        self._fingerprint = fingerprint
        self._weight = None  # frees the old copy before the new one is made
        self.sizes = [layer.out_features for layer in layers]
        given = [layer.weight for layer in layers], [layer.bias for layer in layers]
        exact = not any(isinstance(layer, DraftRows) for layer in layers)
        if quantised := [layer for layer in layers if isinstance(layer, QuantisedLinear)]:
            self._weight = QuantisedWeight(quantised)
        else:
            self._weight = pack(*given, exact)

    @property
    def weight(self) -> NativeWeight:
        """The packed weights."""
        assert self._weight is not None
        return self._weight

    @property
    def kind(self) -> type:
        """How the weights are held."""
        return type(self._weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers [..., sum of sizes] for inputs [..., in]."""
        weight = self.weight
        # Conversions to the same dtype are calls, too.
        return weight(x) if x.dtype == weight.dtype else weight(x.to(weight.dtype)).to(x.dtype)


class PackedHead:
    """`DraftHead.forward` with packed weights: layers with the same input are one product, and no module is called.

    A head takes so little time that calls of modules would be half of it. A draft may be off by a rounding.
    """

    def __init__(self, head: DraftHead):
        self._fingerprint: list[torch.Tensor] = []
        self._readers: NativeWeight | None = None
        self.down: NativeWeight | None = None
        self.pack(head)

    def pack(self, head: DraftHead) -> None:
        """Pack the head's weights, unless they are those that were packed last."""
        fingerprint = fingerprint_of([*_products(head), head.input_norm])
        if same(fingerprint, self._fingerprint):
            return
        self._fingerprint = fingerprint
        self._readers = self.down = None
        self._norm = FusedNorm(head.input_norm.weight, head.input_norm.eps)
        self._unit_norm = FusedNorm(torch.ones_like(head.input_norm.weight), _DEFAULT_EPS)
        readers = [head.linear, head.gate, head.up] if head.gated else [head.linear]
        self._sizes = [layer.out_features for layer in readers]
        self._readers = pack([layer.weight for layer in readers], [None], exact=False)
        self.down = pack([head.down.weight], [None], exact=False) if head.gated else None

    @property
    def readers(self) -> NativeWeight:
        """The layers that read the features, as one product."""
        assert self._readers is not None
        return self._readers

    def __call__(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        features = self._norm(hidden)
        if embedding is not None:
            features = torch.cat((features, self._unit_norm(embedding).to(features.dtype)), dim=-1)
        change, *gated = self.readers(features.to(self.readers.dtype)).split(self._sizes, dim=-1)
        if gated:
            assert self.down is not None
            gate, up = gated
            change = change + self.down((functional.silu(gate) * up).to(self.down.dtype))
        return (change + hidden).to(hidden.dtype)


def fingerprint_of(layers: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Sums of the bits of all parameters along rows and columns, which show whether any parameter has changed.

    Computing them was measured to take a fifth of the time of packing. The list is empty if a parameter cannot be read
    as 64-bit words; it then equals no other fingerprint.
    """
    sums = []
    for layer in layers:
        for parameter in layer.parameters(recurse=False):
            weight = parameter.detach()
            if weight.shape[-1] * weight.itemsize % 8 or not weight.is_contiguous():
                return []
            words = weight.view(torch.int64)
            sums += [words.clone()] if words.ndim == 1 else [words.sum(0), words.sum(1)]
    return sums


def same(fingerprint: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two fingerprints show that the weights are the same."""
    pairs = zip(fingerprint, other, strict=False)
    return 0 < len(fingerprint) == len(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


# Shared by all decoders of a model, since a copy for each would multiply the memory.
_packed: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()
_packed_heads: WeakKeyDictionary[DraftHead, PackedHead] = WeakKeyDictionary()


def packed_layers(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable]:
    """The outcome of `packing`, at once."""
    return finish(packing(modules))


def packing(modules: Iterable[nn.Module], groups: Sequence[Sequence[Linear]] = ()) -> Work[dict[nn.Module, Callable]]:
    """Faster forwards for the linear layers and draft heads among ``modules``, with their weights as they are now.

    The forwards hold a copy of the weights. Layers on a CPU in float32, bfloat16 and quantised formats
    (`QuantisedLinear`, whose weights are not copied) get one, others none.

    Args:
        groups: layers that read the same, to be one product each, see `joined`.

    Raises:
        BackendFault: the copies would take more than half of the available memory.
    """
    modules = list(modules)
    heads = [module for module in modules if type(module) is DraftHead and _packable_head(module)]
    within = {layer for head in heads for layer in _products(head)}
    alone = [[module] for module in modules if isinstance(module, Linear) and module not in within and packable(module)]
    every = [*groups, *alone]
    new = sum(_nbytes(head) for head in heads if head not in _packed_heads)
    new += sum(_nbytes(layer) for group in every for layer in group if layer not in _packed)
    if new > SHARE * available_memory(torch.device("cpu")):
        raise BackendFault("there is no memory for a packed copy of the weights")
    found: dict[nn.Module, Callable] = {}
    for number, head in enumerate(heads, start=1):
        if head in _packed_heads:
            _packed_heads[head].pack(head)
        else:
            _packed_heads[head] = PackedHead(head)
        found[head] = _packed_heads[head]
        yield Progress(TOKENS, TOKENS * (len(heads) - number + len(every)))
    for number, group in enumerate(every, start=1):
        packed = joined(group)
        if packed is not None:
            packed.pack(group)
        else:
            packed = PackedLinears(group)
            _packed.update(dict.fromkeys(group, packed))
        if len(group) == 1:
            found[group[0]] = packed.product
        yield Progress(TOKENS, TOKENS * (len(every) - number))
    return found


def joined(layers: Sequence[Linear]) -> PackedLinears | None:
    """The one packed product of exactly these layers, if `packing` has made it."""
    packed = _packed.get(layers[0])
    whole = packed is not None and len(packed.sizes) == len(layers)
    return packed if whole and all(_packed.get(layer) is packed for layer in layers) else None


def product_of(forward: Callable | None) -> PackedLinears | None:
    """The packed product behind a forward, if `packing` has made it."""
    owner = packed_by(forward)
    return owner if isinstance(owner, PackedLinears) else None


def packed_by(forward: Callable | None) -> Packed | None:
    """The packed weights behind a forward, if the library multiplies them."""
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, Packed) else None


def packable(module: nn.Module) -> bool:
    """Whether the library multiplies the weights of a linear layer."""
    if type(module) is QuantisedLinear:
        return module.weight.device.type == "cpu"
    if type(module) not in (nn.Linear, DraftRows):
        return False
    weight = module.weight.data
    if type(weight) is not torch.Tensor or weight.device.type != "cpu":
        return False
    return weight.dtype in (torch.float32, torch.bfloat16)


def _packable_head(head: DraftHead) -> bool:
    """Whether a head can be packed; not if the user has changed one of its parts, or has put a hook on it."""
    products = _products(head)
    return (
        all(packable(layer) and layer.bias is None for layer in products)
        and type(head.input_norm) is RMSNorm
        and not any(map(is_changed, (*products, head.input_norm)))
    )


def _products(head: DraftHead) -> list[nn.Module]:
    return [head.linear, head.gate, head.up, head.down] if head.gated else [head.linear]


def _nbytes(layer: nn.Module) -> int:
    """How many bytes the packed copy takes at most."""
    if isinstance(layer, QuantisedLinear):
        return 0  # nothing is copied
    return sum(parameter.nbytes for parameter in layer.parameters())
