"""A file of requests on its way to a file of answers: what has been answered survives whatever ends the process."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoder.cli.journal import Journal, named, whole_lines
from decoder.jobs.lines import PARQUET, Requests, datasets_module

VERSION = 1


class Job:
    """Answers are written to OUT.journal as they are made, and to OUT in the order of the requests when all are there.

    The journal's first line says what is asked and who answers. Each further line is one answer, written at once. So a
    process that is killed loses the answers that it was making, and none twice. The journal is locked while it is open.

    Args:
        requests: what is asked.
        output: OUT, JSON lines or, if it ends so, Parquet.

    Attributes:
        created: when the job was begun, in seconds since 1970; what all its answers say.

    Raises:
        FileExistsError: there are answers already.
        OSError: OUT is a folder, or its own folder is missing.
        ValueError: the journal is damaged, or another job's.
    """

    def __init__(self, requests: Requests, output: Path):
        if output.is_dir():
            raise IsADirectoryError(f"{output} is a folder: choose a file for the answers")
        self.requests, self.output = requests, output
        self.created = int(time.time())
        self._path = output.with_name(output.name + ".journal")
        self._journal = Journal(self._path, sync_seconds=1.0)
        self._at: dict[int, tuple[int, int]] = {}
        self._header: dict[str, Any] | None = None
        if output.suffix == PARQUET:
            datasets_module()
        if not output.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {output.parent} to write {output.name} in")
        if output.exists() and not self._path.exists():
            raise FileExistsError(f"{output} is there already: move it away, or choose another file")

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if self._journal.is_open and self._header is None:
            self._path.unlink()  # nobody has answered
        self._journal.close()

    def open(self) -> None:
        """Open the journal, and find what it holds already."""
        # Nothing is read before the file is locked, lest another process write on.
        self._journal.open(f"another run is answering for {self.output}: wait for it, or choose another file")
        self._read()
        if self._header is not None:
            self.created = self._header["created"]

    def begin(self, answered_by: Mapping[str, Any]) -> None:
        """Say who answers, so that `record` may be called; refuse another one than has answered before.

        Args:
            answered_by: what tells the model and its settings from others; values that JSON has.
        """
        header = {"version": VERSION, "requests": self.requests.digest(), **answered_by}
        if self._header is None:
            self._header = {"job": header, "created": self.created}
            self._journal.append(self._header)
        elif self._header["job"] != header:
            of = _difference(self._header["job"], header)
            raise ValueError(f"{self._path} belongs to {of}: move it away, or choose another file")

    def _read(self) -> None:
        start = 0
        for record, end in whole_lines(self._path):
            if not start:
                if "job" not in record or "created" not in record:
                    raise ValueError(f"{self._path} is no journal of a job: move it away, or choose another file")
                self._header = record
            elif not isinstance(record.get("number"), int):
                raise ValueError(f"{self._path} is damaged: move it away, or choose another file")
            else:
                self._at[record["number"]] = start, end
            start = self._journal.end = end

    @property
    def begun(self) -> bool:
        """Whether answers are recorded."""
        return self._header is not None and self._journal.is_open

    @property
    def answered(self) -> int:
        """How many requests have an answer."""
        return len(self._at)

    def rest(self) -> list[int]:
        """The numbers of the requests that have none, in the order in which they are best answered."""
        return [number for number in self.requests.order if number not in self._at]

    def record(self, number: int, row: Mapping[str, Any]) -> None:
        """Write the answer of a request. Raises OSError, naming the file, when it cannot be written."""
        if number in self._at:
            return  # It was answered twice, on two machines of which one was given up.
        start = self._journal.end
        self._journal.append({"number": number, "row": row})
        self._at[number] = start, self._journal.end

    def finish(self) -> int:
        """Write OUT and remove the journal; returns how many answers are errors.

        Raises:
            OSError: OUT cannot be written; the journal stays.
        """
        part, errors = self.output.with_name(self.output.name + ".part"), 0
        try:
            with open(self._path, "rb") as journal, open(part, "wb") as whole:
                for number in range(len(self.requests)):
                    start, end = self._at[number]
                    journal.seek(start)
                    row = json.loads(journal.read(end - start))["row"]
                    errors += row["error"] is not None
                    whole.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                whole.flush()
                os.fsync(whole.fileno())
            if self.output.suffix == PARQUET:
                _to_parquet(part)
            os.replace(part, self.output)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise named(error, self.output) from error
        self._journal.close()
        self._path.unlink()
        return errors


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What tells a journal's job from this one."""
    words = {"requests": "other requests or defaults", "model": "another model"}
    name = next(name for name in {**new, **old} if old.get(name) != new.get(name))
    return words.get(name, f"another {name.replace('_', ' ')}")


def _to_parquet(path: Path) -> None:
    """Put a table of the answers of a file of JSON lines in its place."""

    def rows() -> Any:
        with open(path, "rb") as lines:
            for line in lines:
                row = json.loads(line)
                body = row["response"]["body"]
                first = (body.get("choices") or [{}])[0]
                yield {
                    "custom_id": row["custom_id"],
                    "text": first.get("text", (first.get("message") or {}).get("content")),
                    "finish_reason": first.get("finish_reason"),
                    "status_code": row["response"]["status_code"],
                    "error": (row["error"] or {}).get("message"),
                    "body": json.dumps(body, ensure_ascii=False),
                }

    datasets = datasets_module()
    columns = dict.fromkeys(("custom_id", "text", "finish_reason", "error", "body"), datasets.Value("string"))
    features = datasets.Features({**columns, "status_code": datasets.Value("int64")})
    table = datasets.Dataset.from_list(list(rows()), features=features)
    table.to_parquet(str(path))
