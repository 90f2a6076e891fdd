"""What each layer of a model sees and keeps of a text."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch


class LayerKind(NamedTuple):
    """What tokens see in a layer.

    Attributes:
        name: "full", all tokens before them; "window", as many as ``size`` with themselves; "chunk", those in the same
            of the pieces of ``size`` tokens that the text is cut into; "recurrent", the state behind the token before
            alone; "none", nothing.
        size: in tokens; 0 for the others.
    """

    name: str
    size: int = 0

    def __str__(self) -> str:
        return {
            "full": "attention to the whole text",
            "window": f"a sliding window of {self.size} tokens",
            "chunk": f"chunks of {self.size} tokens",
        }.get(self.name, "no attention")

    @property
    def attends(self) -> bool:
        return self.name in ("full", "window", "chunk")

    def first_seen(self, position: int) -> int:
        """The first position that a token at this one sees."""
        if self.name == "window":
            return max(0, position - self.size + 1)
        if self.name == "chunk":
            return position // self.size * self.size
        return self._whole(0)

    def sees(self, queries: Any, keys: torch.Tensor) -> torch.Tensor:
        """Which tokens, at the positions ``queries``, see which at the positions ``keys`` that are not behind them."""
        if self.name == "window":
            return keys > queries - self.size
        if self.name == "chunk":
            return keys // self.size == queries // self.size
        return self._whole(keys <= queries)

    def _whole(self, seen: Any) -> Any:
        """What tokens that attend to the whole text see; NotImplementedError for a kind that nobody has described."""
        if self.name != "full":
            raise NotImplementedError(
                f"what layers of kind {self.name} see is not defined: LayerKind.sees and first_seen"
            )
        return seen


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
        keeping: the layers that keep entries of a text, ascending. Others that attend use what an earlier one keeps.
        mixers: how many recurrent layers there are.

    Attributes:
        members: by kind the layers of it that keep something; of recurrent ones, their numbers among themselves.
        places: by layer that keeps something, how many layers of its kind that do so come before it.
        state_sizes: of recurrent layers, where the native library runs them.
    """

    state_sizes: StateSizes | None = None

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
        """So many layers that attend to the whole text."""
        return cls([FULL] * layers)

    @property
    def attending(self) -> list[int]:
        """The layers that attend to something."""
        return [layer for layer, kind in enumerate(self.kinds) if kind.attends]

    @cached_property
    def full(self) -> tuple[int, ...]:
        """The layers that keep the entries of the whole text."""
        return self.members.get(FULL, ())

    @cached_property
    def beside(self) -> dict[LayerKind, tuple[int, ...]]:
        """By kind the other layers that keep something."""
        return {kind: own for kind, own in self.members.items() if kind != FULL}
