"""Where the end of a growing text stood before, and what followed it there."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

_GRAM = 3  # tokens of the longest n-gram whose places are kept; longer suffixes are compared from there


class SuffixIndex:
    """The places of each n-gram of a text, linked from the newest to the oldest, for n of 1 to 3.

    A suffix of any length is found by comparing the text before the newest places of its last three tokens. A token
    costs three dictionary entries; a lookup compares at most ``longest`` tokens at each of ``places`` places, however
    long the text is.

    Args:
        longest: tokens of the longest suffix that is told from shorter ones.
        places: of the suffix that are looked at, the newest ones.
    """

    def __init__(self, longest: int, places: int = 8):
        if longest < 1:
            raise ValueError(f"a suffix needs at least 1 token, not {longest}")
        self.longest, self.places = longest, places
        self.text: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # the position behind the newest place of each n-gram
        # For each n and position, the next older place of the n-gram before it.
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
        """The length of the longest suffix seen before, and the positions behind its newest places, the newest first.

        The length is 0 and there is no place where nothing was seen; of more than ``longest`` tokens it is that.
        """
        end = len(self.text)
        for n in range(min(len(self._before), end), 0, -1):
            found = list(islice(self._places(n), self.places))
            if found:
                break
        else:
            return 0, []
        if n < _GRAM:
            return n, found
        lengths = [self._common(place, n) for place in found]
        return max(lengths), [place for place, length in zip(found, lengths, strict=True) if length == max(lengths)]

    def continuations(self, longest: int) -> Iterator[list[tuple[int, float]]]:
        """Level by level what followed the match: (token, share), the most frequent first; then what followed that.

        The share is the token's count over all counts and one for every token seen (escape method C of prediction by
        partial matching). Ties go to the token seen last. Where a place is near the end of the text, the copy goes on
        with what it copied: a text in a loop is continued around the loop.
        """
        _, places = self.match()
        chain: list[int] = []
        end = len(self.text)
        for depth in range(longest if places else 0):
            following = [self.text[at] if (at := place + depth) < end else chain[at - end] for place in places]
            counts = Counter(following)
            total = len(places) + len(counts)
            yield [(token, count / total) for token, count in counts.most_common()]
            chain.append(counts.most_common(1)[0][0])
            places = [place for place, token in zip(places, following, strict=True) if token == chain[-1]]

    def chain(self, longest: int) -> list[int]:
        """``longest`` tokens that most often followed the match; none where there is none."""
        return [level[0][0] for level in self.continuations(longest)]

    def _places(self, n: int) -> Iterator[int]:
        place = self._last.get(tuple(self.text[-n:]), -1)
        while place >= 0:
            yield place
            place = self._before[n - 1][place]

    def _common(self, place: int, known: int) -> int:
        """How many tokens before ``place`` are those at the end of the text; that many are ``known`` to be."""
        length = known
        while length < min(self.longest, place) and self.text[place - length - 1] == self.text[-length - 1]:
            length += 1
        return length
