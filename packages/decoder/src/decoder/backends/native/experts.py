"""Experts of a layer in the native library: the same bits for a row, whoever shares an expert with it."""

import copy
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import _default_apply_gate

from decoder.backends.base import BackendFault
from decoder.backends.faults import holds
from decoder.backends.forwards import is_changed
from decoder.backends.memory import available_memory, floats
from decoder.backends.native import library as native
from decoder.backends.native.expert_products import ROOM, ExpertProducts
from decoder.backends.native.packed_linear import SHARE, TOKENS, Linear, Packed, PackedCopy, joined, packable, renewed
from decoder.backends.native.packed_weight import NativeWeight, pack
from decoder.backends.native.quantised import QuantisedLinear
from decoder.backends.native.quantised_experts import PARTS, QuantisedExperts
from decoder.backends.native.structures import (
    CLAMPED,
    GELU,
    MOST_EXPERTS,
    MOST_GROUPS,
    SIGMOID,
    SILU,
    SOFTMAX,
    SQUARED,
    Expert,
    Experts,
)
from decoder.work import Progress, Work

ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU}
"""By class, the gates that the library computes."""
_UNGATED = {"ReLUSquaredActivation": SQUARED}
_OF_UNGATED = ("up_proj", "down_proj")
_DTYPES = (torch.float32, torch.bfloat16)
_CLOSE = 1e-4  # by which weights of experts may be off in float32


class PackedExperts(PackedCopy):
    """`forward` of a module of experts, with a packed copy of their weights."""

    held: ExpertProducts

    def _fingerprint_of(self, given: Any) -> list[torch.Tensor]:
        """What shows whether weights have changed; where they are not copied, their place."""
        if isinstance(given, QuantisedExperts):
            return [torch.tensor([own.data_ptr() for own in given.parameters()])]
        return super()._fingerprint_of(given)

    def _pack(self, given: Any) -> None:
        if isinstance(given, QuantisedExperts):
            self.held = given.products()
        else:
            weights = [[pack([weight], [bias]) for weight, bias in own] for own in _matrices(given)]
            self.held = ExpertProducts(weights, gating_of(given))
        self.kind = self.held.kind

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts ``ids`` [T, k] of rows [..., d] give, times ``weights`` [T, k]."""
        return self.held(hidden, ids, weights)


class PackedRouter(PackedCopy):
    """`forward` of a module that chooses experts, of equal ones the first.

    Attributes:
        correction: what is added to scores for choosing alone, float32 [E]; None for nothing.
        settings: how experts are chosen, by the names of the library's `Experts`.
        structure: what the library reads; no experts are in it but their number.

    Raises:
        ValueError: it is a module of another kind.
    """

    held: NativeWeight

    def _pack(self, given: Any) -> None:
        self.held = pack([given.weight], [getattr(given, "bias", None)])
        self.kind = type(self.held)

    def renew(self, given: Any) -> None:
        """Pack the weights, unless they are those that were packed last, and read the settings."""
        super().renew(given)
        zeros = torch.zeros(1, given.weight.shape[1], dtype=given.weight.dtype, device="cpu")
        # Its own forward and not the module, since the user's hooks must not see such inputs.
        self._dtypes = [one.dtype for one in type(given).forward(given, zeros, *_handed(given))]
        correction = getattr(given, "e_score_correction_bias", None)
        grouped = correction is not None
        if "moe_statics" in given._modules:  # ERNIE's, which corrects what a softmax gives
            correction = given.moe_statics.e_score_correction_bias.view(-1)
        self.correction = None if correction is None else _numbers(correction)
        self.settings = dict(
            count=len(given.weight),
            used=given.top_k,
            router=self.held.product,
            correction=None if self.correction is None else self.correction.data_ptr(),
            groups=given.num_group if grouped else 1,
            groups_used=given.topk_group if grouped else 1,
            scoring=SIGMOID if grouped or hasattr(given, "use_expert_bias") else SOFTMAX,
            normalised=getattr(given, "norm_topk_prob", not hasattr(given, "topk_method")),  # DeepSeek-V2 does not
            scaling=getattr(given, "routed_scaling_factor", 1),
        )
        self.structure = Experts(**self.settings)

    def forward(
        self, hidden: torch.Tensor, expert_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E] of rows [..., d], and weights and experts [T, k] that they choose.

        LFM2's layers hand over ``expert_bias`` [E], their correction.
        """
        structure = self.structure
        if expert_bias is not None:
            correction = _numbers(expert_bias)
            structure = Experts(**{**self.settings, "correction": correction.data_ptr()})
        x = hidden.reshape(-1, hidden.shape[-1]).to(self.held.dtype).contiguous()
        logits, weights = floats(len(x), structure.count), floats(len(x), structure.used)
        ids = torch.empty(len(x), structure.used, dtype=torch.int64, device="cpu")
        at = (one.data_ptr() for one in (logits, ids, weights))
        given, is_bf16 = byref(structure), x.dtype == torch.bfloat16
        native.library().route(given, x.data_ptr(), len(x), *at, is_bf16, native.threads())
        return logits.to(self._dtypes[0]), weights.to(self._dtypes[1]), ids


