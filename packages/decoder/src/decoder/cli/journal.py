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
    """(record, offset of its end) of each complete line, up to one that a kill cut short; none of a missing file."""
    if not path.is_file():
        return
    end = 0
    with open(path, "rb") as lines:
        for line in lines:
            end += len(line)
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict):
                return
            yield record, end


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
        sync_seconds: after how many seconds what was written is on the disk at the latest, for a power cut; 0 for
            every line, before `append` returns.

    Attributes:
        end: the offset at which the next line begins; what stands there is dropped.
    """

    def __init__(self, path: Path, sync_seconds: float = 0.0):
        self.path, self.end = path, 0
        self._sync_seconds, self._synced = sync_seconds, time.monotonic()
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
            write_whole(self._file, line)
            if time.monotonic() - self._synced >= self._sync_seconds:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise named(error, self.path) from error
        self.end += len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
