"""A mistyped name is told with the one that may be meant."""

import pytest

import decoder
from decoder.checks import meant, meant_beside


def test_a_name_that_is_near_is_told():
    assert meant("sufix", ["ar", "auto", "suffix"]) == " (is suffix meant?)"
    assert meant("faster", ["ar", "auto"]) == meant(None, ["ar"]) == meant("x" * 10_000, ["ar"]) == ""


def test_a_path_that_is_near_is_told(tmp_path):
    (tmp_path / "smollm2").mkdir()
    assert meant_beside(tmp_path / "smolm2") == " (is smollm2 meant?)"
    assert meant_beside(tmp_path / "none" / "smolm2") == ""


def test_methods_dtypes_models_and_options_are_told(dec, tmp_path):
    with pytest.raises(ValueError, match=r"unknown method 'atuo' \(is auto meant"):
        dec.generate([1, 2], 3, method="atuo")
    with pytest.raises(ValueError, match=r"unknown dtype 'bfloat61' \(is bfloat16 meant"):
        decoder.load(tmp_path, dtype="bfloat61")
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(OSError, match=r"no model folder at .*smolm2 \(is smollm2 meant"):
        decoder.load(tmp_path / "smolm2")
    with pytest.raises(ValueError, match=r"verification must be one of .* not 'exat' \(is exact meant"):
        decoder.TokenSwiftOptions(verification="exat")
