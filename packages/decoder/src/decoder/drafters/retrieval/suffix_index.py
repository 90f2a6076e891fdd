"""Prompt lookup: where the end of a growing text stood before, and what followed it there."""

from collections.abc import Sequence


class SuffixIndex:
    """The last place each n-gram of a text was followed by something, for n up to ``longest``.

    A token costs ``longest`` dictionary entries and a lookup as many reads, however long the text is.

    Args:
        longest: tokens of the longest suffix that is looked up.
    """

    def __init__(self, longest: int):
        if longest < 1:
            raise ValueError(f"a suffix needs at least 1 token, not {longest}")
        self.longest = longest
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for gram in self._suffixes():
                self._after[gram] = len(self.text)
            self.text.append(token)

    def continuation(self, count: int) -> list[int]:
        """``count`` tokens that followed the longest suffix seen before, at its last place; [] when there is none.

        Where the place is nearer to the end than ``count``, the copy goes on with what it copied: a text in a loop
        is continued around the loop.
        """
        start = next((self._after[gram] for gram in self._suffixes() if gram in self._after), None)
        if start is None:
            return []
        copied = self.text[start : start + count]
        return [copied[i % len(copied)] for i in range(count)]

    def _suffixes(self) -> list[tuple[int, ...]]:
        """The last n tokens for every n, the longest first."""
        tail = tuple(self.text[-self.longest :])
        return [tail[i:] for i in range(len(tail))]
