"""The file itself: a header of keys and values, and tensors as raw blocks, mapped into memory and parsed in one pass.

Nothing is copied here. A long array of texts, such as a vocabulary, is a buffer and offsets until somebody asks for the
texts, and a tensor is a view of its bytes in the file.
"""

import mmap
import os
import re
import struct
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from decoder.model.gguf.formats import FORMATS, Format

ELSE = "give the model's Hugging Face folder or hub id instead"
FETCH = "fetch it again"
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), _BOOL: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# No vocabulary comes near; a header that claims more is damaged, and would take seconds to walk through.
_MOST_TEXTS = 1 << 22
_MOST_KEYS = 1 << 16
_MOST_AXES = 4
_LONGEST_NAME = 1 << 16
_ARCHITECTURE = re.compile(r"[a-zA-Z0-9._-]{1,64}")
Wanted = TypeVar("Wanted")


class GgufTensor(NamedTuple):
    """A tensor as it lies in the file.

    Attributes:
        format: how its numbers are stored.
        shape: its axes, the rows before the columns, as PyTorch has them.
        blocks: its bytes, a read-only view [product of all axes but the last, bytes of a row] into the mapped file.
        offset: where it begins, in bytes behind the start of the data.
    """

    format: Format
    shape: tuple[int, ...]
    blocks: np.ndarray
    offset: int


class Texts:
    """An array of texts in the header: its bytes, and where each lies in them. One that is not UTF-8 is a ValueError.

    Args:
        buffer: the file.
        starts: where each text begins, and behind them where one more would; before each are eight bytes of its length.
        where: what these texts are, for the message.
    """

    def __init__(self, buffer: mmap.mmap, starts: np.ndarray, where: str):
        self._buffer, self._starts, self._where = buffer, starts, where

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return self._text(int(self._starts[index]), int(self._starts[index + 1]))

    def __iter__(self) -> Iterator[str]:
        starts = self._starts.tolist()
        # One copy of all, of which parts are taken more quickly than of a mapped file.
        copied, first = self._buffer[starts[0] : starts[-1]], starts[0]
        with suppress(UnicodeDecodeError):
            return iter([copied[at - first : end - first - 8].decode() for at, end in pairwise(starts)])
        return map(self._text, starts[:-1], starts[1:])  # which tells where it is

    def _text(self, start: int, following: int) -> str:
        try:
            return self._buffer[start : following - 8].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._where} that are no text, so it is damaged: {FETCH}") from error


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, whose header has been read and whose weights lie in the file until they are looked at.

    Attributes:
        path: the file.
        metadata: its keys and values: int, float, bool, str, a numpy array or `Texts`.
        tensors: its tensors by llama.cpp's names, in the order of the header.
        data_start: the offset in the file at which the data begins.
        buffer: the mapped file.
        packing: matrices that are packed already, or will be, by the names of their tensors (`gguf.ahead`).
        looked_at: the keys that somebody has asked for.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_start: int
    buffer: mmap.mmap
    packing: dict[str, Future[Any]] = field(default_factory=dict)
    looked_at: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Map a file and parse its header.

        Raises:
            OSError: there is no such file.
            ValueError: it is no GGUF file, is incomplete or damaged, or stores tensors in a way that is unknown here.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no model file at {path}")
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is no GGUF file: {ELSE}")
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata, tensors, data_start = _Parser(path, buffer).parse()
        return cls(path, metadata, tensors, data_start, buffer)

    def packed(self, name: str) -> Any:
        """The matrix of a tensor that was packed ahead; None if nobody has begun with it."""
        future = self.packing.pop(name, None)
        return None if future is None or future.cancel() else future.result()

    def stop_packing(self) -> None:
        """Pack no more ahead, and drop what nobody has taken."""
        while self.packing:
            self.packing.popitem()[1].cancel()

    def release(self, name: str | None = None) -> None:
        """Give back the memory in which a tensor's bytes lie, or all of them, until somebody looks at them again."""
        start, end = 0, len(self.buffer)
        if name is not None:
            tensor = self.tensors[name]
            start = (self.data_start + tensor.offset) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            end = self.data_start + tensor.offset + tensor.blocks.size
        if hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)

    def get(self, key: str, kind: type[Wanted], default: Wanted | None = None) -> Wanted | None:
        """The value of a key, or ``default`` where the file has none.

        Raises ValueError if the value is of another kind than ``kind``: int, float, bool, str, `Texts` or np.ndarray.
        """
        self.looked_at.add(key)
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            names = {Texts: "a list of texts", np.ndarray: "a list of numbers", str: "a text", bool: "true or false"}
            raise ValueError(f"{self.path} has a {key} that is not {names.get(kind, 'a number')}: {ELSE}")
        return value

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the model's architecture. Raises ValueError if the file has none."""
        name = self.get("general.architecture", str) or ""
        if not _ARCHITECTURE.fullmatch(name):
            raise ValueError(f"{self.path} names no architecture (general.architecture): {ELSE}")
        return name


