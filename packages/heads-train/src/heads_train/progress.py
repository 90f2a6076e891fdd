"""How far a phase is in which the model reads text before the first step."""

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

Item = TypeVar("Item")


def progress(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """``items`` behind a bar; where nobody watches one, one line. Of several processes the first alone tells."""
    first = rank_zero_only.rank == 0
    if first and not sys.stderr.isatty():
        print(f"{doing}: the model reads {len(items)} chunks", file=sys.stderr, flush=True)
    yield from tqdm(items, doing, unit=" chunks", disable=None if first else True, leave=False)
