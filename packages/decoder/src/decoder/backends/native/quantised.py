"""Weights in the formats of GGUF files, which the native library multiplies by inputs that it rounds to eight bits.

A matrix keeps its codes and scales; they only stand in another order, see formats/formats.h. Inputs are rounded in
parts of 32 to whole numbers from -127 to 127 times a step. Sums of a part are exact, and parts are added in one order,
so the bits of an output depend on its own row of inputs alone.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from decoder.backends import large_pages
from decoder.backends.memory import floats
from decoder.backends.native import library as native
from decoder.backends.native.packed_weight import NativeWeight, pack
from decoder.backends.native.structures import MOST_PARTS, QUANTISED, Quantised, QuantisedPart
from decoder.model.rounding import rounded

DRAFTED_AS = "Q4_1"
"""How weights are held of which drafts are made. With eight bits drafts are accepted no more often."""


class WeightFormat(NamedTuple):
    """A format of weights.

    Attributes:
        place: in the library's table.
        name: as in llama.cpp, such as "Q4_K".
        number: in GGUF files.
        inputs: weights of a block.
        bytes_of_block: in a file.
        packed_bytes: of a block of as many outputs as lie interleaved,
        head_bytes: and of its scales and minima, of 16 bits each, which come first.
        infinite: the bits of their exponent where they are no numbers.
    """

    place: int
    name: str
    number: int
    inputs: int
    bytes_of_block: int
    packed_bytes: int
    head_bytes: int
    infinite: int


@cache
def weight_formats() -> dict[int, WeightFormat]:
    """The formats that the native library multiplies, by their numbers in GGUF files; none without the library."""
    found: dict[int, WeightFormat] = {}
    while native.available() and (entry := native.library().weight_format(len(found))):
        one = entry.contents
        sizes = one.inputs, one.bytes, one.packed_bytes, one.head_bytes, one.infinite
        found[one.number] = WeightFormat(len(found), one.name.decode(), one.number, *sizes)
    return found


def width() -> int:
    """How many outputs lie interleaved."""
    return native.library().quantised_width()


class QuantisedMatrix:
    """Weights [out, in] of one format.

    Args:
        kind: the format.
        blocks: the blocks of a file, row by row, uint8 [out, bytes]; a multiple of the block's inputs. An array may be
            one that cannot be written to, such as a file's own bytes.
        threads: how many pack it; None takes as many as a product.

    Attributes:
        shape: (out, in).
        weight: the packed matrix, uint8 [panels, bytes].
    """

    def __init__(self, kind: WeightFormat, blocks: torch.Tensor | np.ndarray, threads: int | None = None):
        given_blocks = np.ascontiguousarray(blocks.numpy() if isinstance(blocks, torch.Tensor) else blocks)
        outputs, row_bytes = given_blocks.shape
        count, rest = divmod(row_bytes, kind.bytes_of_block)
        if rest or given_blocks.dtype != np.uint8:
            raise ValueError(f"rows of {row_bytes} bytes are no whole blocks of {kind.name}")
        self.kind, self.shape = kind, (outputs, count * kind.inputs)
        packed = large_pages.zeros((-(-outputs // width()), count * kind.packed_bytes), torch.uint8)
        given = kind.place, given_blocks.ctypes.data, *self.shape, packed.data_ptr()
        native.library().pack_weights(*given, threads or native.threads())
        self.weight = nn.Parameter(packed, requires_grad=False)

    @cached_property
    def finite(self) -> bool:
        """Whether all scales are numbers, as they were when somebody asked first."""
        blocks, infinite = self.weight.data.view(-1, self.kind.packed_bytes), self.kind.infinite
        scales = blocks[:, : self.kind.head_bytes].contiguous().view(torch.int16)
        return not bool(((scales & infinite) == infinite).any())

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The weights float32 [..., in] of the outputs of these numbers [...]."""
        return unpacked_rows(self.kind, self.weight.data, self.shape, numbers)


