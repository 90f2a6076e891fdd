"""A constraint of a user's own for tests: an automaton over token ids, some of whose places leave one token."""

import random
from dataclasses import dataclass

import torch

from decoder.constraints import ConstraintState, Vocabulary


@dataclass(frozen=True)
class Automaton:
    """States 0 to ``count`` - 1, each with tokens that lead on. A third of them leave one token, some an end token.

    Where the text has no end token, one state without a way on ends it, with ``dead_end``.
    """

    count: int = 12
    seed: int = 0
    dead_end: bool = False
    tells_forced: bool = False

    def start(self, vocabulary: Vocabulary) -> "AutomatonState":
        return AutomatonState(self, vocabulary)


class AutomatonState(ConstraintState):
    def __init__(self, automaton: Automaton, vocabulary: Vocabulary):
        draw = random.Random(automaton.seed)
        ends, self.told = sorted(vocabulary.end_ids), automaton.tells_forced
        words = [token for token in range(vocabulary.size) if token not in ends]
        self.ways: list[dict[int, int]] = []
        for place in range(automaton.count):
            width = 1 if place % 3 == 1 else draw.randint(2, 9)
            self.ways.append(
                {token: draw.randrange(automaton.count) for token in draw.sample(words, min(width, len(words)))}
            )
        if automaton.dead_end:
            self.ways[-1] = {}
        self.ends = {place: ends for place in range(automaton.count) if place % 5 == 4}
        self.size, self.path = vocabulary.size, [0]

    def mask(self) -> torch.Tensor:
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[[*self.ways[self.path[-1]], *self.ends.get(self.path[-1], ())]] = True
        return mask

    def advance(self, token: int) -> None:
        self.path.append(self.ways[self.path[-1]][token])

    def rewind(self, count: int) -> None:
        assert count < len(self.path)
        del self.path[len(self.path) - count :]

    def forced(self) -> list[int]:
        if not self.told:
            return list(super().forced())
        chain, place = [], self.path[-1]
        while len(self.ways[place]) == 1 and not self.ends.get(place) and len(chain) < 20:
            [(token, place)] = self.ways[place].items()
            chain.append(token)
        return chain


def keeps_to(automaton: Automaton, tokens, vocabulary: Vocabulary) -> bool:
    """Whether an output holds to the automaton, the end token at its end included."""
    state = automaton.start(vocabulary)
    for index, token in enumerate(tokens):
        if not state.mask()[token]:
            return False
        if token in vocabulary.end_ids:
            return index + 1 == len(tokens)
        state.advance(token)
    return True
