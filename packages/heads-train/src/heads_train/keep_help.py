"""Writes the texts that `heads_train.command` prints: run it where a flag of heads-train has changed.

They name classes in the order in which they were imported, so only a process of its own writes the same again.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from heads_train.cli import main
from heads_train.command import COMMANDS, KEPT


def made(names: Sequence[str] = ("heads-train", *COMMANDS)) -> Iterator[tuple[str, str]]:
    """(name of the file, what the parser writes) of each help text."""
    os.environ["COLUMNS"] = "80"
    for name in names:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(["--help"] if name == "heads-train" else [name, "--help"])
        yield f"{name}.txt", out.getvalue()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT
    for file, text in made():
        (folder / file).write_text(text, encoding="utf-8")
