"""What a constraint is: an object that texts share, and a state per text that moves along paths of tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class ConstraintError(ValueError):
    """A text cannot go on in its constraint, for instance because a grammar has become too complex."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a text is made of, and those that end it.

    Attributes:
        size: V, the number of logits per position.
        tokenizer: None where the decoder has none.
        end_ids: the end-of-sequence tokens that end this text; none where they are ignored.
        stop_ids: all tokens that end it, those among them.
    """

    size: int
    tokenizer: "PreTrainedTokenizerBase | None" = field(default=None, repr=False)
    end_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()


class ConstraintState(ABC):
    """Where one text stands in its constraint.

    What may follow must depend on nothing but the tokens since the start, in their order: the state is moved along the
    paths of drafts and back again. It is never moved along a token that may not follow, nor along an end token.
    """

    @abstractmethod
    def mask(self) -> "torch.Tensor":
        """Which tokens may follow, bool [V] on the host, not to be changed afterwards.

        End tokens are among them only where the text may end. A text without end tokens ends where nothing may follow.
        """

    @abstractmethod
    def advance(self, token: int) -> None:
        """Move behind a token that may follow."""

    @abstractmethod
    def rewind(self, count: int) -> None:
        """Take the last ``count`` moves back."""

    def settle(self) -> None:
        """The text itself has come here: the state is not moved back behind this place any more."""
        return

    def allows(self, token: int) -> bool:
        """Whether this token may follow, as the mask says; for drafts, often asked where the mask is not needed."""
        return bool(self.mask()[token])

    def forced(self) -> Sequence[int]:
        """Tokens that follow in any case, each the only one that the mask behind those before it leaves.

        They are drafted at no cost. There may be more than are told.
        """
        tokens = self.mask().nonzero()[:2, 0].tolist()
        return tokens if len(tokens) == 1 else ()


@runtime_checkable
class Constraint(Protocol):
    """What a text may be. One object serves many texts, also at once; for `SamplingParams` it must be hashable."""

    def start(self, vocabulary: Vocabulary) -> ConstraintState:
        """The state at the beginning of an output.

        Raises:
            ValueError: the constraint does not fit this vocabulary; the message says why.
        """
