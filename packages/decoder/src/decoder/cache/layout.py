"""What each layer of a model sees and keeps of a sequence."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch


class Reach(NamedTuple):
    """How far tokens see: from ``back`` tokens before their own position, rounded down to a multiple of ``step``.

    A window of 4 is a step of 1 and 3 back, a chunk of 4 a step of 4 and 0 back. A step of 0 stands for the whole
    sequence.
    """

    step: int
    back: int


# By name the kinds of layers that attend to something: in words, and of a kind's size how far they see.
ATTENDING: dict[str, tuple[str, Callable[[int], Reach]]] = {
    "full": ("attention to the whole text", lambda size: Reach(0, 0)),
    "window": ("a sliding window of {} tokens", lambda size: Reach(1, size - 1)),
    "chunk": ("chunks of {} tokens", lambda size: Reach(size, 0)),
}


class LayerKind(NamedTuple):
    """What tokens see in a layer.

    Attributes:
        name: one of `ATTENDING`; "recurrent", the state behind the token before alone; "none", nothing.
        size: in tokens; 0 for the others.
    """

    name: str
    size: int = 0

    def __str__(self) -> str:
        return ATTENDING[self.name][0].format(self.size) if self.attends else "no attention"

    @property
    def attends(self) -> bool:
        return self.name in ATTENDING

    @property
    def reach(self) -> Reach:
        """How far tokens see, where they attend to something."""
        return ATTENDING[self.name][1](self.size)

    def first_seen(self, position: int) -> int:
        """The first position that a token at this one sees."""
        step, back = self.reach
        return max(0, position // step * step - back) if step else 0

    def sees(self, queries: Any, keys: torch.Tensor) -> torch.Tensor:
        """Which tokens, at the positions ``queries``, see which at the positions ``keys`` that are not behind them."""
        step, back = self.reach
        return keys >= queries // step * step - back if step else keys <= queries


FULL = LayerKind("full")
RECURRENT = LayerKind("recurrent")
NONE = LayerKind("none")


class StateSizes(NamedTuple):
    """How many recurrent layers a model has, and how many float32 numbers the state of one has and a token's inputs."""

    mixers: int
    state: int
    inputs: int


class Layout:
    """The layers of a model.

    Args:
        kinds: by layer its kind; layers that attend to something may be recurrent as well.
        keeping: the layers that keep entries of a sequence, ascending. Others that attend use what an earlier one
            keeps.
        mixers: how many recurrent layers there are.

    Attributes:
        members: by kind the layers of it that keep something; of recurrent ones, their numbers among themselves.
        places: by layer that keeps something, how many layers of its kind that do so come before it.
        state_sizes: of recurrent layers, where the native library runs them.
        side_by_side: whether what a layer keeps in place of a token's key and value are parts of one row.
    """

    state_sizes: StateSizes | None = None
    side_by_side: bool = False

    def __init__(self, kinds: Sequence[LayerKind], keeping: Sequence[int] | None = None, mixers: int = 0):
        self.kinds = tuple(kinds)
        self.keeping = tuple(self.attending if keeping is None else keeping)
        self.members: dict[LayerKind, tuple[int, ...]] = {
            kind: tuple(layer for layer in self.keeping if self.kinds[layer] == kind)
            for kind in dict.fromkeys(self.kinds[layer] for layer in self.keeping)
        }
        self.places = {layer: place for own in self.members.values() for place, layer in enumerate(own)}
        if mixers:
            self.members[RECURRENT] = tuple(range(mixers))

    @classmethod
    def of_full(cls, layers: int) -> "Layout":
        """So many layers that attend to the whole sequence."""
        return cls([FULL] * layers)

    @property
    def attending(self) -> list[int]:
        """The layers that attend to something."""
        return [layer for layer, kind in enumerate(self.kinds) if kind.attends]

    @cached_property
    def full(self) -> tuple[int, ...]:
        """The layers that keep the entries of the whole sequence."""
        return self.members.get(FULL, ())

    @cached_property
    def beside(self) -> dict[LayerKind, tuple[int, ...]]:
        """By kind the other layers that keep something."""
        return {kind: own for kind, own in self.members.items() if kind != FULL}
