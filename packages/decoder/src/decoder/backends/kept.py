"""What one process leaves for the next in the user's cache folder: JSON, in files that nobody else can have written."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from decoder.backends.native.library import trusted

_MOST_FILES = 32  # of a folder
_MOST_BYTES = 1 << 20  # of a file


def read_kept(file: Path) -> Any:
    """What was kept in a file; None if it is damaged, or if somebody else can have written it."""
    with suppress(OSError, ValueError, RecursionError):
        if trusted(file.parent) and trusted(file):
            with open(file, "rb") as opened:
                return json.loads(opened.read(_MOST_BYTES))
    return None


def keep(file: Path, found: Any) -> bool:
    """Keep what JSON can hold in a file, in place of the oldest ones of its folder; whether there is a place for it."""
    folder = file.parent
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not trusted(folder):
            return False
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as new:
            json.dump(found, new)
        os.replace(new.name, file)
        for old in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST_FILES]:
            old.unlink()
        return True
    return False


def state(file: str | os.PathLike) -> bytes:
    """What changes with a file."""
    status = os.stat(file)
    return f"{file} {status.st_size} {status.st_mtime_ns}".encode()


def digest(parts: Iterable[bytes]) -> str:
    """A hash of all parts, which tells where each ends."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
