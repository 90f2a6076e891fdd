"""The suffix automaton against searching the text."""

import time
from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafters.retrieval.suffix_automaton import ROOT, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def places(text, part):
    return [i for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def longest_repeated_suffix(text):
    return next((n for n in range(len(text) - 1, 0, -1) if len(places(text, text[-n:])) > 1), 0)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_the_match_is_the_longest_suffix_that_stood_before(text):
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        assert automaton.match()[1] == longest_repeated_suffix(text[:end])
    assert len(automaton) <= max(2, 2 * len(text))


@settings(max_examples=200, deadline=None)
@given(TEXTS.filter(len))
def test_edges_are_what_followed_and_lead_on(text):
    """From the match along every edge, and from there again: tokens seen behind that context, all of them."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    state, length = automaton.match()
    frontier = [(state, text[len(text) - length :])]
    for _ in range(3):
        following = []
        for state, context in frontier:
            found = automaton.continuations(state, most=9)
            seen = {text[i + len(context)] for i in places(text[:-1], context)}
            assert {token for token, _, _ in found} == seen
            assert sum(share for _, share, _ in found) <= 1
            assert [share for _, share, _ in found] == sorted((share for _, share, _ in found), reverse=True)
            following += [(after, [*context, token]) for token, _, after in found]
        frontier = following


def test_counts_and_ties():
    """After 1 came 2 twice, then 3 and 4 once each: 2 first, then 4, seen last; shares by escape method C."""
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 8, 1, 2, 7, 1, 3, 6, 1, 4, 5, 1])
    state, length = automaton.match()
    assert length == 1
    shares = [(token, round(share, 9)) for token, share, _ in automaton.continuations(state, most=2)]
    assert shares == [(2, round(2 / 7, 9)), (4, round(1 / 7, 9))]
    assert automaton.shorter(state) == (ROOT, 0)
    assert SuffixAutomaton().match() == (ROOT, 0)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 9))
def test_a_chain_is_text_that_stood_behind_the_match(text, longest):
    automaton = SuffixAutomaton()
    automaton.extend(text)
    chain, (_, length) = automaton.chain(longest), automaton.match()
    assert len(chain) == min(longest, 2 * length)
    context = text[len(text) - length :]
    if chain:
        following = [text[i + length] for i in places(text[:-1], context)]
        assert chain[0] in following


def test_a_text_in_a_loop_is_continued_around_the_loop():
    automaton = SuffixAutomaton()
    automaton.extend([7, 7, *[1, 2, 3] * 5])
    assert automaton.chain(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_update_time_does_not_grow_with_the_text():
    """A periodic text, whose match is as long as itself, and medians of blocks 50 times apart in length."""
    automaton = SuffixAutomaton()
    text = [i * i % 97 for i in range(60_000)]
    times = []
    for start in range(0, len(text), 200):
        begin = time.perf_counter()
        automaton.extend(text[start : start + 200])
        times.append(time.perf_counter() - begin)
    assert median(times[-50:]) < 10 * median(times[5:55])
