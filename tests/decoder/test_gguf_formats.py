"""Blocks are unpacked to the numbers of the gguf package, which is ggml's own reference in Python."""

import gguf
import numpy as np
import pytest
import torch

from decoder.model.gguf import formats
from decoder.model.gguf.formats import FORMATS, unpacked

KNOWN = [number for number, format in FORMATS.items() if format.fault() is None]


@pytest.mark.parametrize("number", KNOWN, ids=lambda number: FORMATS[number].name)
@np.errstate(all="ignore")
def test_any_bytes_are_the_references_numbers(number, monkeypatch):
    monkeypatch.setattr(formats, "_AT_ONCE", 1024)  # so that a row is unpacked in several parts
    format = FORMATS[number]
    blocks = np.random.default_rng(number).integers(0, 256, (24, 8 * format.bytes), np.uint8)
    if format.name == "F64":
        expected = blocks.view("<f8").astype(np.float32)
    else:
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number))
    assert np.array_equal(unpacked(blocks, format, torch.float32).numpy(), expected, equal_nan=True)
    narrow = unpacked(blocks, format, torch.bfloat16)
    torch.testing.assert_close(narrow, torch.from_numpy(expected.copy()).bfloat16(), rtol=0, atol=0, equal_nan=True)


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
