"""Where books come from: a local folder, a single file, or a Hugging Face data set."""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decoder.parts import check, decoded, is_repository, parse_json

SPLITS = ("train", "validation", "test")
SUFFIXES = (".jsonl.gz", ".jsonl", ".parquet", ".txt", ".npy")
# A streamed set is shuffled as far as a window of this many rows allows, and by whole files.
SHUFFLE_ROWS = 256
_MOST_IDS = 2**31  # of a vocabulary
LARGEST_TEXT = 2**28  # bytes of a .txt file
NAMED = 3  # files that are told by name


@dataclass(frozen=True)
class Source:
    """The books of one split, in local ``files`` or on the hub.

    ``split`` is what was asked for; ``shared`` tells that all splits have the same books, so that the caller holds
    some of them out.
    """

    name: str
    split: str
    shared: bool = False
    files: tuple[Path, ...] = ()
    subset: str | None = None
    hub_split: str = "train"
    revision: str = ""
    streaming: bool = False

    def __post_init__(self) -> None:
        for path in self.files:
            if path.suffix == ".txt" and path.stat().st_size > LARGEST_TEXT:
                raise ValueError(
                    f"{path} is one text of {path.stat().st_size / 1e9:.1f} GB, and a text is tokenised whole: cut it, "
                    f"as by split -C {LARGEST_TEXT >> 20}m --additional-suffix=.txt {path} PART-"
                )

    def described(self) -> str:
        """Which files these are, or which part of a data set."""
        names = [path.name for path in self.files]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more if names else f"{self.hub_split} of {self.name}"

    def key(self) -> str:
        """A text that changes whenever the books may have changed."""
        if self.files:
            return files_key(self.files)
        return json.dumps([self.name, self.subset, self.hub_split, self.revision, self.streaming])

    def texts(self, column: str) -> Iterator[str | np.ndarray]:
        """The text of every book, local ones in order; of .npy files rows of token ids.

        Raises ValueError without the column, OSError on broken data.
        """
        if self.files:
            for path in self.files:
                yield from _file_texts(path, column)
            return
        import datasets

        rows = _from_hub(
            self.name, datasets.load_dataset, self.name, self.subset, split=self.hub_split, streaming=self.streaming
        )
        if self.streaming:
            # The first books must be a fair sample: `max_chunks` may end the reading long before the set's end.
            rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_ROWS)
        # A stream may not know its columns before the first row.
        if column in (rows.column_names or ()):
            rows = rows.select_columns([column])
        rows, number = iter(rows), 0
        while row := _from_hub(self.name, next, rows, None):
            if column not in row:
                raise _no_column(self.name, column, list(row))
            number += 1
            yield _text(f"row {number} of {self.name}", column, row[column])


def find_source(name: str, split: str, subset: str | None = None, streaming: bool = False) -> Source:
    """The books of ``split`` in ``name``: an existing folder or file, else a hub id.

    In a folder a split is every file whose name begins with it (``train.jsonl.gz``, ``train-00000-of-00002.parquet``)
    or that lies in a folder of that name. Of a folder of .txt files without such names every tenth book by name, from
    the first on, is for validation and test. A file, or a set with a single split, is shared by all splits.
    ``subset`` and ``streaming`` concern the hub: a set's configuration, and reading it without downloading it whole.
    Raises FileNotFoundError when there is nothing of the kind, OSError when the hub cannot be read.
    """
    path = Path(name)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"{name} is of no known kind; known are {', '.join(SUFFIXES)}")
        return Source(name, split, shared=True, files=(path,))
    if path.is_dir():
        return _in_folder(path, name, split)
    if not is_repository(name):
        raise FileNotFoundError(f"there is no file or folder of books at {name}")
    import datasets

    builder = _from_hub(name, datasets.load_dataset_builder, name, subset)
    splits = [str(name) for name in builder.info.splits or builder.config.data_files or {}]
    if split not in splits and len(splits) != 1:
        raise FileNotFoundError(f"the data set {name} has no {split} split but {', '.join(splits)}")
    shared = len(splits) == 1
    return Source(name, split, shared, (), subset, splits[0] if shared else split, str(builder.hash), streaming)


