"""The command in processes that share a model: the first of them speaks for all."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

FLAG = "--tensor-parallel"


class _Silence(io.TextIOBase):
    """Standard error of a process that the first one speaks for; ``own`` is for errors."""

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


def tell(error_sentence: str, sentence: str) -> None:
    """Print ``sentence`` to standard error, unless another process of this run has told the same error."""
    from decoder.parallel.ranks import is_first_to_tell

    if is_first_to_tell(error_sentence):
        print(sentence, file=sys.stderr.own if isinstance(sys.stderr, _Silence) else sys.stderr)
