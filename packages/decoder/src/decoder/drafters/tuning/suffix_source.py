"""The text as a source: what followed the end of it where that stood before."""

from collections.abc import Callable

from decoder.drafters.retrieval.suffix_automaton import ROOT, SuffixAutomaton
from decoder.drafters.tuning.tuned import Offer
from decoder.model.target import Verification
from decoder.sampling.sampler import Sampler

_FOLLOWING = 3  # continuations per suffix
_LONGEST_CHAIN = 32


class SuffixSource:
    """What followed the longest suffix of the text where it stood before; chains up to 32 tokens, at no cost."""

    name = "suffix"

    def __init__(self, prompt: list[int]):
        self.automaton = SuffixAutomaton()
        self.automaton.extend(prompt)

    def root(self, sampler: Sampler, rate: Callable[[], float], node_seconds: float, levels: int) -> object | None:
        state, length = self.automaton.match()
        return (state, length, 0) if length else None

    def offers(self, place: object) -> list[Offer]:
        state, length, depth = place
        if depth == _LONGEST_CHAIN:
            return []
        found = self.automaton.continuations(state, _FOLLOWING)
        while not found and state != ROOT:
            # The end of the text itself: a shorter suffix of it stands elsewhere too.
            state, length = self.automaton.shorter(state)
            found = self.automaton.continuations(state, _FOLLOWING) if length else []
        offers = []
        for token, share, after in found:
            kind = self.name, min(length.bit_length(), 6), int(share * 5)
            # The longer the suffix, the better the odds: 1 to 1 behind one token that was followed once.
            guess = share * (length + 1) / (2 + share * (length - 1))
            offers.append(Offer(token, kind, guess, (after, length + 1, depth + 1)))
        return offers

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.automaton.extend(tokens)
