"""Blocks are unpacked to the numbers of the gguf package, which is ggml's own reference in Python."""

import gguf
import numpy as np
import pytest
import torch

from decoder.model.gguf import formats
from decoder.model.gguf.formats import FORMATS, unpacked

KNOWN = [number for number, format in FORMATS.items() if format.fault() is None]


def reference(blocks, format):
    if format.name == "F64":
        return blocks.view("<f8").astype(np.float32)
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType(format.number))


@pytest.mark.parametrize("number", KNOWN, ids=lambda number: FORMATS[number].name)
@np.errstate(all="ignore")
def test_any_bytes_are_the_references_numbers(number, monkeypatch):
    monkeypatch.setattr(formats, "_AT_ONCE", 1024)  # so that a row is unpacked in several parts
    format = FORMATS[number]
    random = np.random.default_rng(number)
    blocks = random.integers(0, 256, (200, 8 * format.bytes), np.uint8)
    if format.name == "F64":
        # Most of any bytes would be beyond float32.
        blocks = random.standard_normal((200, 8)).view(np.uint8)
    expected = reference(blocks, format)
    if format.unpack is not None:
        ours = format.unpack(blocks.reshape(-1, format.bytes)).reshape(expected.shape)
        assert np.array_equal(ours, expected, equal_nan=True)
    finite = np.isfinite(expected).all(axis=1)
    blocks, expected = blocks[finite], torch.from_numpy(expected[finite])
    assert len(blocks) > 50
    assert torch.equal(unpacked(blocks, format, torch.float32), expected)
    assert torch.equal(unpacked(blocks, format, torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_found_and_what_only_sums_to_infinity_is_not(value):
    large = np.full(1000, 3e38, np.float32)
    assert unpacked(large.view(np.uint8)[None], FORMATS[0], torch.float32).isfinite().all()
    large[777] = value
    with pytest.raises(FloatingPointError):
        unpacked(large.view(np.uint8)[None], FORMATS[0], torch.float32)
    with pytest.raises(FloatingPointError):
        unpacked(np.float32([1.0, 70_000.0]).view(np.uint8)[None], FORMATS[0], torch.float16)


def test_sizes_of_blocks_are_ggmls():
    for number, format in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (format.name, (format.elements, format.bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


def test_what_nobody_unpacks_and_what_needs_the_package_is_said(monkeypatch):
    assert FORMATS[15].fault() == "unknown here"
    assert FORMATS[16].fault() is None
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    assert "pip install gguf" in FORMATS[16].fault()
    assert FORMATS[12].fault() is None