class Block(NamedTuple):
    """The parts of a layer's experts.

    Attributes:
        router: the module that chooses.
        experts: the experts.
        shared: the one that all tokens go through, if there is one.
        gate: a layer of one output, whose sigmoid that one's outputs are multiplied by, if there is one.
        correction: what the router is handed to add to scores for choosing alone, [E]; None where it has its own.
    """

    router: nn.Module
    experts: nn.Module
    shared: nn.Module | None = None
    gate: Linear | None = None
    correction: torch.Tensor | None = None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of all weights, or of inputs to those that are in other formats."""
        own = self.experts
        of_experts = {own.dtype} if isinstance(own, QuantisedExperts) else {one.dtype for one in own.parameters(False)}
        layers = {one.dtype if isinstance(one, QuantisedLinear) else one.weight.dtype for [one] in self.groups}
        return of_experts | layers | {self.router.get_parameter("weight").dtype}

    @property
    def groups(self) -> list[list[Linear]]:
        """The linear layers among them, each a product of its own."""
        own = [] if self.shared is None else [self.shared.get_submodule(f"{name}_proj") for name in PARTS]
        return [[cast(Linear, layer)] for layer in (*own, self.gate) if layer is not None]


class PackedBlock(Packed):
    """`forward` of a module of experts with all that belongs to them, once all its parts are packed.

    Attributes:
        structure: what the library reads.
    """

    def __init__(self, block: Block):
        experts, router = _packed[block.experts], _packed[block.router]
        assert isinstance(experts, PackedExperts) and isinstance(router, PackedRouter)
        weights = [product.held for group in block.groups if (product := joined(group)) is not None]
        shared = [Expert(*(one.product for one in weights[:3]))] if block.shared is not None else []
        more = {} if block.gate is None else {"shared_gate": weights[-1].product}
        correction = router.correction if block.correction is None else _numbers(block.correction)
        settings = {**router.settings, "correction": None if correction is None else correction.data_ptr()}
        # Others may pack the same modules again, and the library reads this memory.
        self._experts, self._held = experts.held, (router.held, correction, weights)
        listed = [*self._experts.experts(), *shared]
        self.structure = Experts(
            (Expert * len(listed))(*listed), shared=len(shared), **settings, **self._experts.gating, **more
        )
        self.kind = experts.kind

    def numbers(self, rows: int) -> int:
        """Of memory that so many rows need."""
        return native.library().expert_numbers(byref(self.structure), rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the experts of rows [..., d] give."""
        x = hidden.reshape(-1, hidden.shape[-1]).to(self._experts.dtype).contiguous()
        out, room = torch.empty_like(x), ROOM.address(self.numbers(len(x)))
        at = x.data_ptr(), len(x), out.data_ptr(), room
        native.library().run_block(byref(self.structure), *at, x.dtype == torch.bfloat16, native.threads())
        return out.view(hidden.shape).to(hidden.dtype)


