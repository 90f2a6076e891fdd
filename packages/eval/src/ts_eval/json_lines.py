"""Files of one JSON object per line that grow while their writer may be killed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def to_line(record: dict) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def whole_lines(path: Path) -> Iterator[tuple[dict, int]]:
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


def write_whole(file: BinaryIO, line: bytes) -> None:
    """Write all of ``line`` to an unbuffered file, which may take only a part at a time."""
    written = 0
    while written < len(line):
        written += file.write(line[written:])


def named(error: OSError, path: Path) -> OSError:
    """The system's error with the file it happened to, which writing leaves out."""
    return OSError(error.errno, error.strerror, str(path)) if error.errno else error
