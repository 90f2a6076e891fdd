"""A generation on disk: its text, and in a second file the token ids with which an interrupted run can go on."""

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decoder.cli.journal import Journal, damaged, whole_lines, write_whole
from decoder.parallel.sharding import whole

FORMAT_VERSION = 1
_SAMPLES = 64  # numbers of each weight that a fingerprint reads
_ADDED_LATER = ("bitwise", "threads")  # keys that records of earlier versions lack
# What they stand for where a record of an earlier version lacks them; None for all others.
_UNSAID = {
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "bad_words": [], "continued_tokens": 0},
    "include_stop_str_in_output": False,
}


class Transcript:
    """Writes FILE, the text, and FILE.tokens, from which it can be made again: the request, then a line for each step.

    The tokens of a step are written before their text, each line at once and without a buffer. So whenever the process
    ends, both files hold whole steps, except perhaps for an incomplete last line, which counts as not written.
    FILE.tokens is locked from when it is opened until `close`, so that no second run can write to it.

    Attributes:
        request: the recorded request; None if nothing has been recorded yet.
        token_ids: the tokens so far.
        finish_reason: why the text has ended; None if it has not.

    Args:
        path: FILE.
        resume: whether to continue existing files; if not, there must be none.

    Raises:
        FileExistsError: one of the files exists and ``resume`` is False.
        OSError: the files cannot be read or written, or another run is writing to them.
        ValueError: FILE cannot be resumed.
    """

    def __init__(self, path: Path, resume: bool):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file in it for the text")
        self.path, self.tokens_path = path, path.with_name(path.name + ".tokens")
        self.request: dict[str, Any] | None = None
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._text_file: io.FileIO | None = None
        self._journal = Journal(self.tokens_path, sync_seconds=1.0)
        self._busy = f"another run is writing {path}: wait for it, or choose another --output"
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in")
        for file in (path, self.tokens_path):
            if file.exists() and not file.is_file():
                raise OSError(f"{file} is no regular file: choose another --output")
        there = [p for p in (path, self.tokens_path) if p.exists()]
        if there and not resume:
            raise FileExistsError(f"{there[0]} exists: go on with it by --resume, or choose another --output")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"the folder {path.parent} cannot be written")
        if self.tokens_path.exists():
            self._journal.open(self._busy)
            try:
                self._read()
            except BaseException:
                self.close()
                raise
        if self.request is None and path.exists() and path.stat().st_size:
            self.close()
            raise ValueError(f"{path} cannot be resumed, it has no record {self.tokens_path.name}: choose another file")

    def _read(self) -> None:
        lines = whole_lines(self.tokens_path)
        header, end = next(lines, ({}, 0))
        if not end and b"\n" not in self.tokens_path.read_bytes():
            return
        if header.get("format_version") != FORMAT_VERSION or not isinstance(header.get("request"), dict):
            raise ValueError(f"{self.tokens_path} is not a record of format version {FORMAT_VERSION}")
        self.request, self._journal.end = header["request"], end
        for number, (step, end) in enumerate(lines, 2):
            tokens = step.get("tokens")
            whole_step = isinstance(tokens, list) and all(type(token) is int for token in tokens)
            if not whole_step or step.get("at") != len(self.token_ids):
                raise damaged(self.tokens_path, number)
            self.token_ids += tokens
            self.finish_reason = step.get("finish_reason")
            self._journal.end = end

    def check(self, request: Mapping[str, Any]) -> None:
        """Compare the keys of ``request`` with the recorded request, if there is one.

        Raises:
            ValueError: they differ; the message says in what.
        """
        if self.request is None:
            return
        for name, value in request.items():
            if name in _ADDED_LATER and name not in self.request:
                continue
            recorded = self.request.get(name, _UNSAID.get(name))
            if recorded != value:
                readable = not isinstance(value, dict) and not isinstance(recorded, dict)
                difference = f"{recorded!r}, not {value!r}" if readable else f"another {name}"
                raise ValueError(
                    f"{self.path} was begun with {name + ' ' if readable else ''}{difference}: "
                    f"ask for the same again, or choose another --output"
                )

    def open(self, request: Mapping[str, Any], text: str) -> None:
        """Begin to write; ``text`` is the text of the tokens so far.

        Raises:
            FileExistsError: another run has created FILE.tokens in the meantime.
            ValueError: FILE does not hold the text of its tokens.
        """
        if not self._journal.is_open:
            try:
                self._journal.open(self._busy, new=True)
            except FileExistsError:
                words = "another run has begun it meanwhile: choose another --output"
                raise FileExistsError(f"{self.path}: {words}") from None
        if self.request is None:
            self._journal.append({"format_version": FORMAT_VERSION, "request": request})
        encoded = text.encode()
        written = self.path.read_bytes() if self.path.exists() else b""
        if not (encoded.startswith(written) or written.startswith(encoded)):
            raise ValueError(
                f"{self.path} was changed since: move it away, "
                f"and --resume writes it again from {self.tokens_path.name}"
            )
        self._text_file = self.path.open("r+b" if written else "wb", buffering=0)
        common = min(len(written), len(encoded))
        self._text_file.truncate(common)
        self._text_file.seek(common)
        write_whole(self._text_file, encoded[common:])

    def append(self, tokens: Sequence[int], text: str, finish_reason: str | None) -> None:
        """Write one step."""
        step = {"at": len(self.token_ids), "tokens": list(tokens)}
        if finish_reason:
            step["finish_reason"] = finish_reason
        self._journal.append(step)
        self.token_ids += tokens
        self.finish_reason = finish_reason
        write_whole(self._text_file, text.encode())

    def close(self) -> None:
        """Close both files, all of them on the disk."""
        text_file, self._text_file = self._text_file, None
        try:
            self._journal.close()
        finally:
            if text_file is not None:
                with text_file:
                    os.fsync(text_file.fileno())


def fingerprint(model: PreTrainedModel) -> str:
    """A hash that distinguishes models without reading all weights: of some numbers of each, shapes and end tokens.

    All processes that share a model must ask at the same time.
    """
    digest = hashlib.sha256()
    config = model.config.get_text_config()
    eos = getattr(model.generation_config, "eos_token_id", None)
    digest.update(json.dumps([getattr(config, "rope_parameters", None), eos], sort_keys=True).encode())
    for name, weight in model.named_parameters():
        flat = whole(weight.detach()).flatten()
        some = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


def digest_of(token_ids: Sequence[int]) -> str:
    """A hash of a prompt's tokens."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()
