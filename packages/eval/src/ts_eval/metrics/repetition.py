"""How much a text repeats itself."""

import zlib
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from ts_eval.metrics.base import MeanOverTexts

REPEATED_NGRAM = 8
LONGEST_PERIOD = 1024
SHORTEST_LOOP = 32


def longest_repeated_span(tokens: Sequence[Hashable]) -> int:
    """Length of the longest run of tokens that stands at two places, which may overlap; 0 when no token comes twice.

    One of the measures of memorised and degenerate text (Lee et al., 2022, deduplicate by it). Found with a suffix
    automaton, in time and memory linear in the text: when it has read a prefix, the suffix link of that prefix's state
    is as long as the longest suffix that also ends further left.
    """
    lengths, links = [0], [-1]
    moves: list[dict[Hashable, int]] = [{}]
    last, longest = 0, 0
    for token in tokens:
        state = len(lengths)
        lengths.append(lengths[last] + 1)
        links.append(0)
        moves.append({})
        back = last
        while back >= 0 and token not in moves[back]:
            moves[back][token] = state
            back = links[back]
        if back >= 0:
            target = moves[back][token]
            if lengths[target] == lengths[back] + 1:
                links[state] = target
            else:
                clone = len(lengths)
                lengths.append(lengths[back] + 1)
                links.append(links[target])
                moves.append(dict(moves[target]))
                while back >= 0 and moves[back].get(token) == target:
                    moves[back][token] = clone
                    back = links[back]
                links[target] = links[state] = clone
        longest = max(longest, lengths[links[state]])
        last = state
    return longest


def repeated(tokens: Sequence[Hashable], n: int = REPEATED_NGRAM) -> list[bool]:
    """Per token, whether it lies inside an n-gram that stands in the text more than once, the first time included."""
    ngrams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    counts = Counter(ngrams)
    inside, until = [], 0
    for place in range(len(tokens)):
        if place < len(ngrams) and counts[ngrams[place]] > 1:
            until = place + n
        inside.append(place < until)
    return inside


def repeated_share(tokens: Sequence[Hashable], n: int = REPEATED_NGRAM) -> float | None:
    """Share of the tokens inside repeated n-grams (see `repeated`), in [0, 1]; None for fewer than n tokens.

    A token-wise form of rep-n of Welleck et al. (2020), who count the n-grams themselves.
    """
    return sum(repeated(tokens, n)) / len(tokens) if len(tokens) >= n else None


def loop_start(tokens: Sequence[Hashable], longest_period: int = LONGEST_PERIOD) -> int | None:
    """Where looping begins: the first position from which one block stands three times in a row, or more often.

    The block has at most ``longest_period`` tokens, and its repetitions cover at least 32. None when the text never
    loops. Greedy and unpenalised decoding end in such loops (Holtzman et al., 2020; paper, case study).
    """
    numbers: dict[Hashable, int] = {}
    text = np.array([numbers.setdefault(token, len(numbers)) for token in tokens], dtype=np.int64)
    first = None
    for period in range(1, min(longest_period, len(text) // 3) + 1):
        breaks = np.flatnonzero(text[period:] != text[:-period])
        # Between two breaks every token equals the one a period before.
        starts = np.concatenate(([0], breaks + 1))
        runs = np.concatenate((breaks, [len(text) - period])) - starts
        long = starts[runs >= max(2 * period, SHORTEST_LOOP - period)]
        if len(long) and (first is None or long[0] < first):
            first = int(long[0])
    return first


def compression_ratio(text: str) -> float | None:
    """Bytes of the UTF-8 text over its bytes when compressed; higher is more redundant; None for an empty text.

    As in Shaib et al. (2024), "Standardizing the Measurement of Text Diversity", with zlib, gzip's algorithm, at its
    highest level. It looks back 32 KB, so what comes again after more text than that does not count.
    """
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw, 9)) if raw else None


class LongestRepeatedSpan(MeanOverTexts):
    """Mean `longest_repeated_span` over texts, one text (token ids or words) per update."""

    higher_is_better = False

    def measure(self, tokens: Sequence[Hashable]) -> float:
        return longest_repeated_span(tokens)


class RepeatedShare(MeanOverTexts):
    """Mean `repeated_share` over texts, one text (token ids or words) per update."""

    higher_is_better = False

    def __init__(self, n: int = REPEATED_NGRAM, **kwargs):
        super().__init__(**kwargs)
        self.n = n

    def measure(self, tokens: Sequence[Hashable]) -> float | None:
        return repeated_share(tokens, self.n)


class LoopStart(MeanOverTexts):
    """Mean `loop_start` over the texts that loop, one text (token ids or words) per update."""

    higher_is_better = True

    def measure(self, tokens: Sequence[Hashable]) -> float | None:
        return loop_start(tokens)


class CompressionRatio(MeanOverTexts):
    """Mean `compression_ratio` over texts, one text per update."""

    higher_is_better = False

    def measure(self, text: str) -> float | None:
        return compression_ratio(text)
