"""What recurrent layers keep of a sequence: the state behind each token from which the sequence may go on."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

_NODES = 80  # of a pass, whose states are all kept; of a longer chain only the last ones are
CHANGED = "have changed while a text was decoded: begin the text anew"
_MARKS, _MARKS_BACK = 17, 128  # of a sequence, and of one whose tokens are taken back


class MixerState(LinearAttentionLayer):
    """The state of one layer: what transformers' own cache keeps of it.

    Attributes:
        begun_from, row: where a prompt's tokens are computed two by two: the state behind the token before the last
            one, and the last one's input.
    """

    begun_from: "MixerState | None" = None
    row: torch.Tensor | None = None

    def alone(self) -> "MixerState":
        """The state without what it was begun from."""
        alone = copy.copy(self)
        alone.begun_from = alone.row = None
        return alone

    def copied(self) -> "MixerState":
        """A copy for a module, which writes into the tensors that it is given."""
        copied = self.alone()
        for name, value in vars(copied).items():
            if isinstance(value, dict):
                own = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
                setattr(copied, name, own)
        return copied


States = dict[int, MixerState]
"""By mixer its state behind a token. It never changes: the next token's begins as a copy."""


class _Everywhere:
    """The layers of a cache that has one layer, whichever is asked for."""

    def __init__(self, layer: MixerState):
        self._layer = layer

    def __getitem__(self, index: int) -> MixerState:
        return self._layer

    def __len__(self) -> int:
        return 1 << 30


class OneStateCache(Cache):
    """The cache that a mixer is given: the state behind an earlier token, which it changes to that behind its last one.

    Args:
        before: the state; None at the beginning of a sequence.
    """

    def __init__(self, before: MixerState | None):
        super().__init__(layers=[])
        self.state = MixerState() if before is None else before.copied()
        self.layers = _Everywhere(self.state)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """As lightning attention asks for its state."""
        return self.state.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        """As lightning attention leaves its state."""
        self.state.recurrent_states[0] = state
        self.state.is_recurrent_states_initialized[0] = True


def _nbytes(states: States) -> int:
    kinds = (kept for state in states.values() for kept in (state.conv_states, state.recurrent_states))
    return sum(one.nbytes for kept in kinds for one in kept.values() if one is not None)


class RecurrentCopy(NamedTuple):
    """The states behind some of a sequence's tokens, by the length of the sequence with them."""

    marks: dict[int, States]

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.marks.values()))

    def goes_back_to(self, length: int) -> int:
        """As `RecurrentStates.goes_back_to`."""
        return max((mark for mark in self.marks if mark <= length), default=0)

    def at(self, position: int) -> list[torch.Tensor]:
        """Keys and values of a token: none."""
        return []


class RecurrentStates(ABC):
    """The states of all mixers of a model, recurrent layers, behind the tokens of one sequence.

    Attributes:
        length: how many tokens are committed.
    """

    def __init__(self) -> None:
        self.length = 0

    def make_room(self, count: int) -> None:  # noqa: B027
        """See that there is room for the states of ``count`` tokens, of which no one is asked for beforehand."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def keep(self, path: Sequence[int]) -> None:
        """Commit the nodes ``path`` (ascending) of the last pass."""

    @abstractmethod
    def mark(self) -> None:
        """See that the sequence can go back to where it is now."""

    @property
    @abstractmethod
    def snapshot(self) -> Any:
        """The states to which the sequence can go back."""

    def goes_back_to(self, length: int) -> int:
        """The longest of the sequence's beginnings with at most ``length`` tokens that it can go back to."""
        return self.snapshot.goes_back_to(length)

    @abstractmethod
    def copy(self, count: int) -> Any:
        """What stands of the sequence's first ``count`` tokens; states do not change, so nothing is copied."""

    @abstractmethod
    def begin_with(self, copy: Any, count: int) -> None:
        """Begin, while empty, with the sequence's first ``count`` tokens, to which the copy can go back."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Go back to a length that `goes_back_to` gave."""


