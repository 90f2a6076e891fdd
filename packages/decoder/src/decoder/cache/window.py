"""Keys and values of layers in which tokens see a window or a chunk of the sequence: those that can still be seen."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from decoder.backends.transfers import upload
from decoder.cache.layout import LayerKind

_BACK = 64  # tokens that can be taken back at any time
_AHEAD = 256  # slots at least for what comes between two moves

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""What a cache makes of vectors [..., D] before anything attends to them."""


class WindowCopy(NamedTuple):
    """Entries of some layers of a kind: keys and values [layers, B, G, n, D] of tokens from position ``first`` on."""

    kind: LayerKind
    first: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def goes_back_to(self, length: int) -> int:
        """As `WindowState.goes_back_to`."""
        return length if self.first <= self.kind.first_seen(length) else 0

    def at(self, position: int) -> list[torch.Tensor]:
        """Key and value [layers, B, G, 1, D] of a token."""
        own = slice(position - self.first, position - self.first + 1)
        return [one[:, :, :, own] for one in (self.keys, self.values)]


class WindowState:
    """Entries of the layers of one kind, in the order of the sequence, in buffers [layers, B, G, slots, D].

    A pass writes behind what stands. Where the buffers are full, what no later token sees is given up, and the rest
    moves to their beginning, so that they stay as large however long the sequence becomes.

    Args:
        kind: what tokens see.
        layers: how many layers there are.
        most: how many tokens the sequence ever has; None if that is open.
        rounding: applied to keys and values; None keeps them as they are.

    Attributes:
        length: how many tokens are committed.
        first: the position of the entry in the first slot.
        rounding: see above.
    """

    def __init__(self, kind: LayerKind, layers: int, most: int | None = None, rounding: Rounding | None = None):
        self.kind, self._layers, self._most, self.rounding = kind, layers, most, rounding
        self.keys = self.values = torch.empty(0)
        self.length = self.first = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def make_room(self, count: int) -> None:
        """See that ``count`` entries find room behind the committed ones."""
        if not len(self.keys) or self.length - self.first + count <= self.keys.shape[3]:
            return
        # What was given up for a longer text, from which this one went back, is not there.
        first = max(self.first, self.kind.first_seen(max(0, self.length - _BACK)))
        start, self.first = first - self.first, first
        slots = max(self.keys.shape[3], window_slots(self.kind, count, self._most), self.length - first + count)
        kept = slice(start, start + self.length - first)
        self.keys, self.values = (self._moved(one, kept, slots) for one in (self.keys, self.values))

    def make_ready(self, count: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """`make_room`, in buffers for entries like these [B, G, any, D]."""
        if not len(self.keys):
            slots = window_slots(self.kind, count, self._most)
            self.keys, self.values = (
                one.new_empty(self._layers, *one.shape[:2], slots, one.shape[3]) for one in (key, value)
            )
        self.make_room(count)

    @staticmethod
    def _moved(buffer: torch.Tensor, kept: slice, slots: int) -> torch.Tensor:
        """A buffer of so many slots, in the first of which stand those that are kept."""
        old = buffer[:, :, :, kept]
        if slots == buffer.shape[3]:
            buffer[:, :, :, : old.shape[3]] = old.clone()
            return buffer
        new = buffer.new_empty(*buffer.shape[:3], slots, buffer.shape[4])
        new[:, :, :, : old.shape[3]] = old
        return new

    def update(
        self, key: torch.Tensor, value: torch.Tensor, place: int, held: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new entries [B, G, T, D], behind ``held`` ones that are not committed.

        Returns:
            What the new tokens attend to, in the order of the sequence, themselves last: [B, G, n, D].
        """
        count = key.shape[2]
        if not place:  # of a pass whose cache nobody has told that it comes
            self.make_ready(held + count, key, value)
        start = self.length - self.first + held
        seen = max(0, self.kind.first_seen(self.length + held) - self.first)
        seen_by = []
        for buffer, states in ((self.keys[place], key), (self.values[place], value)):
            buffer[:, :, start : start + count] = states if self.rounding is None else self.rounding(states)
            seen_by.append(buffer[:, :, seen : start + count])
        return seen_by[0], seen_by[1]

    def keep(self, path: Sequence[int]) -> None:
        """Commit the nodes ``path`` (ascending) of the last pass."""
        still = next((index for index, node in enumerate(path) if node != index), len(path))
        if still < len(path):
            behind = self.length - self.first
            index = upload([behind + node for node in path[still:]], self.keys.device)
            to = slice(behind + still, behind + len(path))
            for buffer in (self.keys, self.values):
                buffer[:, :, :, to] = buffer.index_select(3, index)
        self.length += len(path)

    @property
    def snapshot(self) -> WindowCopy:
        """The committed ones, not copied."""
        own = slice(self.length - self.first)
        return WindowCopy(self.kind, self.first, self.keys[:, :, :, own], self.values[:, :, :, own])

    def goes_back_to(self, length: int) -> int:
        """The longest of the sequence's beginnings with at most ``length`` tokens that it can go back to."""
        return self.snapshot.goes_back_to(length) if len(self.keys) else length

    def copy(self, count: int) -> WindowCopy:
        """A copy of what stands of the sequence's first ``count`` tokens, to which it can go back."""
        own = slice(count - self.first)
        keys, values = (one[:, :, :, own].clone() for one in (self.keys, self.values))
        return WindowCopy(self.kind, self.first, keys, values)

    def begin_with(self, copy: WindowCopy, count: int) -> None:
        """Begin, while empty, with the sequence's first ``count`` tokens, to which the copy can go back."""
        self.first = max(copy.first, self.kind.first_seen(max(0, count - _BACK)))
        own = slice(self.first - copy.first, count - copy.first)
        slots = max(count - self.first, window_slots(self.kind, 1, self._most))
        old = copy.keys[:, :, :, own], copy.values[:, :, :, own]
        self.keys, self.values = (one.new_empty(*one.shape[:3], slots, one.shape[4]) for one in old)
        for buffer, entries in zip((self.keys, self.values), old, strict=True):
            buffer[:, :, :, : count - self.first] = entries
        self.length = count

    def rewind(self, length: int) -> None:
        """Go back to a length that `goes_back_to` gave."""
        self.length, self.first = length, self.first if length else 0


def window_slots(kind: LayerKind, count: int, most: int | None) -> int:
    """Slots of a window, for passes over ``count`` tokens of a sequence of at most ``most`` tokens."""
    slots = sum(kind.reach) + _BACK + max(count, _AHEAD)
    return slots if most is None else max(count, min(slots, most))
