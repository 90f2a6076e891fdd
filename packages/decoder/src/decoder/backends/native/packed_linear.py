"""Linear layers on a CPU with packed weights, so that the few rows of a step cost little more than one.

Layers with the same input are joined to one product, since half of the time of a small model's step goes to calls.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from decoder.backends.memory import available_memory
from decoder.backends.native import library as native
from decoder.backends.native.int4 import Int4Linear, NativeInt4Weight
from decoder.backends.native.norms import FusedNorm
from decoder.backends.native.packed_weight import NativeWeight, pack
from decoder.backends.native.quantised import QuantisedLinear, QuantisedWeight
from decoder.draft_heads import DraftHead, RMSNorm
from decoder.work import Progress, Work, finish

Linear = nn.Linear | Int4Linear | QuantisedLinear

_TOKENS = 8  # of a text that take about as long as packing a product
_SHARE = 0.5  # the share of available memory that packed copies may take
_DEFAULT_EPS = torch.finfo(torch.float32).eps  # of `functional.rms_norm` where it is given none
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class DraftRows(nn.Linear):
    """Rows of the language-model head for drafts alone."""


class PackedLinears:
    """Forwards for one linear layer, or several with the same input: one product with a packed copy of their weights.

    Of several layers the first that is called computes the outputs of all, and the others return their part.

    Attributes:
        inputs: the number of inputs.
        sizes: the number of outputs of each layer.
    """

    def __init__(self, layers: Sequence[Linear]):
        self._fingerprint: list[torch.Tensor] = []
        self._weight: NativeWeight | None = None
        self.pack(layers)
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}  # outputs for this input that have not been returned yet

    def pack(self, layers: Sequence[Linear]) -> None:
        """Pack the layers' weights, unless they are those that were packed last."""
        fingerprint = _fingerprint(layers)
        if _same(fingerprint, self._fingerprint):
            return
        self._fingerprint = fingerprint
        self._weight = None  # frees the old copy before the new one is made
        self.inputs, self.sizes = layers[0].in_features, [layer.out_features for layer in layers]
        short = [layer for layer in layers if isinstance(layer, Int4Linear)]
        given = [layer.weight for layer in layers], [layer.bias for layer in layers]
        exact = not any(isinstance(layer, DraftRows) for layer in layers)
        if quantised := [layer for layer in layers if isinstance(layer, QuantisedLinear)]:
            self._weight = QuantisedWeight(quantised)
        elif short:
            self._weight = NativeInt4Weight(short)
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

    def __len__(self) -> int:
        return len(self.sizes)

    def forwards(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """A forward for each layer, in order."""
        return [partial(self._part, index) for index in range(len(self))] if len(self) > 1 else [self.product]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all layers [..., sum of sizes] for inputs [..., in]."""
        assert self._weight is not None
        # Conversions to the same dtype are calls, too.
        return self._weight(x) if x.dtype == self._weight.dtype else self.unrounded(x).to(x.dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """`product` in the dtype in which it is computed."""
        assert self._weight is not None
        return self._weight(x.to(self._weight.dtype))

    def _part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x or index not in self._parts:
            self._input, self._parts = x, dict(enumerate(self.product(x).split(self.sizes, dim=-1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


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
        fingerprint = _fingerprint([*_products(head), head.input_norm])
        if _same(fingerprint, self._fingerprint):
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
    def kind(self) -> type:
        """How the weights are held."""
        return type(self._readers)

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


def _fingerprint(layers: Iterable[nn.Module]) -> list[torch.Tensor]:
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


def _same(fingerprint: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two fingerprints show that the weights are the same."""
    pairs = zip(fingerprint, other, strict=False)
    return 0 < len(fingerprint) == len(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


# Shared by all decoders of a model, since a copy for each would multiply the memory.
_packed: WeakKeyDictionary[nn.Module, PackedLinears] = WeakKeyDictionary()
_packed_heads: WeakKeyDictionary[DraftHead, PackedHead] = WeakKeyDictionary()


def packed_layers(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable]:
    """The outcome of `packing`, at once."""
    return finish(packing(modules))


def packing(modules: Iterable[nn.Module]) -> Work[dict[nn.Module, Callable]]:
    """Faster forwards for the linear layers and draft heads among ``modules``, with their weights as they are now.

    The forwards hold a copy of the weights. If new copies would take more than half of the available memory, there are
    no forwards, nor without the native library. Layers on a CPU in float32, bfloat16, four bits (`Int4Linear`) and
    formats of GGUF files (`QuantisedLinear`, whose weights are not copied) get one, others none.
    """
    if not native.available():
        return {}
    modules = list(modules)
    heads = [module for module in modules if type(module) is DraftHead and _packable_head(module)]
    within = {layer for head in heads for layer in _products(head)}
    layers = [module for module in modules if isinstance(module, Linear) and module not in within]
    layers = [layer for layer in layers if _packable(layer)]
    memory = available_memory(torch.device("cpu"))
    new = sum(_nbytes(head) for head in heads if head not in _packed_heads)
    new += sum(_nbytes(layer) for layer in layers if layer not in _packed)
    if new > _SHARE * memory:
        return {}
    found: dict[nn.Module, Callable] = {}
    for head in heads:
        if head in _packed_heads:
            _packed_heads[head].pack(head)
        else:
            _packed_heads[head] = PackedHead(head)
        found[head] = _packed_heads[head]
        yield Progress(_TOKENS, _TOKENS * (len(heads) - len(found)))
    for group in _groups(modules, layers):
        packed = joined(group)
        if packed is not None:
            packed.pack(group)
        else:
            packed = PackedLinears(group)
            _packed.update(dict.fromkeys(group, packed))
        found |= zip(group, packed.forwards(), strict=True)
        yield Progress(_TOKENS, _TOKENS * (len(heads) + len(layers) - len(found)))
    return found


def _groups(modules: Iterable[nn.Module], layers: Iterable[Linear]) -> list[list[Linear]]:
    """All ``layers``: those with the same input, as their names in a module show, as one group, others alone."""
    alone, groups = dict.fromkeys(layers), []
    for module in modules:
        for names in _SAME_INPUT:
            group = [child for name in names if (child := module._modules.get(name)) in alone]
            alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in group}
            if len(group) == len(names) and len(set(group)) == len(names) and len(alike) == 1:
                groups.append(group)
                for layer in group:
                    del alone[layer]
    return groups + [[layer] for layer in alone]


def joined(layers: Sequence[Linear]) -> PackedLinears | None:
    """The one packed product of exactly these layers, if `packed_layers` has made it."""
    packed = _packed.get(layers[0])
    whole = packed is not None and len(packed) == len(layers) and all(_packed.get(layer) is packed for layer in layers)
    return packed if whole else None


def product_of(forward: Callable | None) -> PackedLinears | None:
    """The packed product behind a forward, if `packed_layers` has made it."""
    bound = getattr(forward, "func", forward)
    owner = getattr(bound, "__self__", None)
    return owner if isinstance(owner, PackedLinears) else None


def _packable(module: nn.Module) -> bool:
    if type(module) in (Int4Linear, QuantisedLinear):
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
        all(_packable(layer) and layer.bias is None for layer in products)
        and type(head.input_norm) is RMSNorm
        and not any(
            "forward" in part.__dict__ or part._forward_hooks or part._forward_pre_hooks
            for part in (*products, head.input_norm)
        )
    )


def _products(head: DraftHead) -> list[nn.Module]:
    return [head.linear, head.gate, head.up, head.down] if head.gated else [head.linear]


def _nbytes(layer: nn.Module) -> int:
    """How many bytes the packed copy takes at most."""
    if isinstance(layer, QuantisedLinear):
        return 0  # nothing is copied
    return sum(parameter.nbytes for parameter in layer.parameters())


def under_autocast() -> bool:
    """Whether autocast is on, for any device."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextmanager
def replaced(layers: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Give each layer its other forward until the end of the block; blocks can be nested.

    A module whose forward an outer block or the user has already replaced is left as it is, unless the other forward
    names that one as the one it stands for (``over``). So are all modules under autocast, which chooses other dtypes.
    """
    if under_autocast():
        layers = {}
    overs = {layer: getattr(other, "over", None) for layer, other in layers.items()}
    mine = [layer for layer in layers if layer.__dict__.get("forward") is overs[layer]]
    for layer in mine:
        layer.__dict__["forward"] = layers[layer]
    try:
        yield
    finally:
        for layer in mine:
            del layer.__dict__["forward"]
            if overs[layer] is not None:
                layer.__dict__["forward"] = overs[layer]
