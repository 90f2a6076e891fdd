"""Reading PG-19 files: the one place that knows how a book is stored."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

SPLITS = ("train", "validation", "test")


def read_books(path: Path) -> Iterator[dict]:
    """Yield the books of a ``.jsonl.gz`` file as dicts with PG-19's own fields."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def write_books(path: Path, books: list[dict]) -> None:
    """Write books as ``.jsonl.gz``; no time stamp, so the same books give the same bytes."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as out:
        for book in books:
            out.write((json.dumps(book, ensure_ascii=False) + "\n").encode("utf-8"))
