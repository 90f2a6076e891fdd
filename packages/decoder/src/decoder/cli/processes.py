"""The command in processes that share a model: the first of them speaks for all."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from decoder.parallel.ranks import is_of_all

FLAG = "--tensor-parallel"


class _Silence(io.TextIOBase):
    """Standard error of a process that the first one speaks for; ``own`` is for what only this process knows."""

    def __init__(self, own: TextIO):
        self.own = own

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def first_speaks(arguments: Sequence[str]) -> Iterator[None]:
    """A block in which a process other than the first of those that share a model writes nothing."""
    if FLAG not in arguments or os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(_Silence(sys.stderr)):
        yield


def say(sentence: str, error: BaseException | None = None) -> None:
    """Print a sentence to standard error, be this process silent or not if only it knows of the ``error``."""
    stream = sys.stderr
    if isinstance(stream, _Silence) and error is not None and not is_of_all(error):
        stream = stream.own
    print(sentence, file=stream)
