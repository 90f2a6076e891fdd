"""The suffix index against searching the text."""

import time
from collections import Counter
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafters.retrieval.suffix_index import SuffixIndex

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def indexed(text, longest=99, places=99):
    index = SuffixIndex(longest, places)
    for token in text:
        index.extend([token])
    return index


def common_suffix(text, place, longest):
    """How many tokens before ``place`` are those at the end of the text."""
    most = min(place, longest)
    return next((n for n in range(most) if text[place - 1 - n] != text[-1 - n]), most)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 9), st.sampled_from((1, 2, 99)))
def test_the_match_is_the_longest_suffix_that_stood_before(text, longest, places):
    """At its newest places; of suffixes of more than three tokens those of the newest places of the last three."""
    length, found = indexed(text, longest, places).match()
    known = {place: common_suffix(text, place, longest) for place in range(len(text) - 1, 0, -1)}
    newest = [place for place, n in known.items() if n >= 3][:places]
    newest = newest or [place for place, n in known.items() if n == max(known.values())][:places]
    best = max((known[place] for place in newest), default=0)
    assert (length, found) == (best, [place for place in newest if known[place] == best] if best else [])


@settings(max_examples=200, deadline=None)
@given(TEXTS.filter(len), st.integers(1, 6))
def test_continuations_are_what_followed_at_the_places_that_agree_so_far(text, longest):
    index = indexed(text)
    _, places = index.match()
    chain, levels = [], list(index.continuations(places, longest))
    assert len(levels) == (longest if places else 0)
    for level in levels:
        copies = [[*text[place:], *chain][: len(chain) + 1] for place in places]
        counts = Counter(copy[-1] for copy in copies if copy[:-1] == chain)
        assert dict(level) == {token: n / (counts.total() + len(counts)) for token, n in counts.items()}
        assert [share for _, share in level] == sorted((share for _, share in level), reverse=True)
        chain.append(level[0][0])
    assert index.chain(longest) == chain


def test_counts_and_ties():
    """After 1 came 2 twice, then 3 and 4 once each: 2 first, then 4, seen last; shares by escape method C."""
    index = indexed([1, 2, 8, 1, 2, 7, 1, 3, 6, 1, 4, 5, 1])
    length, places = index.match()
    assert length == 1
    level = next(index.continuations(places, 1))
    assert [(token, round(share, 9)) for token, share in level] == [
        (2, round(2 / 7, 9)),
        (4, round(1 / 7, 9)),
        (3, round(1 / 7, 9)),
    ]
    assert SuffixIndex(3, occurrences=1).match() == (0, [])
    assert indexed([1, 2, 3]).chain(5) == []


def test_a_text_in_a_loop_is_continued_around_the_loop():
    assert indexed([7, 7, *[1, 2, 3] * 5]).chain(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_suffix_needs_a_token():
    with pytest.raises(ValueError, match="at least 1 token"):
        SuffixIndex(0, occurrences=1)


def test_time_does_not_grow_with_the_text():
    """A periodic text, whose match is as long as itself, and medians of blocks 50 times apart in length."""
    index, text, times = SuffixIndex(32, occurrences=8), [i * i % 97 for i in range(60_000)], []
    for start in range(0, len(text), 200):
        begin = time.thread_time()
        index.extend(text[start : start + 200])
        for _ in range(10):
            index.chain(8)
        times.append(time.thread_time() - begin)
    assert median(times[-50:]) < 10 * median(times[5:55])
