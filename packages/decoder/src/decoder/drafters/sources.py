"""What `Tuned` grows its trees from: draft heads on the verification's hidden state, and the text itself."""

import math
import time
from collections.abc import Iterable
from heapq import nlargest

import torch

from decoder.draft_heads import DraftHeads
from decoder.drafters.tuned import Offer
from decoder.odds import Calibration, Odds
from decoder.sampler import Sampler
from decoder.suffix_automaton import ROOT, SuffixAutomaton
from decoder.target import Target, Verification
from decoder.transfers import download, upload

Path = tuple[int, ...]

_WIDTH = 6  # candidates per node of a level of heads
_BEAM = 4  # nodes of a level that the next one goes on from
_DEEPEST = 8  # levels of conditioned heads
_FOLLOWING = 3  # continuations per suffix
_LONGEST_CHAIN = 32
_RETRY = 64  # steps after which a level that did not pay is tried again
_FAR = 4.0  # in score: what trails the best candidate by more is hardly ever right
_WORST = 1.5  # a level that took longer than so many times the usual was disturbed


class HeadsSource:
    """Fused drafting: heads run on the hidden state of the last accepted node, which the verification has computed.

    That state belongs to the position before the root, so head 1 offers what may follow the root. A level costs a
    pass of one head and of the language-model head, so each is run only where its expected gain pays; conditioned
    heads are run for the most promising nodes of the level before at once, each on its own token's embedding. The
    last head goes on drafting deeper than it was trained for.

    Args:
        target: its embeddings and language-model head serve the heads.
        coupled: rank by log q plus the position's noise.
        odds: what the chances of offers are learnt in.
    """

    name = "heads"
    costly = True

    def __init__(self, target: Target, heads: DraftHeads, coupled: bool, odds: Odds):
        self.target, self.heads, self.coupled, self.odds = target, heads, coupled, odds
        self.hidden: torch.Tensor | None = None
        self.deepest = self._most = _DEEPEST if heads.conditioned else heads.num_heads
        self._gains = [Calibration() for _ in range(self.deepest)]
        self._seconds = 0.0  # of one level, lately
        self._idle = [0] * self.deepest  # steps since each level was last run
        self._levels: list[dict[Path | None, list[Offer]]] = []  # by what they follow; None where that is all the same
        self._reach: list[float] = []  # the chance to come to each level, as it was thought to be
        self._beam: list[tuple[float, Path, int]] = []
        self._states: torch.Tensor | None = None
        self._sampler: Sampler | None = None
        self._explored = False
        self._price = 0.0  # of one level, in tokens

    def root(self, sampler: Sampler, rate: float, node_seconds: float, levels: int) -> object | None:
        self._most = min(levels, self.deepest)
        self._sampler, self._states = sampler, self.hidden
        self._levels, self._reach, self._beam, self._explored = [], [], [(1.0, (), 0)], False
        self._price = rate * (self._seconds + _BEAM * node_seconds)
        self._idle = [steps + 1 for steps in self._idle]
        return None if self.hidden is None or not self._most else ()

    def offers(self, place: object) -> list[Offer]:
        depth = len(place)
        if depth == len(self._levels):
            if depth >= self._most or not self._pays(depth):
                return []
            self._sampler.noise.rows(len(self._sampler.context), depth + 1)  # made for many positions at a time
            start = time.perf_counter()
            self._reach.append(self._chance_of_beam())
            self._levels.append(self._level(depth))
            self._took(time.perf_counter() - start)
            self._idle[depth] = 0
        if depth > len(self._levels):
            return []
        return self._levels[depth].get(place if self.heads.conditioned else None, [])

    def _pays(self, depth: int) -> bool:
        gain = self._gains[depth].corrected(self._chance_of_beam())
        if gain > self._price:
            return True
        # Now and then one level more, to see whether it still does not pay.
        explore, self._explored = not self._explored and self._idle[depth] >= _RETRY, True
        return explore

    def _took(self, seconds: float) -> None:
        """A level's time; one that was disturbed, or the first one with all its preparations, counts little."""
        if self._seconds:
            self._seconds = min(self._seconds, _WORST * seconds)
            seconds = min(seconds, _WORST * self._seconds)
        self._seconds += (seconds - self._seconds) * (0.1 if self._seconds else 1.0)

    def _chance_of_beam(self) -> float:
        return sum(chance for chance, _, _ in self._beam)

    def _level(self, depth: int) -> dict[Path | None, list[Offer]]:
        """The best candidates behind each node of the beam, and the next beam."""
        sampler, paths = self._sampler, [path for _, path, _ in self._beam]
        head = min(depth, self.heads.num_heads - 1)
        if self.heads.conditioned:
            newest = [path[-1] if path else sampler.context[-1] for path in paths]
            rows, newest = upload([[row for _, _, row in self._beam], newest], self._states.device)
            states = self._states.index_select(0, rows)
            states, normalised = self.heads.advance(head, states, self.target.embed(newest))
        else:
            states = self.hidden if self.heads.kind == "independent" else self._states
            states, normalised = self.heads.advance(head, states)
        scores = sampler.branch_scores(self.target.head(normalised), self.coupled, paths)
        best = scores.topk(min(_WIDTH, scores.shape[-1]))
        # Ids are exact in double precision.
        values, tokens = download(torch.stack((best.values.double(), best.indices.double())))
        level, beam = {}, []
        for row, (chance, path, _) in enumerate(self._beam):
            found = self._ranked(depth, values[row], map(int, tokens[row]), path)
            level[path if self.heads.conditioned else None] = found
            for offer in found:
                beam.append((chance * self.odds.chance(offer.kind, offer.guess), offer.place, row))
        self._beam = nlargest(_BEAM if self.heads.conditioned else 1, beam)
        self._states = states
        return level

    def _ranked(self, depth: int, values: list[float], tokens: Iterable[int], path: Path) -> list[Offer]:
        """The tokens of one row of scores, each with the margin by which it leads or trails the best other one."""
        found = []
        for rank, (value, token) in enumerate(zip(values, tokens, strict=True)):
            # Behind a filter that leaves one token there is no rival.
            lead = value - values[rank == 0] if len(values) > 1 else math.inf
            if not value > -math.inf or lead < -_FAR:
                break
            margin = int(2 * min(_FAR, lead)) if lead == lead else 0
            guess = 0.6 if rank == 0 else 0.1
            if depth:
                guess = self.odds.chance((self.name, depth - 1, rank == 0, margin), guess)
            found.append(Offer(token, (self.name, depth, rank == 0, margin), guess, (*path, token)))
        return found

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        # The next verification may write over its own.
        self.hidden = verification.hidden[path[-1] : path[-1] + 1].clone()
        for depth, hoped in enumerate(self._reach):
            self._gains[depth].observe(hoped, depth + 1 < len(path))
        self._reach = []


class SuffixSource:
    """What followed the longest suffix of the text where it stood before; chains up to 32 tokens, at no cost."""

    name = "suffix"
    costly = False

    def __init__(self, prompt: list[int]):
        self.automaton = SuffixAutomaton()
        self.automaton.extend(prompt)

    def root(self, sampler: Sampler, rate: float, node_seconds: float, levels: int) -> object | None:
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
        return [
            Offer(
                token, (self.name, min(length.bit_length(), 6), int(share * 5)), share, (after, length + 1, depth + 1)
            )
            for token, share, after in found
        ]

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.automaton.extend(tokens)
