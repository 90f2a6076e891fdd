"""Token reutilisation (paper section 3.2): the most frequent n-grams of the text that begin with a given token."""

from collections.abc import Iterator, Sequence
from itertools import islice

Gram = tuple[int, ...]


class _Ranking:
    """N-grams in descending order of frequency and, among equals, of recency; counting one takes constant time.

    N-grams of equal frequency share a bucket, a dict in order of their last occurrence. The buckets that are not empty
    are linked from the highest frequency, ``_top``, down to 0.
    """

    def __init__(self) -> None:
        self.counts: dict[Gram, int] = {}
        self._buckets: dict[int, dict[Gram, None]] = {0: {}}
        self._above: dict[int, int] = {}
        self._below: dict[int, int] = {}
        self._top = 0

    def increment(self, gram: Gram) -> None:
        old = self.counts.get(gram, 0)
        new = old + 1
        if new not in self._buckets:
            self._insert_above(old, new)
        self.counts[gram] = new
        self._buckets[new][gram] = None
        if old:
            del self._buckets[old][gram]
            if not self._buckets[old]:
                self._remove(old)

    def _insert_above(self, old: int, new: int) -> None:
        above = self._above.get(old)
        self._buckets[new] = {}
        self._below[new], self._above[old] = old, new
        if above is None:
            self._top = new
        else:
            self._above[new], self._below[above] = above, new

    def _remove(self, level: int) -> None:
        del self._buckets[level]
        below, above = self._below.pop(level), self._above.pop(level)
        self._above[below], self._below[above] = above, below

    def __iter__(self) -> Iterator[Gram]:
        level = self._top
        while level:
            yield from reversed(self._buckets[level])
            level = self._below[level]


class NgramTable:
    """Exact n-gram frequencies of a growing text; of equally frequent n-grams the one seen last comes first.

    Args:
        n: how many tokens an n-gram has, gamma + 1 in the paper.
    """

    def __init__(self, n: int):
        if n < 2:
            raise ValueError(f"an n-gram needs at least 2 tokens, not {n}")
        self.n = n
        self._tail: Gram = ()
        self._by_first: dict[int, _Ranking] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text and count the n-grams that they complete."""
        for token in tokens:
            gram = (*self._tail, token)
            if len(gram) == self.n:
                self._by_first.setdefault(gram[0], _Ranking()).increment(gram)
                gram = gram[1:]
            self._tail = gram

    def most_frequent(self, first: int, k: int) -> list[Gram]:
        """The k most frequent n-grams that begin with ``first``, the most frequent first."""
        ranking = self._by_first.get(first)
        return [] if ranking is None else list(islice(ranking, k))