def _in_folder(folder: Path, name: str, split: str) -> Source:
    """`find_source` in a folder."""

    def of_split(wanted: str) -> list[Path]:
        # Not training-day.txt, which is a book's own name.
        named = (path for path in folder.glob(f"{wanted}*") if not path.name[len(wanted) :][:1].isalpha())
        return sorted([*_books(named), *_books(folder.glob(f"{wanted}/*"))])

    if not any(map(of_split, SPLITS)):
        books = _books(folder.iterdir())
        if len(books) == 1 and books[0].suffix == ".txt":
            return Source(name, split, shared=True, files=tuple(books))
        if books and all(book.suffix == ".txt" for book in books):
            held_out = books[::10]
            return Source(name, split, files=tuple(book for book in books if (book in held_out) == (split != "train")))
    if not (files := of_split(split)):
        raise FileNotFoundError(
            f"{name} has no {split} file ({split}.jsonl.gz, .jsonl, .parquet, .txt or .npy) and is no folder of .txt "
            "files only"
        )
    return Source(name, split, files=tuple(files))


def _books(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.is_file() and path.name.endswith(SUFFIXES))


def files_key(files: tuple[Path, ...] | list[Path]) -> str:
    """A text that changes whenever one of the files does."""
    return json.dumps([[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files])


def _from_hub(name: str, load, *args, **kwargs):
    try:
        return load(*args, **kwargs)
    except Exception as error:
        # Missing, private, unreachable and wrongly named data sets raise unrelated types; the user needs one fact.
        first = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
        raise OSError(
            f"there are no books at {name} here, and the data set {name} could not be read from the Hugging Face hub "
            f"({reason}); check the name and the network, or give --data.source a local folder"
        ) from error


def _no_column(name: str, column: str, columns: list[str]) -> ValueError:
    return ValueError(f"{name} has no text column {column!r} but {', '.join(columns)}; give --data.text_column")


def _text(where: str, column: str, value) -> str:
    if not isinstance(value, str):
        words = "no text; give --data.text_column, or leave this one out"
        raise ValueError(f"column {column!r} of {where} holds {type(value).__name__}, {words}")
    check(value, f"column {column!r} of {where}")
    return value


def _file_texts(path: Path, column: str) -> Iterator[str | np.ndarray]:
    if path.name.endswith(".npy"):
        yield from _rows(path)
    elif path.name.endswith(".txt"):
        yield io.StringIO(decoded(path.read_bytes(), str(path)), newline=None).read()
    elif path.name.endswith(".parquet"):
        yield from _parquet_texts(path, column)
    else:
        yield from _jsonl_texts(path, column)


def _rows(path: Path) -> np.ndarray:
    """Token ids [texts, tokens] that need no tokenizer: text that a model has written, say."""
    try:
        rows = np.load(path)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of token ids") from error
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"{path} holds {rows.dtype} {list(rows.shape)}, and rows of token ids are needed")
    wrong = np.argwhere((rows < 0) | (rows >= _MOST_IDS))
    if len(wrong):
        row, place = wrong[0]
        raise ValueError(f"row {row + 1} of {path} holds {rows[row, place]}, which is no token id")
    return rows


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file") from error
    if column not in file.schema_arrow.names:
        raise _no_column(str(path), column, file.schema_arrow.names)
    number, batches = 0, file.iter_batches(batch_size=16, columns=[column])
    while True:
        try:
            values = next(batches).column(0)
        except StopIteration:
            return
        except OSError as error:
            raise OSError(f"{path} is damaged behind row {number}; fetch it anew") from error
        for value in values:
            number += 1
            where = f"row {number} of {path}"
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                raise ValueError(f"column {column!r} of {where} is not UTF-8 text") from error
            yield _text(where, column, text)


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"line {number} of {path}"
                if not (text := decoded(line, where).strip()):
                    continue
                book = parse_json(text, where)
                if not isinstance(book, dict):
                    raise ValueError(f"{where} is no JSON object")
                if column not in book:
                    raise _no_column(where, column, list(book))
                yield _text(where, column, book[column])
    except EOFError as error:
        raise OSError(f"{path} is cut short") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"{path} is damaged or no gzip file ({error}); fetch it anew") from error
