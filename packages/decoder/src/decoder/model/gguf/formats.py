"""How numbers are stored in a file: ggml's formats by their numbers, and what unpacks their blocks.

A row of a matrix is a sequence of blocks, each with its scale (and, in some formats, its minimum) and the codes of its
numbers. Blocks are unpacked in float32, in the order of operations of ggml's reference, so that the numbers are its.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

INSTALL = 'install the extra "gguf" of tokenswift-decoder (pip install gguf)'
# So many numbers are unpacked at a time, which then lie in a processor's cache.
_AT_ONCE = 1 << 17
Unpack = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Format:
    """A way of storing numbers.

    Attributes:
        number: ggml's number of it.
        name: ggml's name of it.
        elements: how many numbers a block has.
        bytes: how many bytes a block has.
        unpack: makes float32 [blocks, elements] of bytes [blocks, bytes]; None if this package does not unpack it.
    """

    number: int
    name: str
    elements: int
    bytes: int
    unpack: Unpack | None = None

    def fault(self) -> str | None:
        """Why tensors of this format cannot be unpacked, if so."""
        if self.unpack is not None:
            return None
        if self.number not in _OF_PACKAGE:
            return "unknown here"
        return None if find_spec("gguf") else f"which the package gguf unpacks: {INSTALL}"


def unpacked(blocks: np.ndarray, format: Format, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a tensor as ``dtype``, rounded from float32.

    Args:
        blocks: bytes [rows, bytes of a row].
        format: one whose `Format.fault` is None.

    Raises:
        FloatingPointError: some are infinite or no numbers.
    """
    rows, columns = len(blocks), blocks.shape[1] // format.bytes * format.elements
    out = torch.empty(rows, columns, dtype=dtype)
    flat, unpack = out.view(-1), format.unpack or _by_package(format)
    blocks = blocks.reshape(-1, format.bytes)
    step = max(1, _AT_ONCE // format.elements)
    for start in range(0, len(blocks), step):
        with np.errstate(all="ignore"):
            part = unpack(blocks[start : start + step]).reshape(-1)
            # A sum is quick, and finite only if all numbers are; one that overflowed is looked into.
            finite = np.isfinite(part.sum()) or np.isfinite(part).all()
        piece = flat[start * format.elements :][: len(part)]
        piece.copy_(torch.from_numpy(part))
        if not finite or (dtype == torch.float16 and not piece.isfinite().all()):
            raise FloatingPointError("infinite, or no number")
    return out


def _by_package(format: Format) -> Unpack:
    import gguf

    return lambda blocks: gguf.dequantize(blocks, gguf.GGMLQuantizationType(format.number))


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _plain(dtype: str) -> Unpack:
    def unpack(blocks: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(blocks).view(dtype).astype(np.float32)

    return unpack


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """The low halves of bytes [..., n] and behind them the high ones: [..., 2 n]."""
    return np.concatenate((codes & 15, codes >> 4), axis=-1)


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """The 32 bits at a byte of each block, each as 0 or 16: [blocks, 32]."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.view(np.int8) - np.int8(16))


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales = blocks[:, :16]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = ((blocks[:, 16:80].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16)
    scale, minimum = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return scale[..., None] * codes - minimum[..., None]


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low, high = blocks[:, 96:104], blocks[:, 104:108, None]
    fourths = (high.transpose(0, 2, 1) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = (_nibbles(low) | (fourths.reshape(-1, 16) << 4)).view(np.int8) - np.int8(32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = ((blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 256)
    # Where the bit of the mask is not set, four is taken away.
    kept = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = codes.view(np.int8) - (4 - (kept.reshape(-1, 256).view(np.int8) << 2))
    return (_half(blocks, 108) * scales)[..., None] * codes.reshape(-1, 16, 16)


def _scales_of_k(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and minimums of six bits, of twelve bytes of Q4_K and Q5_K: [blocks, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 48)), axis=1)
    minimums = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 48)), axis=1)
    return scales, minimums


def _with_minimums(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    scales, minimums = _scales_of_k(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    numbers = scale[..., None] * codes
    numbers -= minimum[..., None]
    return numbers


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _with_minimums(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_minimums(blocks, low | (fifth << 4))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low | (high.reshape(-1, 256) << 4)).view(np.int8) - np.int8(32)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return scale[..., None] * codes.reshape(-1, 16, 16)


_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _NONLINEAR[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    scales = (low | ((high & 3).astype(np.uint8) << 4)).view(np.int8) - np.int8(32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return (_half(blocks, 0) * scales)[..., None] * _NONLINEAR[codes]


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    exponents = blocks[:, :1].astype(np.uint32)
    # Half of the scale, as the values are doubled; the two smallest are subnormal.
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)
    scale = np.where(exponents < 2, small, (np.maximum(exponents, 1) - 1) << 23).astype(np.uint32).view(np.float32)
    return scale * _E2M1_DOUBLED[_nibbles(blocks[:, 1:])]


# Formats that the package gguf unpacks, where it is installed: they are rare, and need large tables.
_OF_PACKAGE = frozenset((16, 17, 18, 19, 21, 22, 29, 34, 35, 40))

FORMATS = {
    format.number: format
    for format in (
        Format(0, "F32", 1, 4, _plain("<f4")),
        Format(1, "F16", 1, 2, _plain("<f2")),
        Format(2, "Q4_0", 32, 18, _q4_0),
        Format(3, "Q4_1", 32, 20, _q4_1),
        Format(6, "Q5_0", 32, 22, _q5_0),
        Format(7, "Q5_1", 32, 24, _q5_1),
        Format(8, "Q8_0", 32, 34, _q8_0),
        Format(9, "Q8_1", 32, 40),
        Format(10, "Q2_K", 256, 84, _q2_k),
        Format(11, "Q3_K", 256, 110, _q3_k),
        Format(12, "Q4_K", 256, 144, _q4_k),
        Format(13, "Q5_K", 256, 176, _q5_k),
        Format(14, "Q6_K", 256, 210, _q6_k),
        Format(15, "Q8_K", 256, 292),
        Format(16, "IQ2_XXS", 256, 66),
        Format(17, "IQ2_XS", 256, 74),
        Format(18, "IQ3_XXS", 256, 98),
        Format(19, "IQ1_S", 256, 50),
        Format(20, "IQ4_NL", 32, 18, _iq4_nl),
        Format(21, "IQ3_S", 256, 110),
        Format(22, "IQ2_S", 256, 82),
        Format(23, "IQ4_XS", 256, 136, _iq4_xs),
        Format(24, "I8", 1, 1),
        Format(25, "I16", 1, 2),
        Format(26, "I32", 1, 4),
        Format(27, "I64", 1, 8),
        Format(28, "F64", 1, 8, _plain("<f8")),
        Format(29, "IQ1_M", 256, 56),
        Format(30, "BF16", 1, 2, _bf16),
        Format(34, "TQ1_0", 256, 54),
        Format(35, "TQ2_0", 256, 66),
        Format(39, "MXFP4", 32, 17, _mxfp4),
        Format(40, "NVFP4", 64, 36),
    )
}
"""ggml's formats by their numbers."""
