"""Long work in parts, so that others can take a step between two of them: reading prompts, measuring, copying."""

import time
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Progress(NamedTuple):
    """What a part of some work was; it tells who goes first, and when to stop.

    Attributes:
        done: how many tokens it had, or as many as take about as long.
        left: the same for the parts that follow, as far as is known.
    """

    done: int
    left: int


Work = Generator[Progress, None, T]
"""Work that stops behind each part until it is asked to go on; it may end with a result, of type T."""


def finish(work: Work[T]) -> T:
    """Do all that is left of some work at once; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def timed(work: Work[None], observe: Callable[[float], None]) -> Work[None]:
    """The same work; ``observe`` is called with the seconds that each part has taken."""
    while True:
        start = time.perf_counter()
        try:
            progress = next(work)
        except StopIteration:
            return
        finally:
            observe(time.perf_counter() - start)
        yield progress
