"""A decoder layer of the Llama family in the native library: what it reads of it, and two calls around attention."""

from collections.abc import Mapping
from ctypes import byref, pointer
from typing import Any

import torch

from decoder.backends.native import library as native
from decoder.backends.native.experts import PackedBlock, block_of
from decoder.backends.native.library import Layer
from decoder.backends.native.packed_weight import NativeWeight
from decoder.backends.norms import eps_of


class NativeScratch:
    """What the native layers of a model share: the angles of a pass in float32, and memory between calls."""

    def __init__(self) -> None:
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._numbers = _floats(0)

    def angles(self, cos: torch.Tensor, sin: torch.Tensor, kind: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, D] both, from [1, T, D] of the model's dtype, of a kind of layers."""
        given, *held = self._angles.get(kind, (None,))
        if given is not sin:
            held = [cos[0].float().contiguous(), sin[0].float().contiguous()]
            self._angles[kind] = sin, held[0], held[1]
        return held[0], held[1]

    def reserve(self, numbers: int) -> None:
        """See that there is room for so many float32 numbers."""
        if numbers > len(self._numbers):
            self._numbers = _floats(numbers)

    @property
    def address(self) -> int:
        """Where the numbers stand."""
        return self._numbers.data_ptr()


class NativeLayer:
    """One layer.

    Args:
        module: transformers' layer.
        products: by name, "qkv", "o", "gate_up" and "down", its weights; those of experts have been packed.
        scratch: shared by the layers of a model.
        kind, place: of the kinds of layers its own, and how many of it come before.

    Attributes:
        layer: what the library reads.
    """

    def __init__(
        self, module: Any, products: Mapping[str, NativeWeight], scratch: NativeScratch, kind: int = 0, place: int = 0
    ):
        attention, dim = module.self_attn, module.self_attn.head_dim
        self.heads, self.kv_heads = (getattr(attention, name).out_features // dim for name in ("q_proj", "k_proj"))
        norms = {name: factors(module.get_submodule(own)) for own, name in norms_of(module).items()}
        of_heads = attention.q_norm if "q_norm" in attention._modules else None
        if of_heads is not None:
            pairs = ((attention.q_norm, self.heads), (attention.k_norm, self.kv_heads))
            norms["head_norm"] = torch.cat([factors(norm).expand(count, -1) for norm, count in pairs])
        if "sinks" in attention._parameters:
            norms["sinks"] = attention.sinks.detach()
        # Copies, as those of products are: a later change takes effect with the next generation. The library reads
        # their memory.
        weights = {name: _floats(*weight.shape).copy_(weight) for name, weight in norms.items()}
        self._held = *products.values(), *weights.values()
        block = block_of(module.mlp)
        self._experts = None if block is None else PackedBlock(block)
        size, self._dim = len(weights["norm_in"]), dim
        self.layer = Layer(
            **{name: product.product for name, product in products.items()},
            **{name: weight.data_ptr() for name, weight in weights.items()},
            size=size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=dim,
            eps=eps_of(module.input_layernorm),
            head_eps=0 if of_heads is None else eps_of(of_heads),
            kind=kind,
            place=place,
            gelu="GELU" in type(getattr(module.mlp, "act_fn", None)).__name__,
            experts=None if self._experts is None else pointer(self._experts.structure),
        )
        self._scratch, self._given, self._library = scratch, byref(self.layer), native.library()
        self._outputs = self.layer.qkv.outputs // dim
        rows = self._library.rows_together()
        of_experts = 0 if self._experts is None else self._experts.numbers(rows)
        numbers = max(size + self.layer.qkv.outputs, 2 * size + self.layer.gate_up.outputs * 3 // 2)
        scratch.reserve(max(rows * numbers, rows * 2 * size + of_experts))

    def before_attention(self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Queries and keys, rotated, and values, [T, H + 2 G, D], of the layer's inputs [1, T, d]."""
        hidden, rows = hidden.contiguous(), hidden.shape[1]
        heads = hidden.new_empty(rows, self._outputs, self._dim)
        cos, sin = self._scratch.angles(*angles, self.layer.kind)
        self._library.before_attention(
            self._given,
            hidden.data_ptr(),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            heads.data_ptr(),
            self._scratch.address,
            hidden.dtype == torch.bfloat16,
            native.threads(),
        )
        return heads

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


def norms_of(module: Any) -> dict[str, str]:
    """By its name in a layer, what a norm is called in the library's `Layer`."""
    if "pre_feedforward_layernorm" in module._modules:  # as in Gemma, which normalises what it adds, too
        behind = {"post_attention_layernorm": "norm_behind_attention", "post_feedforward_layernorm": "norm_behind_mlp"}
        return {"input_layernorm": "norm_in", "pre_feedforward_layernorm": "norm_between", **behind}
    return {"input_layernorm": "norm_in", "post_attention_layernorm": "norm_between"}


def factors(norm: Any) -> torch.Tensor:
    """What a norm multiplies by, in float32: its weights, and in Gemma one more."""
    weight = norm.weight.detach().float()
    return weight + 1 if type(norm).__name__.startswith("Gemma") else weight


def _floats(*shape: int) -> torch.Tensor:
    """What the library reads as float32, whatever PyTorch's default is."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")
