"""What a comparison leaves on disk: generations.jsonl while it runs, results.json when it is done."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import decoder

SCHEMA_VERSION = 1


class OtherSettingsError(ValueError):
    """The folder holds generations of other settings, another version or another machine."""


def environment(device: torch.device) -> dict:
    """Where the numbers come from: versions, commit, device, threads, Python, platform and processor.

    ``decoder_source`` is a digest of the decoder's source files, so that an edited decoder is another version.
    """
    versions = {}
    for name in ("tokenswift-decoder", "tokenswift-eval", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    source = Path(decoder.__file__).parent
    return {
        "versions": versions,
        "decoder_source": digest_files(source, "**/*.py", contents=True),
        "commit": _commit(source),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
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
    """Write ``content`` so that ``path`` is either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as out:
        json.dump(content, out, ensure_ascii=False, indent=1, allow_nan=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


class GenerationLog:
    """DIR/generations.jsonl: a header with settings and environment, then one line per finished generation.

    A line is on disk before the next generation begins; a line cut short by a kill is dropped on the next start.
    Reading creates nothing; the first `append` does.

    Args:
        folder: the comparison's DIR.
        settings: what decides the tokens and the methods measured.
        environment: where it runs; all but the commit must stay the same, for the clocks to be comparable (the
            digest of the decoder's source tells versions apart).
        overwrite: drop what other settings left instead of refusing.

    Raises:
        OtherSettingsError: the folder holds generations of other settings; the message names them.
    """

    def __init__(self, folder: Path, settings: dict, environment: dict, *, overwrite: bool = False):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"--output {folder} is a file: name a folder")
        self.path = folder / "generations.jsonl"
        self._header = {"schema_version": SCHEMA_VERSION, "settings": settings, "environment": environment}
        self._fingerprint = _fingerprint(self._header)
        self._records: dict[tuple[str, int, int], dict] = {}
        self._keep = 0
        lines = self._whole_lines()
        header = next(lines, None)
        if header is None:
            return
        other = [line for line in lines if line[0].get("fingerprint") != self._fingerprint]
        if not other and header[0].get("fingerprint") == self._fingerprint:
            self._keep = header[1]
            for record, end in self._whole_lines(skip=1):
                del record["fingerprint"]
                self._records[_key(record)] = record
                self._keep = end
        elif not overwrite:
            raise OtherSettingsError(
                f"{folder} holds generations of other settings ({_difference(header[0], self._header)}): "
                "use another --output, or --overwrite to drop them"
            )

    def _whole_lines(self, skip: int = 0) -> Iterator[tuple[dict, int]]:
        """(record, offset of its end) of each complete line."""
        if not self.path.is_file():
            return
        end = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines):
                end += len(line)
                try:
                    record = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    record = None
                if not isinstance(record, dict):
                    return
                if number >= skip:
                    yield record, end

    def __len__(self) -> int:
        return len(self._records)

    def get(self, method: str, prompt: int, run: int) -> dict | None:
        """The finished generation of a method's row on a prompt (by index) in a run, None while there is none."""
        return self._records.get((method, prompt, run))

    def append(self, record: dict) -> None:
        """Add a finished generation and wait until it is on disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with open(self.path, "r+b") as log:
            log.truncate(self._keep)
            log.seek(self._keep)
            if self._keep == 0:
                log.write(_line({**self._header, "fingerprint": self._fingerprint}))
            log.write(_line({**record, "fingerprint": self._fingerprint}))
            log.flush()
            os.fsync(log.fileno())
            self._keep = log.tell()
        self._records[_key(record)] = record


def _line(content: dict) -> bytes:
    return (json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _key(record: dict) -> tuple[str, int, int]:
    return record["method"], record["prompt_index"], record["run"]


def _fingerprint(header: dict) -> str:
    environment = {name: value for name, value in header["environment"].items() if name != "commit"}
    text = json.dumps({**header, "environment": environment}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _difference(old: dict, new: dict) -> str:
    """Names of up to three settings that differ, for a sentence."""
    old, new = dict(_flat(old)), dict(_flat(new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    names = [name for name in names if name not in ("fingerprint", "commit")]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "a line of another run"


def _flat(content: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, value) of nested settings, without the name of the two sections."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, "" if name in ("settings", "environment") else f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