# Shared by all decoders of a model, since a copy for each would multiply the memory.
_packed: WeakKeyDictionary[nn.Module, PackedExperts | PackedRouter] = WeakKeyDictionary()


def packing_experts(modules: Iterable[nn.Module]) -> Work[dict[nn.Module, Callable]]:
    """Forwards for those ``modules`` that are experts, or that choose them, with their weights as they are now.

    Raises:
        BackendFault: copies of the weights would take more than half of the available memory.
    """
    modules, kinds = list(modules), dict[nn.Module, type[PackedExperts | PackedRouter]]()
    for module in modules:
        if are_experts(module):
            kinds[module] = PackedExperts
        elif _chooses(module):
            kinds[module] = PackedRouter
    copied = [module for module in kinds if module not in _packed and not isinstance(module, QuantisedExperts)]
    new = sum(parameter.nbytes for module in copied for parameter in module.parameters())
    if new > SHARE * available_memory(torch.device("cpu")):
        raise BackendFault("there is no memory for a packed copy of the experts' weights")
    for number, (module, kind) in enumerate(kinds.items(), start=1):
        renewed(_packed, module, kind)
        yield Progress(TOKENS, TOKENS * (len(kinds) - number))
    forwards: dict[nn.Module, Callable] = {module: _packed[module].forward for module in kinds}
    for module in modules:
        # A sigmoid in PyTorch has other bits for other numbers of rows.
        block = block_of(module) if "shared_expert_gate" in module._modules else None
        # One call reads all weights with inputs of one dtype.
        if block is not None and len(block.dtypes) == 1 and all(joined(group) is not None for group in block.groups):
            forwards[module] = PackedBlock(block).forward
    return forwards


def block_of(module: nn.Module) -> Block | None:
    """The parts of a module of experts, if they are of the library's kinds."""
    parts = dict(module._modules)
    router, experts = parts.pop("gate", None) or parts.pop("router", None), parts.pop("experts", None)
    shared = parts.pop("shared_expert", None) or parts.pop("shared_experts", None)
    gate = parts.pop("shared_expert_gate", None)
    if router is None or experts is None or parts or not are_experts(experts) or not _chooses(router):
        return None
    correction = module._buffers.get("expert_bias")
    if bool(_handed(router)) != (correction is not None):
        return None
    if shared is not None:
        names = {*(f"{name}_proj" for name in PARTS), "act_fn"}
        alike = shared._modules.keys() == names and type(shared.act_fn) is type(getattr(experts, "act_fn", None))
        if not alike:
            return None
    within = [own for own in module.modules() if own is not module]
    if any(map(is_changed, within)):
        return None
    if gate is not None and (shared is None or not packable(gate) or gate.out_features != 1):
        return None
    return Block(router, experts, shared, cast(Linear | None, gate), correction)


def _numbers(correction: torch.Tensor) -> torch.Tensor:
    """A copy of a correction, as the library reads it: a later change takes effect with the next generation."""
    return correction.detach().to(torch.float32, copy=True).contiguous()


def are_experts(module: Any) -> bool:
    """Whether a module is a stack of experts, gated in one of the library's ways."""
    if isinstance(module, QuantisedExperts):
        return all(own.is_cpu for own in module.parameters())
    has_gate = getattr(module, "has_gate", None)
    names = {"gate_up_proj", "down_proj"} if has_gate else {*_OF_UNGATED}
    if has_gate is None or not names <= module._parameters.keys():
        return False
    biases = {f"{name}_bias" for name in names} if module.has_bias else set()
    if has_gate:
        gated = type(module)._apply_gate is _default_apply_gate and _activation(module) in (SILU, GELU)
        known = gated or type(module).__name__ == "GptOssExperts"
    else:
        known = _activation(module) == SQUARED and not module.is_transposed
    return (
        module._parameters.keys() == names | biases
        and known
        and not module.has_post_expert_norm
        and not module._is_expert_parallel
        and len(module.down_proj) <= MOST_EXPERTS
        and all(own.is_cpu and own.dtype in _DTYPES for own in module.parameters())
    )