def open_gguf(source: str | os.PathLike) -> GgufFile:
    """The file at ``source``; see `GgufFile.read`. One that was opened before and has not changed is not read again."""
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file at {source}")
    state = path.stat()
    return _opened(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=2)
def _opened(path: Path, state: tuple[int, ...]) -> GgufFile:
    return GgufFile.read(path)


def named(text: str | bytes) -> str:
    """A text of the file for a message: what is not printed is escaped, and it is never long."""
    text = text if isinstance(text, str) else text.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


class _Parser:
    """Walks through the header once. ``where`` is what is being read, for the message if the file ends there."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path, self.buffer, self.size = path, buffer, len(buffer)
        self.at, self.where = 4, "its header"

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
        self._check_version()
        tensor_count, key_count = self._number(_U64), self._number(_U64)
        metadata: dict[str, Any] = {}
        for number in range(self._count(key_count, "keys", _MOST_KEYS)):
            key = self._name(f"the name of key {number + 1} of {key_count}")
            if key in metadata:
                raise self._damaged(f"has the key {named(key)} twice")
            self.where = f"the key {named(key)}"
            metadata[key] = self._value(self._number(_U32))
        tensors: dict[str, tuple[Format, tuple[int, ...], int]] = {}
        for number in range(self._count(tensor_count, "tensors", _MOST_KEYS)):
            name = self._name(f"the name of tensor {number + 1} of {tensor_count}")
            if name in tensors:
                raise self._damaged(f"has the tensor {named(name)} twice")
            tensors[name] = self._tensor(name)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged("has a general.alignment that is no power of two")
        start = -(-self.at // alignment) * alignment
        return metadata, self._placed(tensors, start, alignment), start

    def _damaged(self, fault: str) -> ValueError:
        return ValueError(f"{self.path} {fault}, so it is damaged: {FETCH}")

    def _cut_short(self) -> ValueError:
        return ValueError(f"{self.path} ends within {self.where}, so it is cut short: {FETCH}")

    def _check_version(self) -> None:
        version = self._number(_U32)
        if version and not version & 0xFFFF:
            raise ValueError(f"{self.path} is written for big-endian processors: convert it to little-endian")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is of GGUF version {version}, and 2 and 3 are read: convert it anew")

    def _number(self, layout: struct.Struct) -> int:
        end = self.at + layout.size
        if end > self.size:
            raise self._cut_short()
        (number,) = layout.unpack_from(self.buffer, self.at)
        self.at = end
        return number

    def _count(self, count: int, what: str, most: int) -> int:
        if count > most:
            raise self._damaged(f"claims {count} {what}")
        return count

    def _bytes(self, length: int) -> bytes:
        end = self.at + length
        if end > self.size:
            raise self._cut_short()
        content = self.buffer[self.at : end]
        self.at = end
        return content

    def _name(self, where: str) -> str:
        self.where = where
        length = self._number(_U64)
        if length > _LONGEST_NAME:
            raise self._damaged(f"claims {length} bytes for {where}")
        content = self._bytes(length)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"has {named(content)} for {where}, which is no text") from error

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            content = self._bytes(self._number(_U64))
            try:
                return content.decode()
            except UnicodeDecodeError as error:
                raise self._damaged(f"has a value of {self.where} that is no text") from error
        return self._numbers(kind, 1)[0].item()

    def _array(self) -> Any:
        kind, count = self._number(_U32), self._number(_U64)
        if kind == _ARRAY:
            raise ValueError(f"{self.path} has a list of lists at {self.where}, which is not read: {ELSE}")
        return self._texts(count) if kind == _STRING else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise self._damaged(f"has a value of the unknown type {kind} at {self.where}")
        if count * dtype.itemsize > self.size - self.at:
            raise self._cut_short()
        numbers: np.ndarray = np.frombuffer(self.buffer, dtype, count, self.at)
        self.at += numbers.nbytes
        # A bool of another bit pattern than 0 and 1 would be undefined.
        return numbers.view(np.uint8) != 0 if kind == _BOOL else numbers

    def _texts(self, count: int) -> Texts:
        # Each has at least the eight bytes of its length.
        if count * 8 > self.size - self.at:
            raise self._cut_short()
        self._count(count, f"texts at {self.where}", _MOST_TEXTS)
        starts = np.empty(count + 1, np.int64)
        buffer, unpack, at, last = self.buffer, _U64.unpack_from, self.at, self.size - 8
        for i in range(count):
            if at > last:
                raise self._cut_short()
            at += 8
            starts[i] = at
            (length,) = unpack(buffer, at - 8)
            if length > self.size - at:
                raise self._cut_short()
            at += length
        self.at, starts[count] = at, at + 8
        return Texts(buffer, starts, f"{self.path} has texts at {self.where}")

    def _tensor(self, name: str) -> tuple[Format, tuple[int, ...], int]:
        what = f"the tensor {named(name)}"
        self.where = what
        axes = self._number(_U32)
        if not 1 <= axes <= _MOST_AXES:
            raise self._damaged(f"claims {axes} axes for {what}")
        # The file has the columns before the rows.
        shape = tuple(reversed([self._number(_U64) for _ in range(axes)]))
        kind, offset = self._number(_U32), self._number(_U64)
        stored = FORMATS.get(kind)
        if stored is None:
            raise ValueError(f"{self.path} has {what} in the quantisation {kind}, unknown here: {ELSE}")
        if 0 in shape or shape[-1] % stored.elements:
            sizes = "x".join(map(str, shape))
            raise self._damaged(f"has {what} of {sizes} numbers, which is no multiple of {stored.name}'s blocks")
        return stored, shape, offset

    def _placed(
        self, tensors: dict[str, tuple[Format, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors as views. As llama.cpp asks for, each begins where the one before it ends."""
        end = expected = 0
        placed = {}
        for name, (stored, shape, offset) in sorted(tensors.items(), key=lambda item: item[1][2]):
            if offset != expected:
                raise ValueError(f"{self.path} is damaged, its tensor {named(name)} is not where it should be: {FETCH}")
            rows, row_bytes = prod(shape[:-1]), shape[-1] // stored.elements * stored.bytes
            end = offset + rows * row_bytes
            if start + end > self.size:
                self.where = f"the tensor {named(name)}"
                raise self._cut_short()
            blocks = np.frombuffer(self.buffer, np.uint8, rows * row_bytes, start + offset).reshape(rows, row_bytes)
            placed[name] = GgufTensor(stored, shape, blocks, offset)
            expected = -(-end // alignment) * alignment
        return {name: placed[name] for name in tensors}
