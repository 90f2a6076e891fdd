"""The texts that generation starts from."""

import gzip
import itertools
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

SHIPPED = "pg19/test.jsonl.gz"
HUB_SPLIT = "test"


@dataclass(frozen=True)
class Prompt:
    """A prompt's name, for the report, and its token ids."""

    name: str
    token_ids: tuple[int, ...]


def is_hub_dataset(source: str | Path) -> bool:
    """Whether ``source`` is no file or folder here but could be a hub dataset: owner/name or owner/name:split."""
    return not Path(source).exists() and bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", str(source)))


def refuse_missing_prompts(source: str | Path) -> None:
    """Refuse at once, and offline, what is neither a file nor could be a hub dataset."""
    if Path(source).is_dir():
        raise IsADirectoryError(f"the prompts {source} are a folder: name a text or .jsonl file in it")
    if not Path(source).is_file() and not is_hub_dataset(source):
        raise FileNotFoundError(f"the prompt file {source} does not exist, and is no hub dataset (owner/name) either")


def read_texts(source: str | Path, limit: int | None = None) -> list[tuple[str, str]]:
    """(name, text) of the first ``limit`` prompts of a file or hub dataset; all for None or more than there are.

    ``.jsonl`` and ``.jsonl.gz``: one JSON object per line with a ``text``, named by its ``short_book_title`` (PG-19),
    ``title`` or ``name``, else by its line. Any other file is one UTF-8 text, named as the file. A hub dataset,
    ``owner/name`` or ``owner/name:split`` (by default its test split), has rows with such fields.

    Raises:
        OSError: the file or dataset cannot be read.
        ValueError: a record has no text, the text is empty, or the file is not UTF-8.
    """
    refuse_missing_prompts(source)
    texts = _hub_texts(str(source), limit) if is_hub_dataset(source) else _file_texts(Path(source), limit)
    if not texts:
        raise ValueError(f"{source} holds no prompt")
    for name, text in texts:
        if not text.strip():
            raise ValueError(f"the prompt {name} of {source} is empty")
    return texts


def _file_texts(path: Path, limit: int | None) -> list[tuple[str, str]]:
    try:
        if not path.name.endswith((".jsonl", ".jsonl.gz")):
            return [(path.name, path.read_text(encoding="utf-8"))][:limit]
        texts = []
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(texts) == limit:
                    break
                if line.strip():
                    texts.append(_record(path, number, line))
        return texts
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error


def _record(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"line {number} of {path} is no JSON object")
    return _named_text(record, path.name, number, f"line {number} of {path}")


def _named_text(record: dict, source: str, number: int, where: str) -> tuple[str, str]:
    if not isinstance(record.get("text"), str):
        raise ValueError(f"{where} has no field 'text' that is a string")
    name = record.get("short_book_title") or record.get("title") or record.get("name") or f"{source}:{number}"
    return str(name), record["text"]


def _hub_texts(source: str, limit: int | None) -> list[tuple[str, str]]:
    # Imported here because it takes a second and few comparisons need it.
    import datasets

    name, _, split = source.partition(":")
    try:
        # Streamed: a few books of a large collection need not wait for all of it.
        rows = list(itertools.islice(datasets.load_dataset(name, split=split or HUB_SPLIT, streaming=True), limit))
    except Exception as error:
        # Missing, private, unreachable and split-less datasets raise unrelated types; the user needs one fact.
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".") or type(error).__name__
        raise OSError(f"the hub dataset {name} (split {split or HUB_SPLIT}) cannot be read: {reason}") from error
    return [_named_text(row, name, number, f"row {number} of {name}") for number, row in enumerate(rows, 1)]


def read_prompts(source: str | Path, tokenizer, prompt_tokens: int | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of `read_texts` as the tokenizer reads them, its special tokens included, cut to ``prompt_tokens``.

    A shorter text is taken whole. Raises as `read_texts`.
    """
    return [
        # Books are longer than any context; the tokenizer's warning about it would mislead.
        Prompt(name, tuple(tokenizer(text, verbose=False)["input_ids"][:prompt_tokens]))
        for name, text in read_texts(source, limit)
    ]