class NodeStates(RecurrentStates):
    """States as transformers' modules leave them.

    A pass computes the state of each node from its parent's, and keeps it; committing a path is choosing the state of
    its last node.

    Args:
        mixers: how many there are.
        prompt_tokens: as `LayeredCache.prompt_tokens`. Who takes over the sequence takes over no more than these.
        takes_back: whether tokens are committed that may have to be taken back: then each pass leaves a mark.

    Attributes:
        committed: the states behind the last committed token; empty at the beginning of the sequence.
        marks: by length, states behind earlier tokens.
    """

    def __init__(self, mixers: int, prompt_tokens: int = 0, takes_back: bool = False):
        super().__init__()
        self.mixers, self._prompt_tokens, self._takes_back = mixers, prompt_tokens, takes_back
        self.committed: States = {}
        self.marks: dict[int, States] = {}
        self._nodes: list[States] = []  # of the last pass, behind those of tokens that are held
        self._parents: Sequence[int] = ()
        self._newest_but_one: States = {}
        self._held = 0
        self._forgets = False

    @property
    def nbytes(self) -> int:
        kept = {id(states): states for states in (self.committed, *self.marks.values(), *self._nodes)}
        return sum(map(_nbytes, kept.values()))

    def begin(self, parents: Sequence[int], held: int = 0) -> None:
        """A pass is to come over nodes with these ``parents``, -1 for those behind the sequence.

        Args:
            held: how many nodes of the passes before are tokens that stand between the sequence and these nodes.
        """
        del self._nodes[held:]
        if len(self._nodes) < held:
            raise ValueError(f"{held} drafted tokens are held, and the states of {len(self._nodes)} are there")
        self._parents, self._held = parents, held
        self._nodes += [{} for _ in parents]
        self._forgets = len(parents) > _NODES and all(parent == node - 1 for node, parent in enumerate(parents))

    def before(self, mixer: int, node: int) -> MixerState | None:
        """The mixer's state behind a node's parent; None where no token comes before the node."""
        place = self._held + self._parents[node]
        return self.committed.get(mixer) if place < 0 else self._nodes[place][mixer]

    def in_prompt(self, node: int) -> bool:
        """Whether a node is one of the prompt's tokens."""
        if self.length + self._held >= self._prompt_tokens:
            return False
        depth = 0
        while self._parents[node] >= 0:
            node, depth = self._parents[node], depth + 1
        return self.length + self._held + depth < self._prompt_tokens

    def behind(self, mixer: int, node: int, state: MixerState) -> None:
        """Keep the state behind a node."""
        self._nodes[self._held + node][mixer] = state
        if self._forgets and node > 1:
            del self._nodes[node - 2][mixer]

    def keep(self, path: Sequence[int]) -> None:
        if not path:
            return
        states = self._nodes[path[-1]]
        if len(states) != self.mixers:
            raise ValueError(f"the states behind node {path[-1]} of the last pass are not there")
        self._newest_but_one = self._nodes[path[-2]] if len(path) > 1 else self.committed
        self.committed, self._nodes = states, []
        self.length += len(path)
        if self._takes_back:
            self.mark()

    def mark(self) -> None:
        self.marks[self.length] = self.committed
        if self._takes_back and len(self.marks) > _MARKS_BACK:
            del self.marks[min(self.marks)]
        elif not self._takes_back and len(self.marks) > _MARKS:
            # Of a long sequence they stand twice as far from each other.
            for mark in sorted(self.marks)[::2]:
                del self.marks[mark]

    @property
    def snapshot(self) -> "RecurrentCopy":
        marks = {**self.marks, self.length: self.committed}
        if self._newest_but_one:
            marks[self.length - 1] = self._newest_but_one
        if self._prompt_tokens and not self._takes_back:
            marks = {mark: states for mark, states in marks.items() if mark <= self._prompt_tokens}
        return RecurrentCopy(marks)

    def copy(self, count: int) -> "RecurrentCopy":
        return RecurrentCopy({mark: states for mark, states in self.snapshot.marks.items() if mark <= count})

    def begin_with(self, copy: "RecurrentCopy", count: int) -> None:
        self.committed, self.length = copy.marks[count], count
        self.marks = {mark: states for mark, states in copy.marks.items() if mark <= count}

    def rewind(self, length: int) -> None:
        self.committed, self.length = self.snapshot.marks[length] if length else {}, length
        # Who takes back the newest tokens goes on from there, and not from before.
        earliest = length if self._takes_back else 0
        self.marks = {mark: states for mark, states in self.marks.items() if earliest <= mark <= length}
        self._nodes, self._newest_but_one = [], {}
