"""The requests of a file: OpenAI's batch lines or plain prompts, as JSON lines or Parquet."""

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from decoder.checks import check, decoded, parse_json

URLS = {"/v1/chat/completions": True, "/v1/completions": False}
"""Whether a path is that of chats."""

PARQUET = ".parquet"
_MAGIC = b"PAR1"  # ends a file of Parquet
_OF_OPENAI = ("custom_id", "method", "url", "body")
_LONGEST = 2**31  # tokens
_OF_TEMPLATE = 128  # tokens that a chat template puts before the first message, at most
_BEGINNING = 512  # characters by which prompts that begin alike are found


class Line(NamedTuple):
    """A request of a file.

    Attributes:
        number: its place among the requests, from 0 on.
        custom_id: by which its answer is found.
        chat: whether it is a chat and not a completion.
        body: as a server is sent it.
    """

    number: int
    custom_id: str
    chat: bool
    body: dict[str, Any]


class Records(Protocol):
    """What a file holds: records in a row, each read when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]: ...

    def place(self, number: int) -> str:
        """Where a record stands, in words."""


class JsonLines:
    """A file of one JSON object per line; blank lines are left out.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path):
        self.path, self._file = path, open(path, "rb")  # noqa: SIM115 (read from until the job ends)
        self._starts, self._numbers = array("q"), array("q")
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, number: int) -> str:
        return f"line {self._numbers[number]} of {self.path}"

    def __getitem__(self, number: int) -> dict[str, Any]:
        self._file.seek(self._starts[number])
        place = self.place(number)
        record = parse_json(decoded(self._file.readline(), place), place)
        if not isinstance(record, dict):
            raise ValueError(f"{place} is no JSON object: give a request, or an object with a prompt")
        return record


class ParquetRows:
    """The rows of a Parquet file, read by `datasets`. Columns without a value in a row are left out of it.

    Raises:
        ValueError: `datasets` is not installed, or it is no such file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path):
        datasets = datasets_module()
        with open(path, "rb") as file:
            file.seek(-min(len(_MAGIC), path.stat().st_size), os.SEEK_END)
            if file.read() != _MAGIC:
                raise ValueError(f"{path} is no whole Parquet file")
        self.path, self._rows = path, datasets.Dataset.from_parquet(str(path), keep_in_memory=False)

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, number: int) -> str:
        return f"row {number + 1} of {self.path}"

    def __getitem__(self, number: int) -> dict[str, Any]:
        record = {name: value for name, value in self._rows[number].items() if value is not None}
        if isinstance(record.get("body"), str):
            record["body"] = parse_json(record["body"], f"body of {self.place(number)}")
        return record


def datasets_module() -> Any:
    """The package `datasets`. Raises ValueError where it is not installed."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError("Parquet files need datasets: pip install 'tokenswift-decoder[parquet]'") from None
    return datasets


class Requests:
    """The checked requests of a file.

    Args:
        path: of JSON lines, or of Parquet if it ends so.
        defaults: fields for the bodies that lack them.

    Raises:
        ValueError: a line is no request, or has the `custom_id` of another one; its place is named.
        OSError: the file cannot be read.

    Attributes:
        order: all numbers, in the order in which they are best answered: prompts that begin alike one after the other,
            and those with long answers first, then long prompts, so that the last texts do not run alone.
        shared_tokens: how many tokens of a prompt may begin another one, too: those of a chat template, or any number,
            which is None.
    """

    def __init__(self, path: Path, defaults: Mapping[str, Any]):
        self.path, self.defaults = path, dict(defaults)
        self._records: Records = ParquetRows(path) if path.suffix == PARQUET else JsonLines(path)
        seen: dict[str, int] = {}
        beginnings, answers, lengths, chats = array("q"), array("q"), array("q"), array("b")
        for line in self:
            if line.custom_id in seen:
                first = self._records.place(seen[line.custom_id])
                raise ValueError(f"{self._records.place(line.number)} has the custom_id of {first}: {line.custom_id}")
            seen[line.custom_id] = line.number
            chats.append(line.chat)
            text = json.dumps(line.body.get("messages" if line.chat else "prompt"))
            beginnings.append(int.from_bytes(hashlib.sha256(text[:_BEGINNING].encode()).digest()[:7], "big"))
            answers.append(_most_tokens(line.body))
            lengths.append(len(text))
        shared = Counter(beginnings)
        self.shared_tokens = (_OF_TEMPLATE if sum(chats) > 1 else 0) if len(shared) == len(self) else None
        alone = {one for one, count in shared.items() if count == 1}

        def rank(number: int) -> tuple[int, int, int]:
            beginning = -chats[number] if beginnings[number] in alone else beginnings[number]
            return beginning, -answers[number], -lengths[number]

        self.order = sorted(range(len(self)), key=rank)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Line:
        record, place = self._records[number], self._records.place(number)
        check(record, place)
        return self._line(number, record, place)

    def __iter__(self) -> Iterator[Line]:
        return (self[number] for number in range(len(self)))

    def digest(self) -> str:
        """A hash of what is asked."""
        found = hashlib.sha256(json.dumps(self.defaults, sort_keys=True).encode())
        with open(self.path, "rb") as file:
            while part := file.read(2**20):
                found.update(part)
        return found.hexdigest()

    def _line(self, number: int, record: dict[str, Any], place: str) -> Line:
        if "body" in record or "url" in record:
            custom_id, chat, body = _of_openai(record, place)
        else:
            body = dict(record)
            named = [body.pop(name) for name in ("custom_id", "id") if name in body]
            custom_id, chat = named[0] if named else str(number + 1), "messages" in body
            if ("prompt" in body) == chat:
                raise ValueError(f"{place} asks for nothing: give it a prompt, or messages, and not both")
        if type(custom_id) is int:
            custom_id = str(custom_id)
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError(f"{place}: custom_id must be a text that is not empty")
        if body.get("stream"):
            raise ValueError(f"{place}: stream has no place in a file of requests: leave it out")
        return Line(number, custom_id, chat, {**self.defaults, **body})


def _most_tokens(body: Mapping[str, Any]) -> int:
    """How long an answer may become, as far as it is told."""
    most = body.get("max_tokens", body.get("max_completion_tokens"))
    return min(most, _LONGEST) if type(most) is int and most >= 0 else _LONGEST


def _of_openai(record: dict[str, Any], place: str) -> tuple[Any, bool, dict[str, Any]]:
    """custom_id, whether it is a chat, and the body of a line as OpenAI's batches have it."""
    unknown = next((name for name in record if name not in _OF_OPENAI), None)
    if unknown is not None:
        raise ValueError(f"{place}: {unknown} is no field of a request, which has {', '.join(_OF_OPENAI)}")
    if record.get("method", "POST") != "POST":
        raise ValueError(f"{place}: method must be POST")
    url, body = record.get("url"), record.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise ValueError(f"{place}: url must be {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"{place}: body must be an object with the fields of {url}")
    if "custom_id" not in record:
        raise ValueError(f"{place} has no custom_id, by which its answer is found")
    return record["custom_id"], URLS[url], body
