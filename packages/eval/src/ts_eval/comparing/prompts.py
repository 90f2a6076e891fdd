"""The texts that generation starts from."""

import gzip
import io
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from decoder.parts import chat_ids, check, decoded, is_chat, parse_json

SHIPPED = "pg19/test.jsonl.gz"
HUB_SPLIT = "test"
_NAMES = ("short_book_title", "title", "name")


Messages = Sequence[Mapping[str, str]]
"""A chat: ``{"role": ..., "content": ...}`` each, the oldest first."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's name, for the report, and its token ids; the answer to a chat ends where the model ends it."""

    name: str
    token_ids: tuple[int, ...]
    chat: bool = False


def is_hub_dataset(source: str | Path) -> bool:
    """Whether ``source`` is no file or folder here but could be a hub dataset: owner/name or owner/name:split."""
    return not Path(source).exists() and bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", str(source)))


def refuse_missing_prompts(source: str | Path) -> None:
    """Refuse at once, and offline, what is neither a file nor could be a hub dataset."""
    if Path(source).is_dir():
        raise IsADirectoryError(f"the prompts {source} are a folder: name a text or .jsonl file in it")
    if not Path(source).is_file() and not is_hub_dataset(source):
        raise FileNotFoundError(f"the prompt file {source} does not exist, and is no hub dataset (owner/name) either")


def read_texts(source: str | Path, limit: int | None = None) -> list[tuple[str, str | Messages]]:
    """(name, text or chat) of the first ``limit`` prompts of a file or hub dataset; all for None or if there are fewer.

    ``.jsonl`` and ``.jsonl.gz``: one JSON object per line with a ``text`` or a chat's ``messages``, named by its
    ``short_book_title`` (PG-19), ``title`` or ``name``, else by its line. Any other file is one UTF-8 text, named as
    the file. A hub dataset, ``owner/name`` or ``owner/name:split`` (by default its test split), has rows with such
    fields.

    Raises:
        OSError: the file or dataset cannot be read.
        ValueError: a record has neither text nor messages, or both; the text is empty, or the file is not UTF-8.
    """
    refuse_missing_prompts(source)
    texts = _hub_texts(str(source), limit) if is_hub_dataset(source) else _file_texts(Path(source), limit)
    if not texts:
        raise ValueError(f"{source} holds no prompt")
    for name, text in texts:
        if isinstance(text, str) and not text.strip():
            raise ValueError(f"the prompt {name} of {source} is empty")
    return texts


def _file_texts(path: Path, limit: int | None) -> list[tuple[str, str | Messages]]:
    texts: list[tuple[str, str | Messages]] = []
    try:
        if not path.name.endswith((".jsonl", ".jsonl.gz")):
            texts.append((path.name, read_text(path)))
            return texts[:limit]
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if len(texts) == limit:
                    break
                if text := decoded(line, f"line {number} of {path}").strip():
                    texts.append(_record(path, number, text))
        return texts
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error


def read_text(path: Path) -> str:
    """The UTF-8 text of a file, its lines' ends as Python has them. Raises ValueError: it is none."""
    return io.StringIO(decoded(path.read_bytes(), str(path)), newline=None).read()


def _record(path: Path, number: int, line: str) -> tuple[str, str | Messages]:
    where = f"line {number} of {path}"
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object")
    return _named_text(record, path.name, number, where)


def _named_text(record: dict, source: str, number: int, where: str) -> tuple[str, str | Messages]:
    used = {field: record.get(field) for field in (*_NAMES, "text", "messages")}
    check(used, where)
    name = str(next(filter(None, map(used.get, _NAMES)), f"{source}:{number}"))
    text, messages = used["text"], used["messages"]
    if messages is None:
        if not isinstance(text, str):
            raise ValueError(f"{where} has no field 'text' that is a string, and no 'messages'")
        return name, text
    if text is not None:
        raise ValueError(f"{where} has both 'text' and 'messages': keep one of them")
    if not is_chat(messages):
        raise ValueError(f"the 'messages' of {where} are no list of objects with a role and a content")
    return name, messages


def _hub_texts(source: str, limit: int | None) -> list[tuple[str, str | Messages]]:
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


def read_prompts(
    source: str | Path,
    tokenizer,
    prompt_tokens: int | None,
    limit: int | None = None,
    sanitize_control_tokens: bool = False,
) -> list[Prompt]:
    """The prompts of `read_texts` as the tokenizer reads them, its special tokens included.

    Texts are cut to ``prompt_tokens``; a shorter one, and any chat, is taken whole. Control tokens in a chat's messages
    are text if that is asked for. Raises as `read_texts`, and ValueError where the tokenizer has no chat template for a
    chat, or cannot make control tokens text.
    """
    texts = read_texts(source, limit)
    return [_prompt(name, text, tokenizer, prompt_tokens, sanitize_control_tokens) for name, text in texts]


def _prompt(name: str, text: str | Messages, tokenizer, prompt_tokens: int | None, sanitize: bool) -> Prompt:
    if isinstance(text, str):
        # Books are longer than any context; the tokenizer's warning about it would mislead.
        return Prompt(name, tuple(tokenizer(text, verbose=False)["input_ids"][:prompt_tokens]))
    try:
        return Prompt(name, tuple(chat_ids(text, tokenizer, sanitize)), chat=True)
    except ValueError as error:
        raise ValueError(f"the prompt {name}: {error}") from error
