"""What recurrent layers of the native library keep of a sequence: a state now and then, and the inputs of tokens behind
it.

A state takes megabytes, and the inputs of a token a fiftieth of that. So no state is written behind a token that may
not stay: the next pass runs the inputs of the tokens that did stay again, from the last state that was written, which
it reads in any case. Keeping a path is choosing inputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from decoder.backends.memory import floats
from decoder.cache.layout import RECURRENT, Layout, StateSizes
from decoder.cache.recurrent import NodeStates, RecurrentStates

_LONG_CHAIN = (
    16  # tokens of a sequence that are committed together, behind all but the last of which a state is written
)
_STRETCHES = 17  # that are kept of a sequence
_TAKEN_BACK, _STRETCHES_BACK = 16, 8  # tokens of a stretch, where some are taken back, and how many stretches are kept


class Replay(NamedTuple):
    """What a pass does with a sequence.

    Attributes:
        before: the state that it begins from, [mixers, state].
        after: where that behind the first ``folded`` tokens goes; None where none is written.
        inputs: of the tokens behind ``before``, [mixers, slots, numbers].
        replayed: the slots of those that are run again, in order.
        parents: of new tokens, -1 for those behind all that are run again.
        slots: where the inputs of new tokens go; -1 nowhere.
    """

    before: torch.Tensor
    after: torch.Tensor | None
    inputs: torch.Tensor
    replayed: Sequence[int]
    folded: int
    parents: Sequence[int]
    slots: Sequence[int]


class Stretch(NamedTuple):
    """The state behind a sequence's first ``length`` tokens, [mixers, state], and the inputs of those behind them.

    ``inputs`` are [mixers, tokens, numbers]. Neither ever changes.
    """

    length: int
    state: torch.Tensor
    inputs: torch.Tensor

    @property
    def end(self) -> int:
        return self.length + self.inputs.shape[1]

    def first(self, count: int) -> "Stretch":
        """What there is of a sequence's first ``count`` tokens."""
        return self._replace(inputs=self.inputs[:, : count - self.length])


class ReplayedCopy(NamedTuple):
    """Stretches of a sequence, in order."""

    stretches: Sequence[Stretch]

    @property
    def nbytes(self) -> int:
        return sum(one.state.nbytes + one.inputs.nbytes for one in self.stretches)

    def goes_back_to(self, length: int) -> int:
        """As `RecurrentStates.goes_back_to`."""
        return max((min(length, one.end) for one in self.stretches if one.length <= length), default=0)

    def at(self, position: int) -> list[torch.Tensor]:
        """Keys and values of a token: none."""
        return []

    def behind(self, count: int) -> Stretch:
        """What leads to the state behind a sequence's first ``count`` tokens, to which it can go back."""
        return next(one for one in self.stretches if one.length <= count <= one.end).first(count)


