"""What commands say beside the text, and a status line in the terminal's last row, below the text that scrolls."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from decoder.stats import Statistics

BROKE_OFF, WRONG_INPUT, INTERRUPTED = 1, 2, 130
_SECONDS_BETWEEN = 0.2


class BrokeOff(Exception):
    """What its cause has broken off is kept: the message says how much, and what to do."""


def program() -> str:
    """How the command was called."""
    return "decoder" if Path(sys.argv[0]).stem == "decoder" else "python -m decoder"


def say(sentence: str) -> None:
    print(f"{program()}: {sentence}", file=sys.stderr)


def rates(stats: "Statistics") -> str:
    """Speed, tokens per step and acceptance, as far as they are known, to stand behind a number of tokens."""
    speed = f", {stats.generated / stats.decode_seconds:.1f} tokens/s" if stats.decode_seconds else ""
    per_step = "" if stats.tokens_per_step is None else f", {stats.tokens_per_step:.2f} tokens per step"
    rate = "" if stats.acceptance_rate is None else f", acceptance {stats.acceptance_rate:.2f}"
    return speed + per_step + rate


class StatusLine:
    """Reserves the terminal's last row while it is used as a context manager; without a terminal it shows nothing.

    The rows above become the scrolling region, so that text streamed to the same terminal is not disturbed.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._rows = 0
        self._due = 0.0

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._rows = 0

    def show(self, words: str, now: bool = False) -> None:
        """Replace the line, at most a few times a second unless ``now``."""
        if not self.live or (time.monotonic() < self._due and not now):
            return
        self._due = time.monotonic() + _SECONDS_BETWEEN
        size = os.get_terminal_size(self.stream.fileno())
        # A terminal whose size is unknown reports 0.
        rows, columns = size.lines or 24, size.columns or 80
        if rows != self._rows:
            # The line feed makes room if the cursor is in the last row. Setting the region moves it, so it is saved.
            self._write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A")
            self._rows = rows
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K{words[: columns - 1]}\x1b8")

    def _write(self, sequence: str) -> None:
        self.stream.write(sequence)
        self.stream.flush()
