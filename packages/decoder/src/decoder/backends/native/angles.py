"""The angles by which queries and keys are turned (rotary position embedding), computed once for each position."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from decoder.backends.forwards import is_changed
from decoder.backends.memory import floats

_FIRST = 512  # positions, for which the table has room to begin with


class Angles(NamedTuple):
    """Cosines and sines of some positions, float32 [T, D]."""

    cosines: torch.Tensor
    sines: torch.Tensor


class AngleTable:
    """What the model's own module gives for every position up to the highest that was asked for.

    A model whose angles depend on the length of the sequence does not come here. A row is looked up in a few
    microseconds. The module takes some ten operators for it, and PyTorch computes cosines and sines of several rows
    with several threads, which then wait for more work on the cores that the library's own threads need, for 8 ms each
    time: with SmolLM2-135M on two cores, verifications took a third more time.

    Args:
        rotary: the module, ``rotary_emb`` of the model; None where nothing is rotated.
        types: by kind of layer the type that the module wants to be told; empty if it wants none.
        kinds: how many kinds of layers there are.
        turned: how many numbers of a head are rotated.
        dtype: of the model's hidden states, to which the module rounds.
    """

    def __init__(self, rotary: Any, types: Sequence[str], kinds: int, turned: int, dtype: torch.dtype):
        self._rotary, self._types, self._kinds, self._turned, self._dtype = rotary, types, kinds, turned, dtype
        self._made_of: list[object] = []
        self._rows: list[Angles] = []

    def at(self, positions: torch.Tensor) -> list[Angles]:
        """By kind of layer the angles of ``positions``, int64 [T] on the CPU."""
        if self._rotary is None:
            nothing = floats(1, 1)  # an address, of which nothing is read
            return [Angles(nothing, nothing)] * self._kinds
        if is_changed(self._rotary):  # something of the user's wants to be called
            found = self._computed(positions)
            return found if self._types else found * self._kinds
        if self._state() != self._made_of:
            self._rows = []
        has, needed = len(self._rows[0].cosines) if self._rows else 0, int(positions.max()) + 1
        if needed > has:
            more = self._computed(torch.arange(has, max(_FIRST, needed, 2 * has), device="cpu"))
            pairs = zip(self._rows, more, strict=True) if self._rows else ()
            self._rows = [Angles(*map(torch.cat, zip(*both, strict=True))) for both in pairs] or more
            self._made_of = self._state()  # LongRoPE's module writes its frequencies whenever it is called
        found = [Angles(*(one.index_select(0, positions) for one in rows)) for rows in self._rows]
        return found if self._types else found * self._kinds

    def _state(self) -> list[object]:
        """The frequencies, and the factors of the angles: what the user changes takes effect with the next pass."""
        made_of: list[object] = [one for one in vars(self._rotary).values() if isinstance(one, float)]
        return made_of + [(id(one), 0 if one.is_inference() else one._version) for one in self._rotary.buffers()]

    def _computed(self, positions: torch.Tensor) -> list[Angles]:
        states = torch.empty(1, 1, 1, dtype=self._dtype, device="cpu")
        if self._types:
            given = [self._rotary(states, positions[None], name) for name in self._types]
        else:
            given = [self._rotary(states, position_ids=positions[None])]
        # In gpt-oss they are given once for both halves of a head.
        wide = [[torch.cat((one, one), -1) if one.shape[-1] < self._turned else one for one in both] for both in given]
        return [Angles(*(one[0].to(torch.float32, copy=True).contiguous() for one in both)) for both in wide]