class ReplayedStates(RecurrentStates):
    """The states of all mixers of a model behind the tokens of one sequence, for the native library.

    Args:
        sizes: of the states.
        takes_back: whether tokens are committed that may have to be taken back.

    Attributes:
        replay: what the pass that was begun last does.
    """

    replay: Replay

    def __init__(self, sizes: StateSizes, takes_back: bool = False):
        super().__init__()
        self._sizes, self._takes_back = sizes, takes_back
        self._stretches: list[Stretch] = []
        self._inputs = floats(sizes.mixers, 0, sizes.inputs)
        self._spare: torch.Tensor | None = None  # for the next state, if nothing refers to it
        self._begin_at(self._nothing())

    def _nothing(self) -> Stretch:
        state = floats(self._sizes.mixers, self._sizes.state).zero_()
        return Stretch(0, state, floats(self._sizes.mixers, 0, self._sizes.inputs))

    def _begin_at(self, stretch: Stretch) -> None:
        """Go on behind the last token of a stretch."""
        self._first, self._state, self._is_shared = stretch.length, stretch.state, True
        count = stretch.inputs.shape[1]
        self._pending = list(range(count))  # where the inputs of the tokens behind the state stand
        self._nodes: list[int] = []  # and those of the last pass, behind tokens that are held
        self._make_inputs(count)
        self._inputs[:, :count] = stretch.inputs
        self._ahead: tuple[torch.Tensor, int] | None = None  # the state behind so many of them, of a long chain
        self._folds: torch.Tensor | None = None  # where the state behind those that are pending is written
        self.length = stretch.end

    def _make_inputs(self, count: int) -> None:
        """See that there is room for the inputs of so many tokens."""
        if self._inputs.shape[1] < count:
            old, self._inputs = self._inputs, floats(self._sizes.mixers, count, self._sizes.inputs)
            self._inputs[:, : old.shape[1]] = old

    @property
    def nbytes(self) -> int:
        states = [self._state, self._inputs, *(self._ahead or ())[:1], *(() if self._spare is None else (self._spare,))]
        states += [part for one in self._stretches for part in (one.state, one.inputs)]
        return sum({one.data_ptr(): one.nbytes for one in states}.values())

    def begin(self, parents: Sequence[int], held: int = 0, stays: bool = False) -> None:
        """A pass is to come over nodes with these ``parents``, -1 for those behind the sequence.

        Args:
            held: how many nodes of the passes before are tokens that stand between the sequence and these nodes.
            stays: whether the nodes are a chain of which all are committed, or none.
        """
        del self._nodes[held:]
        before, first = self._state, 0
        if self._ahead is not None and held > self._ahead[1]:
            before, first = self._ahead
        replayed = [*(() if first else self._pending), *self._nodes[first:]]
        if len(self._nodes) < held or -1 in replayed:
            raise ValueError(f"{held} drafted tokens are held, and not the states behind all of them")
        if not held:
            self._give_back()
        is_long = stays and not held and len(parents) > _LONG_CHAIN
        few = self._takes_back and len(self._pending) < _TAKEN_BACK
        folded = len(self._pending) + len(parents) - 1 if is_long else 0 if first or few else len(self._pending)
        slots = self._new_slots(1 if is_long else len(parents))
        slots = [-1] * (len(parents) - len(slots)) + slots
        self._nodes += slots
        after = self._room() if folded else None
        self._ahead = (after, len(parents) - 1) if is_long and after is not None else self._ahead if held else None
        self._folds = after if folded and not is_long else None
        self.replay = Replay(before, after, self._inputs, replayed, folded, parents, slots)

    def _new_slots(self, count: int) -> list[int]:
        """Where inputs of so many nodes can be kept."""
        taken = {*self._pending, *self._nodes}
        self._make_inputs(len(taken) + count)
        return [slot for slot in range(self._inputs.shape[1]) if slot not in taken][:count]

    def _room(self) -> torch.Tensor:
        state, self._spare = self._spare, None
        return floats(self._sizes.mixers, self._sizes.state) if state is None else state

    def _give_back(self) -> None:
        """Forget the state that a long chain has led to, which was not committed."""
        if self._ahead is not None:
            self._spare, self._ahead = self._ahead[0], None

    def finish(self) -> None:
        """The pass that was begun has run."""
        if self._folds is None:
            return
        if self._takes_back:
            self._keep_stretch(_STRETCHES_BACK)
        self._first += len(self._pending)
        self._go_on(self._folds, [])
        self._folds = None

    def _go_on(self, state: torch.Tensor, pending: list[int]) -> None:
        """From another state, and the inputs of tokens behind it."""
        if not self._is_shared:
            self._spare = self._state
        self._state, self._is_shared, self._pending = state, False, pending

    def keep(self, path: Sequence[int]) -> None:
        if not path:
            return
        slots = [self._nodes[node] if node < len(self._nodes) else -1 for node in path]
        if self._ahead is not None and len(path) > self._ahead[1]:
            state, count = self._ahead
            self._first = self.length + count
            self._go_on(state, slots[count:])
            self._ahead = None
        elif -1 in slots:
            raise ValueError(f"the states behind node {path[-1]} of the last pass are not there")
        else:
            self._pending += slots
        self._give_back()
        self._nodes = []
        self.length += len(path)

    def _now(self) -> Stretch:
        """The last state, which is not written over from now on, and the inputs of the tokens behind it."""
        self._is_shared = True
        return Stretch(self._first, self._state, self._inputs[:, self._pending])

    def _keep_stretch(self, most: int) -> None:
        self._stretches = [one for one in self._stretches if one.length < self._first]
        self._stretches.append(self._now())
        if self._takes_back:
            del self._stretches[:-most]
        elif len(self._stretches) > most:
            # Of a long sequence they stand twice as far from each other.
            del self._stretches[::2]

    def mark(self) -> None:
        self._keep_stretch(_STRETCHES)

    @property
    def snapshot(self) -> ReplayedCopy:
        """The stretches to which the sequence can go back, itself last."""
        return ReplayedCopy([one for one in self._stretches if one.length < self._first] + [self._now()])

    def goes_back_to(self, length: int) -> int:
        if length >= self._first:
            return min(length, self.length)
        return ReplayedCopy(self._stretches).goes_back_to(length)

    def copy(self, count: int) -> ReplayedCopy:
        return ReplayedCopy([one.first(min(count, one.end)) for one in self.snapshot.stretches if one.length <= count])

    def begin_with(self, copy: ReplayedCopy, count: int) -> None:
        self._begin_at(copy.behind(count))
        self._stretches = [one for one in copy.stretches if one.length < self._first]

    def rewind(self, length: int) -> None:
        self._give_back()
        self._nodes = []
        if not length:
            self._begin_at(self._nothing())
        elif length >= self._first:
            del self._pending[length - self._first :]
            self.length = length
        else:
            self._begin_at(ReplayedCopy(self._stretches).behind(length))
        self._stretches = [one for one in self._stretches if one.length <= length]


def new_states(layout: Layout, prompt_tokens: int, takes_back: bool = False) -> RecurrentStates:
    """Of the mixers of a layout at the beginning of a sequence, in the form of those who run its passes."""
    if layout.state_sizes is not None:
        return ReplayedStates(layout.state_sizes, takes_back)
    return NodeStates(len(layout.members[RECURRENT]), prompt_tokens, takes_back)