# By class and by what changes how one chooses, since a trial takes a moment.
_known: WeakKeyDictionary[type, dict[tuple, bool]] = WeakKeyDictionary()
_CHOICES = ("num_group", "topk_group", "norm_topk_prob", "norm_min", "routed_scaling_factor", "use_expert_bias")


def _chooses(module: nn.Module) -> bool:
    kind = type(module)
    # Routers of one class may be told to choose groups first.
    if not kind.__name__.lower().endswith("topkrouter") or getattr(module, "topk_method", "greedy") != "greedy":
        return False
    if not _within_limits(module):
        return False
    known, choices = _known.setdefault(kind, {}), tuple(getattr(module, name, None) for name in _CHOICES)
    if choices not in known:
        known[choices] = chooses_alike(module)
    return known[choices]


def _within_limits(module: Any) -> bool:
    """Whether a router's sizes and weights are some that the library takes."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or not weight.is_cpu or weight.dtype not in _DTYPES:
        return False
    count, groups = len(weight), getattr(module, "num_group", None) or 1
    return 1 <= getattr(module, "top_k", 0) <= count <= MOST_EXPERTS and 1 <= groups <= MOST_GROUPS


@torch.inference_mode()
def chooses_alike(module: Any) -> bool:
    """Whether a router chooses experts as the library does, by a trial in float32."""
    if not _within_limits(module):
        return False
    weight, count = module.weight, len(module.weight)
    own, handed = copy.deepcopy(module).float(), _handed(module)
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0)) / weight.shape[1] ** 0.5

    def same() -> bool:
        theirs, ours = (
            torch.zeros(8, count).scatter_(1, ids, weights.float())
            for _, weights, ids in (type(own).forward(own, x, *handed), PackedRouter(own).forward(x, *handed))
        )
        return torch.allclose(ours, theirs, rtol=_CLOSE, atol=_CLOSE)

    return holds(same)


def _handed(router: Any) -> list[torch.Tensor]:
    """What a router is handed beside rows, where it is handed something: LFM2's a correction."""
    return [torch.linspace(-0.1, 0.1, len(router.weight))] if getattr(router, "use_expert_bias", False) else []


def _activation(module: Any) -> int | None:
    """The gate of a stack of experts, if the library computes it; some have a function in place of a module."""
    act = getattr(module, "act_fn", None)
    return SILU if act is functional.silu else (ACTIVATIONS | _UNGATED).get(type(act).__name__)


def gating_of(module: Any) -> dict[str, float]:
    """How experts are gated, by the names of the library's `Experts`."""
    if isinstance(module, QuantisedExperts):
        return module.gating
    if type(module).__name__ == "GptOssExperts":
        return {"activation": CLAMPED, "limit": module.limit, "alpha": module.alpha}
    activation = _activation(module)
    assert activation is not None  # or `are_experts` would not have said that they are
    return {"activation": activation}


def _matrices(module: Any) -> Iterable[Sequence[tuple[torch.Tensor, torch.Tensor | None]]]:
    """By expert the weights [out, in] and biases [out] of gate, of what it gates and of what is behind them."""
    if not module.has_gate:
        for number in range(len(module.down_proj)):
            own = [(getattr(module, name)[number], getattr(module, f"{name}_bias", None)) for name in _OF_UNGATED]
            yield [(one.detach(), None if bias is None else bias[number].detach()) for one, bias in own]
        return
    for number in range(len(module.down_proj)):
        both, down = module.gate_up_proj[number].detach(), module.down_proj[number].detach()
        both, down = (both.T, down.T) if module.is_transposed else (both, down)
        biases = [getattr(module, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")]
        of_both, of_down = (None if bias is None else bias[number].detach() for bias in biases)
        halves = _halves(both, module), (None, None) if of_both is None else _halves(of_both, module)
        yield *zip(*halves, strict=True), (down, of_down)


def _halves(rows: torch.Tensor, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of gates, and of what they gate."""
    first, second = rows.chunk(2) if module.is_concatenated else (rows[::2], rows[1::2])
    return first, second