def unpacked_rows(
    kind: WeightFormat,
    packed: torch.Tensor,
    shape: tuple[int, int],
    numbers: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights float32 [..., in] of the outputs of these ``numbers`` [...], of a matrix of this ``shape``.

    They are written to ``out``, of that form and contiguous, if it is given.

    Raises:
        IndexError: there is no such output.
    """
    numbers = numbers.contiguous().long()
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < shape[0]:
        raise IndexError(f"rows from {int(numbers.min())} to {int(numbers.max())} of {shape[0]}")
    if out is None:
        out = floats(*numbers.shape, shape[1])
    given = kind.place, packed.data_ptr(), shape[1], numbers.data_ptr(), numbers.numel(), out.data_ptr()
    native.library().unpack_rows(*given, native.threads() if numbers.numel() > 1 else 1)
    return out


class QuantisedMatrixModule(nn.Module):
    """A module with a quantised matrix.

    Attributes:
        matrix: as it was made.
        weight: the packed matrix.
        kind: its format.
        shape: (out, in).
    """

    like: torch.Tensor

    def __init__(self, matrix: QuantisedMatrix, dtype: torch.dtype):
        super().__init__()
        self.matrix, self.kind, self.shape, self.weight = matrix, matrix.kind, matrix.shape, matrix.weight
        # It follows conversions of the model, and so tells its dtype.
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""
        return self.like.dtype

    def rows(self, numbers: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weights float32 [..., in] of the outputs of these numbers [...], in ``out`` if it is given."""
        return unpacked_rows(self.kind, self.weight.data, self.shape, numbers, out)


class QuantisedLinear(QuantisedMatrixModule):
    """A linear layer with quantised weights.

    Attributes:
        bias: [out] or None.
    """

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None, dtype: torch.dtype):
        super().__init__(matrix, dtype)
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [..., out] for inputs [..., in] of any floating dtype."""
        return QuantisedWeight([self])(x.to(self.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.kind.name}, in_features={self.in_features}, out_features={self.out_features}"


class QuantisedEmbedding(QuantisedMatrixModule):
    """Embeddings whose rows are unpacked when they are looked up, and multiplied by ``scale``, as Gemma's are."""

    def __init__(self, matrix: QuantisedMatrix, dtype: torch.dtype, scale: float = 1.0):
        super().__init__(matrix, dtype)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., in] of the ids [...]."""
        rows = self.rows(ids).to(self.dtype)
        return rows if self.scale == 1 else rows * torch.tensor(self.scale, dtype=self.dtype)

    def extra_repr(self) -> str:
        return f"{self.kind.name}, {self.num_embeddings}, {self.embedding_dim}"


class QuantisedRows(NamedTuple):
    """A matrix as `QuantisedWeight` takes it, without a layer.

    Attributes:
        kind: its format.
        out_features, in_features: its shape.
        weight: the packed matrix.
        bias: [out] or None.
        dtype: of inputs and outputs.
    """

    kind: WeightFormat
    out_features: int
    in_features: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


class QuantisedWeight(NativeWeight):
    """The native library's product of one `QuantisedLinear`, or of several with the same input; it copies no weights.

    Of several all but the last must have whole panels of outputs, see `width`.
    """

    _kind = QUANTISED

    def __init__(self, layers: Sequence[QuantisedLinear | QuantisedRows]):
        outputs, inputs = sum(layer.out_features for layer in layers), layers[0].in_features
        assert len(layers) <= MOST_PARTS and all(not layer.out_features % width() for layer in layers[:-1])
        biases = [
            floats(layer.out_features).zero_() if layer.bias is None else layer.bias.detach().float()
            for layer in layers
        ]
        bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases)
        held = [layer.weight.data for layer in layers]  # the library reads their memory
        parts = [
            QuantisedPart(layer.kind.place, layer.out_features, weight.data_ptr())
            for layer, weight in zip(layers, held, strict=True)
        ]
        self._structure = Quantised(len(parts), (QuantisedPart * MOST_PARTS)(*parts))
        self._weights = held
        self._hold((outputs, inputs), layers[0].dtype, ctypes.addressof(self._structure), bias)


def pack_for_drafts(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> NativeWeight:
    """As `pack`, of weights that need not be exact, since what they compute is verified: rounded to `DRAFTED_AS`.

    Inputs are float32. Weights that are no whole blocks are held as `pack` holds them.
    """
    kind = next(one for one in weight_formats().values() if one.name == DRAFTED_AS)
    inputs = weights[0].shape[1]
    if inputs % kind.inputs:
        return pack(weights, biases)
    weight = torch.cat([one.detach() for one in weights])
    matrix = QuantisedMatrix(kind, rounded(weight, kind.name, search=False))
    given = [one.detach().float() for one in biases if one is not None]
    rows = QuantisedRows(kind, len(weight), inputs, matrix.weight, torch.cat(given) if given else None, torch.float32)
    return QuantisedWeight([rows])
