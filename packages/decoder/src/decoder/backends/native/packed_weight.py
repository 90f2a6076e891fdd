"""Weight matrices on a CPU, packed for products with the few rows of a step.

A product with packed weights reads them once for all rows. With 16 rows it was measured to take a third of the time of
PyTorch's own product, and prefill is faster too.

Weights that are bfloat16 numbers are kept in two bytes each, whatever the dtype of the inputs, and others in float32.
"""

from collections.abc import Sequence
from ctypes import byref

import torch

from decoder.backends import large_pages
from decoder.backends.native import library as native
from decoder.backends.native.structures import BF16, FP32, PackedWeight


class NativeWeight:
    """x W^T + b by the native library, summed in float32: each row alone, input after input.

    Inputs [..., in] are of its ``dtype``, and the outputs [..., out] too.

    This one holds bfloat16 numbers.

    Attributes:
        product: what the library reads.

    Raises:
        NativeUnavailable: there is no library.
    """

    _kind = BF16

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        weight = weight.detach()
        dtype = weight.dtype if native.multiplies(weight.dtype) else torch.float32
        self._hold(weight.shape, dtype, self._pack(weight), bias)

    def _hold(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        packed: torch.Tensor | int,
        bias: torch.Tensor | None,
    ) -> None:
        """What the library reads for weights [out, in] of this ``shape`` and inputs of this ``dtype``.

        Args:
            packed: the weights, or where they stand.
        """
        self._outputs, inputs = shape
        self.dtype, self._is_bf16 = dtype, dtype == torch.bfloat16
        # The library reads their memory.
        self._packed = packed
        self._bias = None if bias is None else bias.float().contiguous()
        bias_at = None if self._bias is None else self._bias.data_ptr()
        packed_at = packed if isinstance(packed, int) else packed.data_ptr()
        self.product = PackedWeight(inputs, self._outputs, packed_at, bias_at, self._kind)
        self._given, self._multiply = byref(self.product), native.library().linear

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        """In panels of outputs and pairs of inputs, [panels, pairs, 2 x lanes, 2]."""
        given = weight if weight.dtype == torch.bfloat16 else weight.float()
        return _in_panels(given, torch.bfloat16, 2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.product.inputs or not x.is_cpu:
            needed = f"inputs of {self.product.inputs} numbers are needed, on a CPU"
            raise ValueError(f"{needed}, not of {x.shape[-1]} on {x.device}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        rows = out.numel() // self._outputs
        self._multiply(self._given, x.data_ptr(), rows, self._is_bf16, out.data_ptr(), native.threads())
        return out


class Fp32Weight(NativeWeight):
    """The same, of float32 weights."""

    _kind = FP32

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        return _in_panels(weight.float(), torch.float32)


def pack(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> NativeWeight:
    """One product for several weights [out_i, in] of float32 or bfloat16, with biases [out_i] for all or for none."""
    weight = weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    given = [bias.detach() for bias in biases if bias is not None]
    bias = torch.cat(given) if given else None
    if not bf16_holds(weight):
        return Fp32Weight(weight, bias)
    return NativeWeight(weight, bias)


def bf16_holds(weight: torch.Tensor) -> bool:
    """Whether all numbers of a matrix are bfloat16 numbers."""
    if weight.dtype == torch.bfloat16:
        return True
    numbers = weight.detach().float().contiguous()
    return bool(native.library().all_bf16(numbers.data_ptr(), numbers.numel(), native.threads()))


def _in_panels(given: torch.Tensor, dtype: torch.dtype, together: int = 1) -> torch.Tensor:
    """Numbers [out, in] as ``dtype``, with zeros for what is missing: [panels, words, 2 x lanes, numbers of a word]."""
    given = given.contiguous()
    (outputs, inputs), width = given.shape, native.library().panel_width()
    packed = large_pages.zeros((-(-outputs // width), -(-inputs // together), width, together), dtype)
    from_bf16, to_bf16 = given.dtype == torch.bfloat16, dtype == torch.bfloat16
    sizes = outputs, inputs, packed.data_ptr(), to_bf16, native.threads()
    native.library().pack_numbers(given.data_ptr(), from_bf16, *sizes)
    return packed
