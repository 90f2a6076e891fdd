"""What `Tuned` grows its trees from: draft heads on the verification's hidden state, and the text itself."""

import math
import time

import torch

from decoder.draft_heads import DraftHeads
from decoder.drafters.tuned import Offer
from decoder.odds import Odds
from decoder.sampler import Sampler
from decoder.suffix_automaton import ROOT, SuffixAutomaton
from decoder.target import Target, Verification

_WIDTH = 6  # candidates per level of heads
_FOLLOWING = 3  # continuations per suffix
_LONGEST_CHAIN = 32
_EXPLORE = 64  # steps after which a level that did not pay is tried again


class HeadsSource:
    """Fused drafting: heads run on the hidden state of the last accepted node, which the verification has computed.

    That state belongs to the position before the root, so head 1 offers what may follow the root. A level costs a
    pass of one head and of the language-model head, so each is run only where its expected gain pays. Conditioned
    heads are run per node, on the embedding of that node's own token; others once per level.

    Args:
        target: its embeddings and language-model head serve the heads.
        coupled: rank by log q plus the position's noise.
    """

    name = "heads"

    def __init__(self, target: Target, heads: DraftHeads, coupled: bool):
        self.target, self.heads, self.coupled = target, heads, coupled
        self.hidden: torch.Tensor | None = None
        self._finds = Odds(trust=2.0, memory=50.0)
        self._seconds = 0.0  # of one level, lately
        self._idle = [0] * heads.num_heads  # steps since each level was last run
        self._levels: dict[int, list[Offer]] = {}
        self._ran: dict[tuple[int, ...], set[int]] = {}

    def root(self, sampler: Sampler) -> object | None:
        self._levels, self._ran = {}, {}
        self._idle = [steps + 1 for steps in self._idle]
        return None if self.hidden is None else (0, self.hidden)

    def offers(self, place: object, path: list[int], joint: float, rate: float, sampler: Sampler) -> list[Offer]:
        depth, state = place
        if depth in self._levels:
            return self._levels[depth]
        if depth == self.heads.num_heads:
            return []
        gain = joint * self._finds.chance(depth, guess=0.7)
        if gain < rate * self._seconds and self._idle[depth] < _EXPLORE:
            return []
        start = time.perf_counter()
        self._idle[depth] = 0
        found = self._level(depth, state, path, sampler)
        self._ran[tuple(path)] = {offer.token for offer in found}
        if not self.heads.conditioned:
            self._levels[depth] = found
        seconds = time.perf_counter() - start
        self._seconds += (seconds - self._seconds) * (0.1 if self._seconds else 1.0)
        return found

    def _level(self, depth: int, state: torch.Tensor, path: list[int], sampler: Sampler) -> list[Offer]:
        """The best candidates of one head, each with the margin by which it leads or trails the best other one."""
        before = path[-1] if path else sampler.context[-1]
        embedding = self.target.embed(before) if self.heads.conditioned else None
        state, normalised = self.heads.advance(
            depth, self.hidden if self.heads.kind == "independent" else state, embedding
        )
        scores = sampler.draft_scores(self.target.head(normalised[None]), self.coupled, path)[0]
        values, tokens = (row.tolist() for row in scores.topk(min(_WIDTH, len(scores))))
        found = []
        for rank, (value, token) in enumerate(zip(values, tokens, strict=True)):
            if not value > float("-inf"):
                break
            # Behind a filter that leaves one token there is no rival.
            lead = value - values[rank == 0] if len(values) > 1 else math.inf
            margin = int(2 * min(4.0, max(-4.0, lead))) if lead == lead else 0
            found.append(
                Offer(token, (self.name, depth, rank == 0, margin), 0.6 if rank == 0 else 0.15, (depth + 1, state))
            )
        return found

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.hidden = verification.hidden[path[-1]]
        for depth, token in enumerate(tokens):
            found = self._ran.get(tuple(tokens[:depth]))
            if found is not None:
                self._finds.observe(depth, token in found)


class SuffixSource:
    """What followed the longest suffix of the text where it stood before; chains up to 32 tokens, at no cost."""

    name = "suffix"

    def __init__(self, prompt: list[int]):
        self.automaton = SuffixAutomaton()
        self.automaton.extend(prompt)

    def root(self, sampler: Sampler) -> object | None:
        state, length = self.automaton.match()
        return (state, length, 0) if length else None

    def offers(self, place: object, path: list[int], joint: float, rate: float, sampler: Sampler) -> list[Offer]:
        state, length, depth = place
        if depth == _LONGEST_CHAIN:
            return []
        found = self.automaton.continuations(state, _FOLLOWING)
        while not found and state != ROOT:
            # The end of the text itself: a shorter suffix of it stands elsewhere too.
            state, length = self.automaton.shorter(state)
            found = self.automaton.continuations(state, _FOLLOWING) if length else []
        return [
            Offer(
                token, (self.name, min(length.bit_length(), 6), int(share * 5)), share, (after, length + 1, depth + 1)
            )
            for token, share, after in found
        ]

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.automaton.extend(tokens)
