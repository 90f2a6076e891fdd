"""An experiment in processes that share a model: all run it, and only the first one's output folder stays."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from decoder.parts import device_named, join
from ts_eval.comparing.rounds import IN_PROGRESS

if TYPE_CHECKING:
    from ts_eval.compare import Experiment

_KEPT = ("generations*.jsonl", f"{IN_PROGRESS}/*.jsonl")


@contextmanager
def in_step(experiment: "Experiment") -> Iterator[tuple["Experiment", int]]:
    """The experiment of this process and its number; it is the given one in the first process.

    What is left to generate follows from the output folder, which all must find alike. So the others get a temporary
    folder with what the first one's holds. They write there as the first one does, and it goes with the block. What
    they would print is not printed.

    Raises:
        ValueError: this process was started alone, or the model cannot be shared.
        OSError: the others cannot be reached.
    """
    if experiment.processes > 1:
        raise ValueError("--processes shares prompts and --tensor-parallel the model: give one of them")
    ranks = join(device_named(experiment.device))
    ranks.refuse_unequal({"comparison": replace(experiment, output="", arguments=None, rank=None)})
    files = ranks.first(lambda: _files(Path(experiment.output)))
    if not ranks.rank:
        yield experiment, 0
        return
    with TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        yield replace(experiment, output=folder), ranks.rank


def _files(folder: Path) -> dict[str, bytes]:
    """What a folder holds of generations, finished and cut, by name."""
    paths = [path for pattern in _KEPT for path in folder.glob(pattern)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
