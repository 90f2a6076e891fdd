"""A fused decoder layer in two calls of the native library, one on either side of attention."""

from collections.abc import Mapping, Sequence
from ctypes import byref

import torch

from decoder.backends.native import library as native
from decoder.backends.native.library import Layer
from decoder.backends.native.norms import FusedNorm
from decoder.backends.native.packed_linear import PackedLinears
from decoder.backends.native.packed_weight import NativeWeight


class NativeScratch:
    """What the native layers of a model share: the angles of a pass in float32, and memory between calls."""

    def __init__(self) -> None:
        self._given: torch.Tensor | None = None
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._numbers = _floats(0)

    def angles(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, D] both, from [1, T, D] of the model's dtype."""
        if self._angles is None or self._given is not sin:
            self._given, self._angles = sin, (cos[0].float().contiguous(), sin[0].float().contiguous())
        return self._angles

    def reserve(self, numbers: int) -> None:
        """See that there is room for so many float32 numbers."""
        if numbers > len(self._numbers):
            self._numbers = _floats(numbers)

    @property
    def address(self) -> int:
        """Where the numbers stand."""
        return self._numbers.data_ptr()


class NativeLayer:
    """Both calls of one layer.

    Args:
        products: by name, "qkv", "o", "gate_up" and "down", of native weights.
        norms: before the queries, keys and values, and before the gate.
        head_norm: of queries and keys, if they have one.
        heads, kv_heads, dim: their numbers and their size.
        scratch: shared by the layers of a model.

    Attributes:
        layer: what the library reads.
    """

    def __init__(
        self,
        products: Mapping[str, NativeWeight],
        norms: Sequence[FusedNorm],
        head_norm: FusedNorm | None,
        heads: int,
        kv_heads: int,
        dim: int,
        scratch: NativeScratch,
    ):
        # The library reads their memory.
        all_norms = [*norms, head_norm] if head_norm else norms
        # Copies, as those of products are: a later change takes effect with the next generation.
        weights = [_floats(*norm.weight.shape).copy_(norm.weight) for norm in all_norms]
        self._held = *products.values(), *weights
        norm_in, norm_between, *of_heads = (weight.data_ptr() for weight in weights)
        size, self._dim = len(weights[0]), dim
        self.layer = Layer(
            **{name: product.product for name, product in products.items()},
            norm_in=norm_in,
            norm_between=norm_between,
            head_norm=of_heads[0] if of_heads else None,
            size=size,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            eps=norms[0].eps,
            head_eps=head_norm.eps if head_norm else 0,
        )
        self._scratch, self._given, self._library = scratch, byref(self.layer), native.library()
        self._outputs = self.layer.qkv.outputs // dim
        numbers = max(size + self.layer.qkv.outputs, 2 * size + self.layer.gate_up.outputs * 3 // 2)
        scratch.reserve(self._library.rows_together() * numbers)

    def before_attention(self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Queries and keys, rotated, and values, [T, H + 2 G, D], of the layer's inputs [1, T, d]."""
        hidden, rows = hidden.contiguous(), hidden.shape[1]
        heads = hidden.new_empty(rows, self._outputs, self._dim)
        cos, sin = self._scratch.angles(*angles)
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


def _floats(*shape: int) -> torch.Tensor:
    """What the library reads as float32, whatever PyTorch's default is."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def native_weights(products: Mapping[str, PackedLinears], dtype: torch.dtype) -> dict[str, NativeWeight] | None:
    """The weights of a layer's products, if the library multiplies all of them by inputs of this dtype."""
    weights = {name: product.weight for name, product in products.items()}
    found = {name: weight for name, weight in weights.items() if isinstance(weight, NativeWeight)}
    return found if len(found) == len(weights) and all(weight.dtype == dtype for weight in found.values()) else None
