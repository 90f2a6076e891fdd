"""What a comparison leaves on disk: generations.jsonl while it runs, results.json when it is done."""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

import decoder
from decoder.parts import Journal, named, native, whole_lines

SCHEMA_VERSION = 1
LOG_VERSION = 2
UNBOUND = ("commit", "arguments")
"""What of the environment may differ between the parts of one comparison."""


class OtherSettingsError(ValueError):
    """The folder holds generations of other settings, another version or another machine."""


def environment(device: torch.device, arguments: Sequence[str] | None = None) -> dict:
    """Where the numbers come from: versions, commit, device, threads, Python, platform, processor and command.

    ``decoder_source`` is a digest of the decoder's source files, so that an edited decoder is another version.
    """
    versions = {}
    for name in ("tokenswift-decoder", "tokenswift-eval", "torch", "transformers", "sacrebleu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    # With its build, which the package need not tell.
    versions["torch"] = torch.__version__
    source = Path(decoder.__file__).parent
    return {
        "versions": versions,
        "decoder_source": "".join(digest_files(source, f"**/*.{kind}", contents=True) for kind in ("py", "c", "h")),
        "native_library": native.library_name(),
        "commit": _commit(source),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "arguments": None if arguments is None else list(arguments),
    }


def _commit(source: Path) -> str | None:
    """Commit of the checkout that tracks ``source``, "-dirty" when edited since; None outside one or without git."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        # A virtual environment inside some other checkout is not part of that checkout.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def digest_files(folder: Path, pattern: str = "*", *, contents: bool = False) -> str:
    """Short digest of a folder's files: their names with their bytes, or with sizes and times (for large weights)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
        stat = path.stat()
        mark = path.read_bytes() if contents else f"{stat.st_size} {stat.st_mtime_ns}".encode()
        digest.update(f"{path.relative_to(folder)} ".encode() + hashlib.sha256(mark).digest())
    return digest.hexdigest()[:16]


def write_json(path: Path, content: dict) -> None:
    """`write_text` of ``content`` as JSON."""
    text = json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)
    # Numbers of a list stand on one line: thousands of tokens would be thousands of lines.
    write_text(path, re.sub(r"\[\n[\s\d.,eE+\-nul]*\]", lambda numbers: "".join(numbers[0].split()), text) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write so that ``path`` is either the old file or the whole new one. Raises OSError, naming the file."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8", newline="") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise named(error, path) from error


def read_results(path: Path, command: str, version: int, header: dict, free: Collection[str] = ()) -> dict | None:
    """What ``command`` wrote to ``path`` with the settings and environment of ``header``; None when nothing is there.

    Settings named in ``free`` may differ.

    Raises:
        ValueError: it is no such file.
        OtherSettingsError: it was written with other settings, another version or on another machine.
    """
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        old = {name: results[name] for name in header}
        bound = {name: value for name, value in header["settings"].items() if name not in free}
        old["settings"] = {name: value for name, value in old["settings"].items() if name not in free}
        header = {**header, "settings": bound}
        same = fingerprint_of(old) == fingerprint_of(header) and results["schema_version"] == version
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no result of {command}: use another --output, or --overwrite") from error
    if not same:
        raise OtherSettingsError(
            f"{path.parent} holds figures of other settings ({difference(old, header)}): use another --output, or "
            "--overwrite to drop them"
        )
    return results


