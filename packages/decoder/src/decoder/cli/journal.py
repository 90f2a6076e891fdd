"""Files of one JSON object per line that grow while their writer may be killed: what of a generation is on disk."""

import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import portalocker


def whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """(record, offset of its end) of each line but a last one that was cut short; none of a missing file.

    Raises:
        ValueError: a line in front of others is damaged.
    """
    if not path.is_file():
        return
    end = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            end += len(line)
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                # A line without its end was the last one, even if another process has written on meanwhile.
                if line.endswith(b"\n") and lines.read(1):
                    raise damaged(path, number)
                return
            yield record, end


def damaged(path: Path, number: int) -> ValueError:
    """The error of a line, counted from 1, that cannot be read although it is whole or has others behind it."""
    return ValueError(f"line {number} of {path} is damaged: move that file away, or choose another --output")


def write_whole(file: io.RawIOBase, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file, which may take only a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def named(error: OSError, path: Path) -> OSError:
    """The system's error with the file it happened to, which writing leaves out."""
    return OSError(error.errno, error.strerror, str(path)) if error.errno else error


class Journal:
    """Writes a file of `whole_lines`: each line at once and without a buffer, so that a kill loses none of them.

    Args:
        path: the file.
        sync_seconds: how often the file is made to reach the disk, for a power cut: by the first line that is written
            after so many seconds, and by `close`; 0 is by every line, before `append` returns.

    Attributes:
        end: the offset at which the next line begins; what stands there is dropped.
    """

    def __init__(self, path: Path, sync_seconds: float = 0.0):
        self.path, self.end = path, 0
        self._sync_seconds, self._synced = sync_seconds, time.monotonic()
        self._unsynced = False
        self._file: io.FileIO | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self, busy: str = "", new: bool = False) -> None:
        """Open the file for `append`, unless it is open; with ``busy`` hold it against other writers until `close`.

        Raises:
            FileExistsError: it is there already and shall be ``new``.
            OSError: it cannot be opened, or another process holds it; then the words are those of ``busy``.
        """
        if self._file is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "xb" if new else "ab", buffering=0)  # noqa: SIM115 (open until `close`)
        try:
            if busy:
                portalocker.lock(self._file, portalocker.LOCK_EX | portalocker.LOCK_NB)
        except portalocker.AlreadyLocked:
            self.close()
            raise OSError(busy) from None
        except portalocker.LockException:
            pass  # Some network file systems do not support locks.

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line. Raises OSError, naming the file, when it cannot be written."""
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            self._file.truncate(self.end)
            self._file.seek(self.end)
            self._unsynced = True
            write_whole(self._file, line)
            if time.monotonic() - self._synced >= self._sync_seconds:
                os.fsync(self._file.fileno())
                self._synced, self._unsynced = time.monotonic(), False
        except OSError as error:
            raise named(error, self.path) from error
        self.end += len(line)

    def close(self) -> None:
        """Close the file, all of it on the disk. Raises OSError, naming the file, when it cannot get there."""
        if self._file is None:
            return
        file, self._file = self._file, None
        unsynced, self._unsynced = self._unsynced, False
        with file:
            try:
                if unsynced:
                    os.fsync(file.fileno())
            except OSError as error:
                raise named(error, self.path) from error
