"""Where any suffix of a growing text stood before, and what followed it: a suffix automaton that counts."""

from collections.abc import Sequence
from heapq import nlargest
from itertools import chain, islice

ROOT = 0


class SuffixAutomaton:
    """The suffix automaton (Blumer et al., 1985) of a growing text, with the frequencies of continuations.

    A state stands for the substrings that end at the same places; its edges are the tokens seen behind them. Appending
    a token is amortised O(1). On its way the construction passes the states for the text's suffixes, longest first,
    until one has the token as an edge already; there the edge's count goes up. That is the update exclusion of
    prediction by partial matching (Moffat, 1990): a context counts a token only as long as no longer context knew it.
    """

    def __init__(self) -> None:
        self._edges: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._more: dict[int, dict[int, int]] = {}  # counts of edges beyond their first, the newest last
        self._sums: dict[int, int] = {}
        self._last = ROOT

    def __len__(self) -> int:
        """Number of states, at most twice the tokens."""
        return len(self._edges)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        new = self._state({}, -1, self._length[self._last] + 1)
        at = self._last
        while at >= 0 and token not in self._edges[at]:
            self._edges[at][token] = new
            at = self._link[at]
        if at < 0:
            self._link[new] = ROOT
        else:
            counts = self._more.setdefault(at, {})
            counts[token] = counts.pop(token, 0) + 1
            self._sums[at] = self._sums.get(at, 0) + 1
            old = self._edges[at][token]
            if self._length[old] > self._length[at] + 1:
                old = self._split(at, token, old)
            self._link[new] = old
        self._last = new

    def _split(self, at: int, token: int, old: int) -> int:
        """Give the shorter substrings of ``old``, which now end in one more place, a state of their own."""
        short = self._state(dict(self._edges[old]), self._link[old], self._length[at] + 1)
        if old in self._more:
            self._more[short] = dict(self._more[old])
            self._sums[short] = self._sums[old]
        self._link[old] = short
        while at >= 0 and self._edges[at].get(token) == old:
            self._edges[at][token] = short
            at = self._link[at]
        return short

    def _state(self, edges: dict[int, int], link: int, length: int) -> int:
        self._edges.append(edges)
        self._link.append(link)
        self._length.append(length)
        return len(self._edges) - 1

    def match(self) -> tuple[int, int]:
        """The state of the longest suffix of the text that also stands earlier in it, and that suffix's length."""
        state = self._link[self._last] if self._last != ROOT else ROOT
        return state, self._length[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """The state of the longest suffix that ends in more places than ``state`` does, and that suffix's length."""
        link = max(self._link[state], ROOT)
        return link, self._length[link]

    def continuations(self, state: int, most: int) -> list[tuple[int, float, int]]:
        """Tokens seen behind ``state``: up to ``most`` of (token, share, next state), the most frequent first.

        The share is the token's count over all counts plus one for every token seen (escape method C of prediction by
        partial matching). Ties go to the token seen last.
        """
        edges, more = self._edges[state], self._more.get(state)
        total = 2 * len(edges) + self._sums.get(state, 0)
        if more is None:
            return [(token, 1 / total, edges[token]) for token in islice(reversed(edges), most)]
        pool = reversed(more)
        # Where many tokens followed, those that did so once are of no use.
        if len(more) < most:
            pool = chain(pool, (token for token in reversed(edges) if token not in more))
        best = nlargest(most, pool, key=lambda token: more.get(token, 0))
        return [(token, (1 + more.get(token, 0)) / total, edges[token]) for token in best]

    def chain(self, longest: int) -> list[int]:
        """The most frequent continuation of the text's match, twice as long as the match and at most ``longest``."""
        state, length = self.match()
        tokens: list[int] = []
        for _ in range(min(longest, 2 * length)):
            found = self.continuations(state, most=1)
            if not found:
                # The end of the text itself; in a text in a loop, around the loop.
                state, _ = self.shorter(state)
                found = self.continuations(state, most=1)
            token, _, state = found[0]
            tokens.append(token)
        return tokens
