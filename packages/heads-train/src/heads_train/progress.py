"""How far a phase is in which the model reads text before the first step."""

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

Item = TypeVar("Item")
_EVERY = 30  # seconds


def progress(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """``items`` behind a bar; where nobody watches one, lines. Of several processes the first alone tells."""
    first = rank_zero_only.rank == 0
    if first and not sys.stderr.isatty():
        yield from _in_lines(items, doing)
    else:
        yield from tqdm(items, doing, unit=" chunks", disable=None if first else True, leave=False)


def _in_lines(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """``items``, told how many they are, and every half a minute how far they are and how long the rest will take."""
    _tell(f"{doing}: the model reads {len(items)} chunks")
    began = told = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - told >= _EVERY:
            told = now
            left = timedelta(seconds=round((now - began) / done * (len(items) - done)))
            _tell(f"{doing}: {done} of {len(items)} chunks, {left} left")
        yield item


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
