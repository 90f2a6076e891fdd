"""A layer of a model that runs as a whole in the native library: what is read of it, and two calls around attention."""

from collections.abc import Mapping
from ctypes import byref, c_int64, pointer
from typing import Any

import torch
from torch import nn

from decoder.backends.memory import floats
from decoder.backends.native import library as native
from decoder.backends.native.angles import Angles
from decoder.backends.native.experts import PackedBlock
from decoder.backends.native.families import LayerParts, parts_of
from decoder.backends.native.mixers import MixerParts
from decoder.backends.native.packed_weight import NativeWeight
from decoder.backends.native.structures import Layer, Mixer
from decoder.backends.norms import eps_of

_ONE_MORE = ("Gemma", "Qwen3_5", "Qwen3Next")  # whose norms multiply by one more than their weights


class NativeScratch:
    """Memory between calls, which the native layers of a model share."""

    def __init__(self) -> None:
        self._numbers = floats(0)

    def reserve(self, numbers: int) -> None:
        """See that there is room for so many float32 numbers."""
        if numbers > len(self._numbers):
            self._numbers = floats(numbers)

    @property
    def address(self) -> int:
        """Where the numbers stand."""
        return self._numbers.data_ptr()


class NativeMixer:
    """What the library reads of a mixer; ``gates`` is the product of that name, if it has one."""

    def __init__(self, parts: MixerParts, gates: NativeWeight | None):
        given = dict(conv=parts.conv.T, conv_bias=parts.bias, decay=parts.decay, decay_bias=parts.decay_bias)
        given |= dict(skip=parts.skip, factors=parts.norm)
        weights = {name: floats(*one.shape).copy_(one.detach()) for name, one in given.items() if one is not None}
        places = [place for own in parts.places for place in own]
        at = (c_int64 * len(places))(*places)
        self._held = gates, weights, at
        self.mixer = Mixer(
            **({} if gates is None else {"gates": gates.product}),
            **{name: weight.data_ptr() for name, weight in weights.items()},
            **{"from": native.address(at)},
            keys=parts.keys,
            values=parts.values,
            key_dim=parts.key_dim,
            dim=parts.dim,
            width=parts.conv.shape[1],
            group=parts.group,
            eps=parts.eps,
            delta=parts.delta,
            gates_first=parts.gates_first,
        )


class NativeLayer:
    """One layer.

    Args:
        module: transformers' layer.
        products: by name, as `LayerParts.products` has them, its weights; those of experts have been packed.
        scratch: shared by the layers of a model.
        rotary_dim: numbers of a head that are rotated, the first ones.
        kind, place: of the kinds of layers its own, and how many of it come before; of mixers, how many of them.

    Attributes:
        layer: what the library reads.
    """

    def __init__(
        self,
        module: nn.Module,
        products: Mapping[str, NativeWeight],
        scratch: NativeScratch,
        rotary_dim: int,
        kind: int,
        place: int,
    ):
        parts = parts_of(module)
        norms = {name: factors(norm) for name, norm in parts.norms.items()}
        size = len(norms["norm_in"])
        about: dict[str, Any] = dict(size=size, eps=eps_of(parts.norms["norm_in"]), kind=kind, place=place)
        about["gelu"] = "GELU" in type(getattr(parts.mlp, parts.family.activation, None)).__name__
        about["residual"] = parts.residual
        if parts.mixer is not None:
            # The library reads their memory.
            self._mixer = NativeMixer(parts.mixer, products.get("gates"))
            about["mixer"] = pointer(self._mixer.mixer)
        else:
            about |= self._of_attention(parts, norms, rotary_dim)
        # Copies, as those of products are: a later change takes effect with the next generation. The library reads
        # their memory.
        weights = {name: floats(*weight.shape).copy_(weight) for name, weight in norms.items()}
        self._experts = None if parts.block is None else PackedBlock(parts.block)
        self._held = *products.values(), *weights.values()
        self.layer = Layer(
            **{name: product.product for name, product in products.items() if name != "gates"},
            **{name: weight.data_ptr() for name, weight in weights.items()},
            **about,
            experts=None if self._experts is None else pointer(self._experts.structure),
        )
        self._scratch, self._given, self._library = scratch, byref(self.layer), native.library()
        rows = self._library.rows_together()
        of_experts = 0 if self._experts is None else self._experts.numbers(rows)
        gated = self.layer.gate_up.outputs * 3 // 2
        behind = gated + size if self._experts is not None else max(gated, size)
        numbers = max(size + self.layer.qkv.outputs, 2 * size + behind)
        scratch.reserve(max(rows * numbers, rows * 2 * size + of_experts))

    def _of_attention(self, parts: LayerParts, norms: dict[str, torch.Tensor], rotary_dim: int) -> dict[str, Any]:
        """What is said of attention, whose norms are added to ``norms``."""
        attention, dim = parts.attention, parts.attention.head_dim
        heads, kv_heads = (getattr(attention, name).out_features // dim for name in ("q_proj", "k_proj"))
        heads //= 1 + parts.gated
        if parts.head_norms:
            pairs = zip(parts.head_norms, (heads, kv_heads), strict=True)
            norms["head_norm"] = torch.cat([factors(norm).expand(count, -1) for norm, count in pairs])
        if "sinks" in attention._parameters:
            norms["sinks"] = attention.sinks.detach()
        head_eps = eps_of(parts.head_norms[0]) if parts.head_norms else 0
        sizes = dict(heads=heads, kv_heads=kv_heads, dim=dim, rotary_dim=rotary_dim)
        return dict(**sizes, head_eps=head_eps, gated=parts.gated)

    def before_attention(self, hidden: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Queries and keys, rotated, values and gates, [T, H + 2 G + .., D], of the layer's inputs [1, T, d]."""
        hidden, rows = hidden.contiguous(), hidden.shape[1]
        heads = hidden.new_empty(rows, self.layer.qkv.outputs // self.layer.dim, self.layer.dim)
        self._library.before_attention(
            self._given,
            hidden.data_ptr(),
            rows,
            angles.cosines.data_ptr(),
            angles.sines.data_ptr(),
            heads.data_ptr(),
            self._scratch.address,
            hidden.dtype == torch.bfloat16,
            native.threads(),
        )
        return heads

    def gated(self, attended: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """What attention gave, [T, H x D], multiplied by the gates in what `before_attention` gave."""
        if self.layer.gated:
            is_bf16, rows = heads.dtype == torch.bfloat16, len(heads)
            at = heads.data_ptr(), rows, attended.data_ptr()
            self._library.gate_attended(self._given, *at, is_bf16, native.threads())
        return attended

    def behind_attention(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's outputs [1, T, d] of its inputs and of what attention gave, [T, H x D]."""
        attended, hidden = attended.contiguous(), hidden.contiguous()
        out = torch.empty_like(hidden)
        self._library.behind_attention(
            self._given,
            attended.data_ptr(),
            hidden.data_ptr(),
            hidden.shape[1],
            out.data_ptr(),
            self._scratch.address,
            hidden.dtype == torch.bfloat16,
            native.threads(),
        )
        return out


def factors(norm: Any) -> torch.Tensor:
    """What a norm multiplies by, in float32: its weights, and in some families one more."""
    weight = norm.weight.detach().float()
    return weight + 1 if type(norm).__name__.startswith(_ONE_MORE) else weight
