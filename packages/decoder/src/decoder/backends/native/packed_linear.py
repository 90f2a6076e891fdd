"""Linear layers on a CPU with packed weights, so that the few rows of a step cost little more than one.

Layers with the same input can be joined to one product, as the library's whole passes read them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from decoder.backends.base import BackendFault
from decoder.backends.forwards import is_changed
from decoder.backends.memory import available_memory
from decoder.backends.native.packed_weight import NativeWeight, pack
from decoder.backends.native.quantised import QuantisedLinear, QuantisedWeight, pack_for_drafts
from decoder.backends.norms import FusedNorm
from decoder.draft_heads import DraftHead, RMSNorm
from decoder.work import Progress, Work

Linear = nn.Linear | QuantisedLinear

TOKENS = 8  # of a sequence that take about as long as packing a product
SHARE = 0.5  # the share of available memory that packed copies may take
_DEFAULT_EPS = torch.finfo(torch.float32).eps  # of `functional.rms_norm` where it is given none


class DraftRows(nn.Linear):
    """Rows of the language-model head for drafts alone."""


class Packed:
    """Owns a forward with packed weights; ``kind`` is how they are held."""

    kind: type


class PackedCopy(Packed, ABC):
    """Packed weights of ``given``, a module or the layers of one product, in the attribute ``held``."""

    held: Any

    def __init__(self, given: Any):
        self._fingerprint: list[torch.Tensor] = []
        self.renew(given)

    def renew(self, given: Any) -> None:
        """Pack the weights, unless they are those that were packed last."""
        fingerprint = self._fingerprint_of(given)
        if not same(fingerprint, self._fingerprint):
            self._fingerprint = fingerprint
            self.held = None  # frees the old copy before the new one is made
            self._pack(given)

    def _fingerprint_of(self, given: Any) -> list[torch.Tensor]:
        return fingerprint_of([given])

    @abstractmethod
    def _pack(self, given: Any) -> None:
        """Set ``held`` and ``kind``."""


class PackedLinears(PackedCopy):
    """One linear layer, or several with the same input, as one product with a packed copy of their weights.

    Attributes:
        sizes: the number of outputs of each layer.
    """

    held: NativeWeight

    def _fingerprint_of(self, given: Sequence[Linear]) -> list[torch.Tensor]:
        return fingerprint_of(given)

    def _pack(self, given: Sequence[Linear]) -> None:
        self.sizes = [layer.out_features for layer in given]
        if quantised := [layer for layer in given if isinstance(layer, QuantisedLinear)]:
            self.held = QuantisedWeight(quantised)
        else:
            held_as = pack_for_drafts if any(isinstance(layer, DraftRows) for layer in given) else pack
            self.held = held_as([layer.weight for layer in given], [layer.bias for layer in given])
        self.kind = type(self.held)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers [..., sum of sizes] for inputs [..., in]."""
        weight = self.held
        # Conversions to the same dtype are calls, too.
        return weight(x) if x.dtype == weight.dtype else weight(x.to(weight.dtype)).to(x.dtype)


class PackedHead(PackedCopy):
    """`DraftHead.forward` with packed weights: layers with the same input are one product, and no module is called.

    A head takes so little time that calls of modules would be half of it. A draft may be off by a rounding.

    Attributes:
        held: the layers that read the features, as one product, and the last layer of a gated head.
    """

    held: tuple[NativeWeight, NativeWeight | None]

    def _fingerprint_of(self, given: DraftHead) -> list[torch.Tensor]:
        return fingerprint_of([*_products(given), given.input_norm])

    def _pack(self, given: DraftHead) -> None:
        norm = given.input_norm
        self._norm = FusedNorm(norm.weight, norm.eps)
        self._unit_norm = FusedNorm(torch.ones_like(norm.weight), _DEFAULT_EPS)
        readers = [given.linear, given.gate, given.up] if given.gated else [given.linear]
        self._sizes = [layer.out_features for layer in readers]
        down = pack_for_drafts([given.down.weight], [None]) if given.gated else None
        self.held = pack_for_drafts([layer.weight for layer in readers], [None]), down
        self.kind = type(self.held[0])

    def __call__(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        features = self._norm(hidden)
        if embedding is not None:
            features = torch.cat((features, self._unit_norm(embedding).to(features.dtype)), dim=-1)
        readers, down = self.held
        change, *gated = readers(features.to(readers.dtype)).split(self._sizes, dim=-1)
        if down is not None:
            gate, up = gated
            change = change + down((functional.silu(gate) * up).to(down.dtype))
        return (change + hidden).to(hidden.dtype)


def fingerprint_of(layers: Iterable[nn.Module]) -> list[torch.Tensor]:
    """What shows whether any parameter of which there is a copy has changed: sums of its bits along rows and columns.

    Computing them was measured to take a fifth of the time of packing. The list is empty if a parameter cannot be read
    as 64-bit words; it then equals no other fingerprint. Quantised matrices are read where they stand: their place is
    all that may change.
    """
    sums = []
    for layer in layers:
        parameters = dict(layer.named_parameters(recurse=False))
        if isinstance(layer, QuantisedLinear):
            sums.append(torch.tensor([parameters.pop("weight").data_ptr(), id(layer.dtype)]))
        for parameter in parameters.values():
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
        found[head] = renewed(_packed_heads, head, PackedHead)
        yield Progress(TOKENS, TOKENS * (len(heads) - number + len(every)))
    for number, group in enumerate(every, start=1):
        packed = joined(group)
        if packed is not None:
            packed.renew(group)
        else:
            packed = PackedLinears(group)
            _packed.update(dict.fromkeys(group, packed))
        if len(group) == 1:
            found[group[0]] = packed.product
        yield Progress(TOKENS, TOKENS * (len(every) - number))
    return found


def renewed(packed: MutableMapping[Any, Any], module: nn.Module, kind: type[PackedCopy]) -> Any:
    """What of ``packed`` belongs to a module, made where there is none, with the weights as they are now."""
    if module in packed:
        packed[module].renew(module)
    else:
        packed[module] = kind(module)
    return packed[module]


def joined(layers: Sequence[Linear]) -> PackedLinears | None:
    """The one packed product of exactly these layers, if `packing` has made it."""
    packed = _packed.get(layers[0])
    whole = packed is not None and len(packed.sizes) == len(layers)
    return packed if whole and all(_packed.get(layer) is packed for layer in layers) else None


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
