"""Damaged GGUF files: one sentence each, at once, and without taking memory for what a header only claims."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from decoder.model.gguf.file import GgufFile, open_gguf
from decoder.model.loading import read_config, read_model, read_tokenizer
from tests.decoder.test_gguf import hf_model, plain_file  # noqa: F401

# What a size in a header is made into.
HUGE = (2**63, 2**64 - 1, 2**32 - 1, 2**31, 2**40 + 1, 0)


def damaged(content, header_bytes, random):
    """The file with one fault in its header: cut, bytes changed, or eight or four of them a size that cannot be."""
    kind = random.integers(4)
    at = int(random.integers(4, header_bytes))
    if kind == 0:
        return content[:at]
    changed = bytearray(content)
    if kind == 1:
        for _ in range(random.integers(1, 9)):
            changed[int(random.integers(4, header_bytes))] = random.integers(256)
    elif kind == 2:
        changed[at : at + 8] = struct.pack("<Q", HUGE[random.integers(len(HUGE))])
    else:
        changed[at : at + 4] = struct.pack("<I", HUGE[random.integers(len(HUGE))] & 0xFFFFFFFF)
    return bytes(changed)


def tried(path, reading):
    """What the user is told, or None if the file is read; refused are anything else, slowness and much memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        reading(path)
        message = None
    except (ValueError, OSError) as error:
        message = str(error)
    assert time.process_time() - began < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message is None or (str(path) in message and "\n" not in message and len(message) < 600), message
    return message, peak


def test_some_hundred_damaged_headers(plain_file, tmp_path):  # noqa: F811
    header_only(plain_file, tmp_path, 400)


@pytest.mark.slow
def test_ten_thousand_damaged_headers(plain_file, tmp_path):  # noqa: F811
    header_only(plain_file, tmp_path, 10_000)


def header_only(whole, tmp_path, count):
    content, random = whole.read_bytes(), np.random.default_rng(5)
    header_bytes = GgufFile.read(whole).data_start
    told = 0
    for i in range(count):
        path = tmp_path / f"{i % 2}.gguf"
        path.write_bytes(damaged(content, header_bytes, random))
        for reading in (open_gguf, read_config, read_tokenizer):
            message, peak = tried(path, reading)
            # Python's own objects for a vocabulary of some hundred tokens and for a configuration take some of it.
            assert peak < len(content) + 2**20
        told += message is not None
    assert told > count / 3


def test_damaged_sizes_of_a_model_take_no_memory(plain_file, tmp_path):  # noqa: F811
    """Nothing is allocated for a configuration that is not that of the tensors."""
    content, path = plain_file.read_bytes(), tmp_path / "bad.gguf"
    for name in ("feed_forward_length", "embedding_length", "attention.head_count", "attention.head_count_kv"):
        for size in (1, 3, 2**17, 2**31 - 1):
            at = content.index(b"llama." + name.encode() + b"\4\0\0\0") + len(b"llama." + name.encode()) + 4
            path.write_bytes(content[:at] + struct.pack("<I", size) + content[at + 4 :])
            with pytest.raises((ValueError, OSError), match=str(path)):
                read_model(path, "cpu")


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.tokens", "llama.block_count"])
def test_where_a_file_ends_is_named(plain_file, tmp_path, key):  # noqa: F811
    content, path = plain_file.read_bytes(), tmp_path / "cut.gguf"
    path.write_bytes(content[: content.index(key.encode()) + len(key) + 6])
    with pytest.raises(ValueError, match=f"ends within the key '{key}', so it is cut short"):
        open_gguf(path)


def test_where_the_data_ends_is_named(plain_file, tmp_path):  # noqa: F811
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain_file.read_bytes()[:-100])
    last = max(GgufFile.read(plain_file).tensors.items(), key=lambda item: item[1].offset)[0]
    with pytest.raises(ValueError, match=f"ends within the tensor '{last}'"):
        open_gguf(path)


def written(path, *fields, tensor=None):
    """A file of one key or one tensor, byte by byte."""
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, tensor is not None, len(fields)) + b"".join(fields) + (tensor or b"")
    )
    return path


def text(content):
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
    ("fields", "tensor", "words"),
    [
        ([text(b"a") + struct.pack("<I", 13)], None, "unknown type 13 at the key 'a'"),
        ([text(b"a") + struct.pack("<IIQ", 9, 9, 1)], None, "list of lists at the key 'a'"),
        ([text(b"a") + struct.pack("<IIQ", 9, 8, 2**61)], None, "ends within the key 'a'"),
        ([text(b"a") + struct.pack("<IIQ", 9, 4, 2**62)], None, "ends within the key 'a'"),
        ([text(b"a\xff") + struct.pack("<IB", 7, 1)], None, "which is no text"),
        ([text(b"a") + struct.pack("<I", 8) + text(b"\xff")], None, "a value of the key 'a' that is no text"),
        (2 * [text(b"a") + struct.pack("<IB", 7, 1)], None, "the key 'a' twice"),
        ([text(b"general.alignment") + struct.pack("<II", 4, 33)], None, "general.alignment that is no power of two"),
        ([], text(b"t") + struct.pack("<I4QIQ", 4, 2**32, 2**32, 2**32, 2**32, 0, 0), "ends within the tensor 't'"),
        (
            [],
            text(b"t") + struct.pack("<IQIQ", 1, 31, 2, 0),
            "the tensor 't' of 31 numbers, which is no multiple of Q4_0",
        ),
        ([], text(b"t") + struct.pack("<I", 5), "claims 5 axes for the tensor 't'"),
        ([], text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 32), "tensor 't' is not where it should be"),
    ],
)
def test_each_fault_is_named_with_its_place(tmp_path, fields, tensor, words):
    path = written(tmp_path / "bad.gguf", *fields, tensor=tensor)
    with pytest.raises(ValueError) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value) and words in str(caught.value)


def test_other_versions_and_byte_orders_are_told_apart(tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match="is of GGUF version 1, and 2 and 3 are read"):
        open_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="big-endian"):
        open_gguf(path)


def test_a_file_that_changed_is_read_again(tmp_path):
    path = tmp_path / "changing.gguf"
    for name in ("first", "the second"):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name(name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert open_gguf(path).metadata["general.name"] == name
        assert open_gguf(path) is open_gguf(path)
