"""Where books come from: a local folder, a single file, or a Hugging Face data set."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")
SUFFIXES = (".jsonl.gz", ".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class Source:
    """The books of one split: ``key`` changes whenever they may have changed, ``shared`` if all splits share them."""

    name: str
    key: str
    files: tuple[Path, ...] = ()
    split: str = "train"
    shared: bool = False

    def texts(self, column: str) -> Iterator[str]:
        """The text of every book in order. Raises ValueError when the column is missing, OSError on broken files."""
        if self.files:
            for path in self.files:
                yield from _file_texts(path, column)
        else:
            rows = _hub_split(self.name, self.split)
            if column not in rows.column_names:
                raise _no_column(self.name, column, rows.column_names)
            for row in rows.select_columns([column]):
                yield row[column]


def find_source(name: str, split: str) -> Source:
    """The books of ``split`` in ``name``: an existing folder or file, else a hub id.

    In a folder a split is every file whose name begins with it (``train.jsonl.gz``, ``train-00000-of-00002.parquet``)
    or that lies in a folder of that name. Raises FileNotFoundError when there is nothing of the kind.
    """
    path = Path(name)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"{name} is of no known kind; known are {', '.join(SUFFIXES)}")
        return Source(name, _key([path]), (path,), split, shared=True)
    if path.is_dir():
        found = [*path.glob(f"{split}*"), *path.glob(f"{split}/*")]
        files = sorted(file for file in found if file.is_file() and file.name.endswith(SUFFIXES))
        if not files:
            raise FileNotFoundError(f"{name} has no {split} file ({split}.jsonl.gz, .jsonl, .parquet or .txt)")
        return Source(name, _key(files), tuple(files), split)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(f"there is no file or folder of books at {name}")
    return Source(name, f"{name} {_hub_split(name, split)._fingerprint}", (), split)


def _key(files: list[Path]) -> str:
    return json.dumps([[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files])


def _hub_split(name: str, split: str):
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:
        # Missing, private, unreachable and split-less data sets raise unrelated types; the user needs one fact.
        reason = f"could not be read from the Hugging Face hub ({type(error).__name__})"
        raise OSError(f"there are no books at {name} here, and its {split} split {reason}") from error


def _no_column(name: str, column: str, columns: list[str]) -> ValueError:
    return ValueError(f"{name} has no text column {column!r} but {', '.join(columns)}; give --data.text_column")


def _file_texts(path: Path, column: str) -> Iterator[str]:
    if path.name.endswith(".txt"):
        yield path.read_text(encoding="utf-8")
    elif path.name.endswith(".parquet"):
        yield from _parquet_texts(path, column)
    else:
        yield from _jsonl_texts(path, column)


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file") from error
    if column not in file.schema_arrow.names:
        raise _no_column(str(path), column, file.schema_arrow.names)
    for batch in file.iter_batches(batch_size=16, columns=[column]):
        yield from batch.column(0).to_pylist()


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    book = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} of {path} is not JSON") from error
                if column not in book:
                    raise _no_column(str(path), column, list(book))
                yield book[column]
    except EOFError as error:
        raise OSError(f"{path} is cut short") from error
