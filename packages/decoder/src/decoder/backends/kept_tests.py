"""That the tests at load have passed, kept on disk for a process that would only repeat them.

The tests (`backends.check`, `backends.bitwise_check`) run one program on one model and one processor, and their numbers
do not change from one process to the next. So their outcome is the same wherever all is the same that they depend on:
`circumstances` lists it. Whatever is new there, or cannot be read, has the tests run. Nothing is kept of tests that
fail.
"""

import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import torch
from torch import nn

from decoder.backends.kept import digest, keep, read_kept, state
from decoder.backends.native import library as native

_PACKAGE = Path(__file__).parent.parent
_DAYS = 30  # after which they run again, for what nobody has thought of
_BEGINNING, _SAMPLES, _SAMPLE = 1 << 23, 256, 1 << 12  # bytes of a file that are looked at: the header, and some more
_OF_MODEL = ("*.json", "*.safetensors", "*.bin", "*.py")
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags", "CPU implementer",
              "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")  # fmt: skip
_VARIABLES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TOKENSWIFT_", "TORCH_",
              "TRANSFORMERS_")  # fmt: skip


@dataclass
class KeptTests:
    """The tests of a model under some circumstances.

    Attributes:
        circumstances: what they depend on.
        file: where their outcome is kept.
        passed: on which day they have passed in another process; None if they must run.
    """

    circumstances: dict[str, Any]
    file: Path
    passed: str | None = None

    def keep(self) -> bool:
        """Note that they have passed now, where there is a place for it."""
        return keep(self.file, {"passed": time.time(), "circumstances": self.circumstances})

    def _find(self) -> None:
        """See whether they have passed."""
        found = read_kept(self.file)
        with suppress(TypeError, KeyError):
            if found["circumstances"] == self.circumstances and 0 <= time.time() - found["passed"] < _DAYS * 86400:
                self.passed = time.strftime("%d %B %Y", time.localtime(found["passed"]))


_of_models: WeakKeyDictionary[nn.Module, KeptTests] = WeakKeyDictionary()


def note(model: nn.Module, source: Path, asked: dict[str, Any], anew: bool) -> None:
    """Have the tests of a model that was read from ``source`` kept, for `take`.

    Args:
        asked: in what form it was asked for.
        anew: whether they run whatever is kept.
    """
    folder = native.cache_folder()
    if folder is None or not native.available():
        return
    with suppress(OSError):
        found = circumstances(source) | {"asked": asked}
        name = digest([json.dumps(found, sort_keys=True).encode()])[:32]
        tests = KeptTests(found, folder / "tests" / f"{name}.json")
        if not anew:
            tests._find()
        _of_models[model] = tests


def take(model: nn.Module) -> KeptTests | None:
    """The tests of a model, for the first who asks: somebody may change it afterwards."""
    return _of_models.pop(model, None)


def circumstances(source: Path) -> dict[str, Any]:
    """All that the tests of a model depend on, as JSON has it.

    Raises OSError if something of it cannot be read.
    """
    of_model = sorted(file for kind in _OF_MODEL for file in source.glob(kind)) if source.is_dir() else [source]
    # What a model's modules are made of has been imported when it is there.
    imported = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if _tells(name)}
    # Others are made up, or were made for the process and are gone, such as what torch.compile has written.
    files = sorted(file for file in map(Path, filter(None, imported)) if file.is_absolute() and file.exists())
    libraries = Path(torch.__file__).parent.glob("lib/*.so*")
    return {
        "model": {str(file): _contents(file) for file in of_model},
        "code": digest(file.read_bytes() for file in sorted(_PACKAGE.rglob("*.py"))),
        "library": native.library().contents,
        "instructions": native.library_name(),
        "packages": {name: version(name) for name in ("numpy", "torch", "transformers")},
        "python": sys.version,
        "imported": digest(map(state, files)),
        "torch": [torch.version.git_version, torch.__config__.show(), digest(map(state, sorted(libraries)))],
        "processor": _processor(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _tells(name: str) -> bool:
    return name.partition(".")[0] in ("numpy", "torch", "transformers")


def _contents(file: Path) -> list[Any]:
    """The state of a file, and a hash of its beginning and of parts from all over it."""
    status = file.stat()
    samples = ((max(_BEGINNING, status.st_size * number // _SAMPLES), _SAMPLE) for number in range(_SAMPLES))
    with open(file, "rb") as opened:
        sampled = digest(_read(opened, *part) for part in ((0, _BEGINNING), *samples))
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, sampled]


def _read(opened: BinaryIO, start: int, size: int) -> bytes:
    opened.seek(start)
    return opened.read(size)


def _processor() -> dict[str, str]:
    """What Linux tells of the first processor, less what changes while it runs."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() in _PROCESSOR}
