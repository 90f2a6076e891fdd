"""How a long prompt gets into an index of the text."""

from collections.abc import Sequence
from typing import Protocol

from decoder.work import Progress, Work

_AT_ONCE = 4096
_TOKENS = 16  # that take a small model about as long to run as so many to enter


class Index(Protocol):
    def extend(self, tokens: Sequence[int]) -> None: ...


def taking_in(index: Index, prompt: Sequence[int]) -> Work[None]:
    """Extend an empty index by a prompt, in parts."""
    for start in range(0, len(prompt), _AT_ONCE):
        index.extend(prompt[start : start + _AT_ONCE])
        yield Progress(_TOKENS, _TOKENS * -(-max(0, len(prompt) - start - _AT_ONCE) // _AT_ONCE))
