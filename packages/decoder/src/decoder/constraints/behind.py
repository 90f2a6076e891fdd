"""A constraint on what comes behind a model's reasoning."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from decoder.constraints.base import Constraint, ConstraintState, Vocabulary


@dataclass(frozen=True)
class BehindReasoning:
    """A constraint that begins where the reasoning has ended; the reasoning is any text without end tokens.

    Attributes:
        constraint: of what follows.
        end: the token that ends the reasoning.
        begin: the token that begins it, where the model decides whether to reason; None where it has begun already.
        gaps: tokens of which one may stand behind the end, such as line breaks.
    """

    constraint: Constraint
    end: int
    begin: int | None = None
    gaps: tuple[int, ...] = ()

    def start(self, vocabulary: Vocabulary) -> "BehindReasoningState":
        """The state at the beginning of an output. Raises ValueError as the constraint's own does."""
        return BehindReasoningState(self, vocabulary)


class _Stage(Enum):
    OPEN = auto()  # it may begin
    REASONING = auto()
    ENDED = auto()  # behind its end, where a gap may stand
    ANSWER = auto()


class BehindReasoningState(ConstraintState):
    """Where one text stands: in its reasoning, or in the constraint behind it."""

    def __init__(self, constraint: BehindReasoning, vocabulary: Vocabulary):
        self._of, self._inner = constraint, constraint.constraint.start(vocabulary)
        self._stage = _Stage.REASONING if constraint.begin is None else _Stage.OPEN
        self._moves: list[tuple[_Stage, bool]] = []  # the stage before each move, and whether it was one of the answer
        self._ends = vocabulary.end_ids
        self._any = torch.ones(vocabulary.size, dtype=torch.bool)
        self._any[list(vocabulary.end_ids)] = False

    def mask(self) -> torch.Tensor:
        if self._stage is _Stage.REASONING:
            return self._any
        mask = self._inner.mask()
        if other := self._others:
            mask = mask.clone()
            mask[list(other)] = True
        return mask

    def advance(self, token: int) -> None:
        stage, answers = self._behind(token)
        if answers:
            self._inner.advance(token)
        self._moves.append((self._stage, answers))
        self._stage = stage

    def rewind(self, count: int) -> None:
        taken = self._moves[len(self._moves) - count :]
        del self._moves[len(self._moves) - count :]
        if inner := sum(answers for _, answers in taken):
            self._inner.rewind(inner)
        if taken:
            self._stage = taken[0][0]

    def settle(self) -> None:
        if any(answers for _, answers in self._moves):
            self._inner.settle()
        self._moves.clear()

    def allows(self, token: int) -> bool:
        if self._stage is _Stage.REASONING:
            return token not in self._ends
        return token in self._others or self._inner.allows(token)

    def forced(self) -> Sequence[int]:
        return self._inner.forced() if self._stage is _Stage.ANSWER else ()

    @property
    def _others(self) -> tuple[int, ...]:
        """Tokens that may stand here beside those of the answer."""
        if self._stage is _Stage.OPEN and self._of.begin is not None:
            return (self._of.begin,)
        return self._of.gaps if self._stage is _Stage.ENDED else ()

    def _behind(self, token: int) -> tuple[_Stage, bool]:
        """The stage behind a token, and whether the token is one of the answer."""
        if self._stage is _Stage.REASONING:
            return (_Stage.ENDED if token == self._of.end else _Stage.REASONING), False
        if token in self._others:
            return (_Stage.REASONING if self._stage is _Stage.OPEN else _Stage.ANSWER), False
        return _Stage.ANSWER, True
