"""An index of a growing text that finds earlier occurrences of its end, and what followed them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter

_GRAM = 3  # tokens of the longest n-grams that are indexed; longer suffixes are found by comparing tokens from there


class SuffixIndex:
    """Indexes the occurrences of each n-gram of a text, linked from the newest to the oldest, for n of 1 to 3.

    An occurrence is given by the position behind it. The longest suffix of the text that occurred before is found by
    comparing the tokens before the newest occurrences of the text's last three tokens. Adding a token costs three
    dictionary entries. A lookup compares at most ``longest`` tokens for each of ``occurrences`` occurrences, however
    long the text is.

    Args:
        longest: up to how many tokens of a suffix are compared.
        occurrences: how many occurrences of a suffix are looked at, the newest ones.
    """

    def __init__(self, longest: int, occurrences: int = 8):
        if longest < 1:
            raise ValueError(f"a suffix needs at least 1 token, not {longest}")
        self.longest, self.occurrences = longest, occurrences
        self.text: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # the newest occurrence of each n-gram
        # For each n and each position, the next older occurrence of the n-gram that ends before that position.
        self._before: list[list[int]] = [[] for _ in range(min(_GRAM, longest))]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            end = len(self.text)
            for n, before in enumerate(self._before, start=1):
                gram = tuple(self.text[end - n : end]) if n <= end else ()
                before.append(self._last.get(gram, -1))
                if gram:
                    self._last[gram] = end
            self.text.append(token)

    def match(self) -> tuple[int, list[int]]:
        """The length of the longest suffix that occurred before, at most ``longest``, and its newest occurrences.

        Occurrences are positions, those behind the suffix, the newest first. If there is none, the length is 0.
        """
        end = len(self.text)
        for n in range(min(len(self._before), end), 0, -1):
            found = list(islice(self._occurrences(n), self.occurrences))
            if found:
                break
        else:
            return 0, []
        if n < _GRAM:
            return n, found
        lengths = [self._common(position, n) for position in found]
        longest = max(lengths)
        return longest, [position for position, length in zip(found, lengths, strict=True) if length == longest]

    def continuations(self, positions: list[int], longest: int) -> Iterator[list[tuple[int, float]]]:
        """Level by level, the tokens that followed the occurrences at ``positions``, as (token, share).

        The most frequent token comes first, of equals the one seen last, and the next level is about what followed that
        token. A share is the token's count divided by the sum of all counts and the number of distinct tokens (escape
        method C of prediction by partial matching). Where the continuation of an occurrence reaches the end of the text
        it goes on with the tokens found so far, so that a text in a loop is continued around the loop.
        """
        chain: list[int] = []
        end = len(self.text)
        for depth in range(longest if positions else 0):
            following = [self.text[at] if (at := position + depth) < end else chain[at - end] for position in positions]
            counts: dict[int, int] = {}
            for token in following:
                counts[token] = counts.get(token, 0) + 1
            total = len(positions) + len(counts)
            ranked = sorted(counts.items(), key=itemgetter(1), reverse=True)
            yield [(token, count / total) for token, count in ranked]
            chain.append(ranked[0][0])
            positions = [position for position, token in zip(positions, following, strict=True) if token == chain[-1]]

    def chain(self, longest: int) -> list[int]:
        """The ``longest`` tokens that most often followed the match; no token if there is no match."""
        _, occurrences = self.match()
        return [level[0][0] for level in self.continuations(occurrences, longest)]

    def _occurrences(self, n: int) -> Iterator[int]:
        """The earlier occurrences of the text's last n tokens, the newest first."""
        position = self._last.get(tuple(self.text[-n:]), -1)
        while position >= 0:
            yield position
            position = self._before[n - 1][position]

    def _common(self, position: int, known: int) -> int:
        """How many tokens before ``position`` equal those at the end of the text; at least ``known`` do."""
        length = known
        while length < min(self.longest, position) and self.text[position - length - 1] == self.text[-length - 1]:
            length += 1
        return length