class GenerationLog:
    """DIR/generations.jsonl: a header with settings and environment, then one line per finished generation.

    A line is on disk before the next generation begins; a last line cut short is dropped on the next start. Each
    of several processes writes a file of its own, generations-RANK.jsonl, and reads all of them. Reading creates
    nothing; `begin` does. To be used in a `with` block, which holds the file against other writers.

    Args:
        folder: the comparison's DIR.
        settings: what decides the tokens and the methods measured.
        environment: where it runs; all but the commit and the command must stay the same, for the clocks to be
            comparable (the digest of the decoder's source tells versions apart).
        overwrite: drop what other settings left instead of refusing.
        rank: this process among those that share the prompts.
        rows: method -> digest of what decides its row beside ``settings``, where these leave that out: the folder then
            keeps the rows of others, too, and only those that fit are read.

    Raises:
        OtherSettingsError: the folder holds generations of other settings; the message names them.
        ValueError: a line in the middle of a file is damaged.
        OSError: another process is writing there.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict,
        environment: dict,
        *,
        overwrite: bool = False,
        rank: int = 0,
        rows: Mapping[str, str] | None = None,
    ):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"--output {folder} is a file: name a folder")
        self._rows = rows or {}
        self.folder, self.path = folder, folder / (f"generations-{rank}.jsonl" if rank else "generations.jsonl")
        self._header = {"log_version": LOG_VERSION, "settings": settings, "environment": environment}
        self.fingerprint = fingerprint_of(self._header)
        self._records: dict[tuple[str, int, int], dict] = {}
        self._journal = Journal(self.path)
        self._busy = f"another ts-eval writes to {folder}: wait for it, or use another --output"
        if self.path.is_file():
            self._journal.open(self._busy)
        try:
            self._read(overwrite, rank)
        except BaseException:
            self.close()
            raise

    def _read(self, overwrite: bool, rank: int) -> None:
        for path in self._paths():
            lines = whole_lines(path)
            header = next(lines, None)
            if header is None:
                continue
            fits = header[0].get("fingerprint") == self.fingerprint and all(
                record.get("fingerprint") == self.fingerprint for record, _ in lines
            )
            if not fits and not overwrite:
                raise OtherSettingsError(
                    f"{self.folder} holds generations of other settings ({difference(header[0], self._header)}): "
                    "use another --output, or --overwrite to drop them"
                )
            if not fits and rank == 0 and path != self.path:
                path.unlink()
        self.refresh()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("generations*.jsonl"))

    def __enter__(self) -> "GenerationLog":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        self._journal.close()

    def refresh(self) -> None:
        """Read what all processes have finished."""
        for path in self._paths():
            for number, (record, end) in enumerate(whole_lines(path)):
                if record.pop("fingerprint", None) != self.fingerprint:
                    break
                if number and record.pop("row", None) == self._rows.get(record["method"]):
                    self._records[_key(record)] = record
                if path == self.path:
                    self._journal.end = end

    def __len__(self) -> int:
        return len(self._records)

    def row_of(self, method: str) -> dict[str, str]:
        """What a record of a method's row carries to be told from those of other settings."""
        return {"row": self._rows[method]} if self._rows else {}

    def get(self, method: str, prompt: int, run: int) -> dict | None:
        """The finished generation of a method's row on a prompt (by index) in a run, None while there is none."""
        return self._records.get((method, prompt, run))

    def records(self) -> list[dict]:
        """All finished generations."""
        return list(self._records.values())

    def begin(self) -> None:
        """Write the header, if it is not there: from now on the folder belongs to these settings.

        Raises OSError when another process holds the file, or nothing can be written there.
        """
        try:
            self._journal.open(self._busy)
            if self._journal.end == 0:
                self._write(self._header)
        except OSError as error:
            if error.strerror is None:
                raise
            reason = f"nothing can be written to {error.filename or self.folder} ({error.strerror})"
            raise OSError(f"{reason}: make room for it, or use another --output") from error

    def append(self, record: dict) -> None:
        """Add a finished generation and wait until it is on disk. Raises OSError, naming the file, when it cannot."""
        self.begin()
        self._write(record | self.row_of(record["method"]))
        self._records[_key(record)] = record

    def _write(self, record: dict) -> None:
        self._journal.append({**record, "fingerprint": self.fingerprint})


def _key(record: dict) -> tuple[str, int, int]:
    return record["method"], record["prompt_index"], record["run"]


def fingerprint_of(header: dict) -> str:
    """Digest of ``settings`` and ``environment``, without what of these may differ between parts of one whole."""
    environment = {name: value for name, value in header["environment"].items() if name not in UNBOUND}
    return digest_of({**header, "environment": environment})


def digest_of(content: dict) -> str:
    """Short digest of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def difference(old: dict, new: dict) -> str:
    """Names of up to three settings that differ, for a sentence."""
    old, new = dict(_flat(old)), dict(_flat(new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    names = [name for name in names if name not in ("fingerprint", *UNBOUND)]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "a line of another run"


def _flat(content: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, value) of nested settings, without the name of the two sections."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, "" if name in ("settings", "environment") else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
