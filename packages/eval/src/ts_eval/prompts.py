"""The texts that generation starts from."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

SHIPPED = "pg19/test.jsonl.gz"


@dataclass(frozen=True)
class Prompt:
    """A prompt's name, for the report, and its token ids."""

    name: str
    token_ids: tuple[int, ...]


def read_texts(path: str | Path, limit: int | None = None) -> list[tuple[str, str]]:
    """(name, text) of the first ``limit`` prompts of a file; all of them for None or more than there are.

    ``.jsonl`` and ``.jsonl.gz``: one JSON object per line with a ``text``, named by its ``short_book_title`` (PG-19),
    ``title`` or ``name``, else by its line. Any other file is one UTF-8 text, named as the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no JSON object with a text, the text is empty, or the file is not UTF-8.
    """
    path = Path(path)
    try:
        if not path.name.endswith((".jsonl", ".jsonl.gz")):
            texts = [(path.name, path.read_text(encoding="utf-8"))][:limit]
        else:
            texts = []
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if len(texts) == limit:
                        break
                    if line.strip():
                        texts.append(_record(path, number, line))
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not texts:
        raise ValueError(f"{path} holds no prompt")
    for name, text in texts:
        if not text.strip():
            raise ValueError(f"the prompt {name} of {path} is empty")
    return texts


def _record(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f"line {number} of {path} has no field 'text' that is a string")
    name = record.get("short_book_title") or record.get("title") or record.get("name") or f"{path.name}:{number}"
    return str(name), record["text"]


def read_prompts(path: str | Path, tokenizer, prompt_tokens: int | None, limit: int | None = None) -> list[Prompt]:
    """The file's prompts as the tokenizer reads them, its special tokens included, cut to ``prompt_tokens`` tokens.

    A shorter text is taken whole. Raises as `read_texts`.
    """
    return [
        # Books are longer than any context; the tokenizer's warning about it would mislead.
        Prompt(name, tuple(tokenizer(text, verbose=False)["input_ids"][:prompt_tokens]))
        for name, text in read_texts(path, limit)
    ]
