"""How a full KV cache keeps its entries: in the model's dtype or quantised, on the model's device or in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from decoder.backends.base import AttentionShape
from decoder.options import KV_DTYPES, TokenSwiftOptions


class _Codes(NamedTuple):
    """A dtype for quantised numbers: the largest one, and the largest error of a number as a share of its vector's."""

    dtype: torch.dtype
    largest: float
    error: float


# int8: half a step of 1/127. fp8 (e4m3): half of the largest step, which is 32 from 256 to 448, and a scale's rounding.
_CODES = dict(
    zip(KV_DTYPES, (_Codes(torch.int8, 127.0, 0.5 / 127), _Codes(torch.float8_e4m3fn, 448.0, 1 / 27)), strict=True)
)


class Codes(NamedTuple):
    """Keys or values of a quantised cache.

    Attributes:
        codes: [..., D] of one byte each, seen as uint8.
        scales: by which they are multiplied, [..., 1].
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class CacheForm:
    """The form in which a full cache keeps keys and values.

    A quantised cache is that of another model: a key or value vector [D] of a token and KV head is rounded to codes of
    one byte with a scale of its own, before anything attends to it. So what attention sees of a token is a function of
    that token's vector alone, and drafted tokens cannot change it.

    Args:
        kv_dtype: "int8" or "fp8" (e4m3); None keeps numbers as they are.
        offload: whether entries are kept in host memory.
    """

    kv_dtype: str | None = None
    offload: bool = False

    @classmethod
    def of(cls, options: TokenSwiftOptions) -> "CacheForm":
        return cls(options.kv_dtype, options.offload)

    @property
    def plain(self) -> bool:
        """Whether passes can look at the entries where they are kept."""
        return self.kv_dtype is None and not self.offload

    @property
    def error(self) -> float:
        """The largest error of a number as a share of the largest number of its vector."""
        return 0.0 if self.kv_dtype is None else _CODES[self.kv_dtype].error

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is kept of vectors [..., D]: codes [..., D] and scales [..., 1], or the vectors themselves."""
        if self.kv_dtype is None:
            return (states,)
        codes = _CODES[self.kv_dtype]
        wide = torch.promote_types(torch.float32, states.dtype)
        # Scales take as many bytes as the model's numbers, but float16 has too narrow a range for them. Codes are made
        # for the scale as it is kept, and a vector of zeros gets one, too.
        kept = torch.bfloat16 if states.dtype == torch.float16 else states.dtype
        largest = states.abs().amax(-1, keepdim=True).to(wide)
        scales = (largest / codes.largest).to(kept).clamp_min(torch.finfo(kept).tiny)
        quotients = states.to(wide) / scales.to(wide)
        if not codes.dtype.is_floating_point:
            quotients = quotients.round_()
        # Few operations know numbers of 8 bits, all know bytes.
        return quotients.clamp_(-codes.largest, codes.largest).to(codes.dtype).view(torch.uint8), scales

    def decode(self, kept: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write to ``out`` [..., D], in the model's dtype and on its device, the vectors of what `encode` gave."""
        if self.kv_dtype is None:
            out.copy_(kept[0])
        else:
            out.copy_(kept[0].view(_CODES[self.kv_dtype].dtype)).mul_(kept[1])

    def rounded(self, states: torch.Tensor) -> torch.Tensor:
        """Vectors [..., D] as passes see them."""
        rounded = torch.empty_like(states, memory_format=torch.contiguous_format)
        self.decode(self.encode(states), rounded)
        return rounded

    def vector_bytes(self, size: int, itemsize: int) -> int:
        """Bytes that are kept of a vector of ``size`` numbers, which take ``itemsize`` bytes each in the model."""
        return size * itemsize if self.kv_dtype is None else size * _CODES[self.kv_dtype].dtype.itemsize + itemsize

    def token_bytes(self, shape: AttentionShape, layers: int) -> int:
        """Bytes that are kept of a token's keys and values in all layers."""
        sizes = shape.dim, shape.value_dim
        return layers * shape.kv_heads * sum(self.vector_bytes(size, shape.dtype.itemsize) for size in sizes)

    def working_layers(self, device: torch.device) -> int:
        """How many layers' entries stand on the device in the model's dtype, too, so that passes can look at them."""
        if self.plain:
            return 0
        return 2 if self.offload and device.type == "cuda" else 1

    def device_bytes(self, shape: AttentionShape, layers: int, device: torch.device, tokens: int) -> int:
        """Bytes on the device of a cache of so many tokens; a CPU's own memory counts wherever it keeps them."""
        per_layer = tokens * shape.kv_heads * (shape.dim + shape.value_dim) * shape.dtype.itemsize
        kept, working = tokens * self.token_bytes(shape, layers), self.working_layers(device)
        if self.offload and device.type != "cpu":
            # Codes arrive on the device before they are restored there.
            kept = 0 if self.kv_dtype is None else kept // max(1, layers) * working
        return kept + min(working, layers) * per_layer

    def host_bytes(self, shape: AttentionShape, layers: int, device: torch.device, tokens: int) -> int:
        """Bytes of host memory beside ``device`` for a cache of so many tokens; a CPU's is counted as the device's.

        From pinned memory PyTorch gives each piece as many bytes as the next power of two.
        """
        if not self.offload or device.type == "cpu":
            return 0
        sizes = [shape.dim, shape.value_dim]
        if self.kv_dtype is None:
            pieces = [size * shape.dtype.itemsize for size in sizes]
        else:
            pieces = [size * _CODES[self.kv_dtype].dtype.itemsize for size in sizes] + 2 * [shape.dtype.itemsize]
        vectors = tokens * layers * shape.kv_heads
        return sum(1 << (vectors * piece - 1).bit_length() for piece in pieces)
