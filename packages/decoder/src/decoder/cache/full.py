"""The full KV cache: keys and values of prompt, output and the tree under verification."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from decoder.backends.base import AttentionShape
from decoder.backends.transfers import upload
from decoder.cache.base import LayeredCache
from decoder.cache.form import CacheForm
from decoder.cache.layout import FULL, LayerKind
from decoder.cache.recurrent import RecurrentCopy, RecurrentStates
from decoder.cache.replayed import ReplayedCopy
from decoder.cache.window import WindowCopy, WindowState
from decoder.work import Progress, Work

_SMALLEST_GROWTH = 1024
_COPIED_AT_ONCE = 2**25  # bytes
_PART = 16  # tokens that take about as long to run as so many bytes to copy


class Copies(NamedTuple):
    """What a cache holds of the beginning of a sequence, copied.

    Attributes:
        parts: as `FullCache.parts`, of the sequence's first tokens.
        beside: of each of `FullCache.states`.
    """

    parts: tuple[torch.Tensor, ...]
    beside: tuple[WindowCopy | RecurrentCopy | ReplayedCopy, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + sum(own.nbytes for own in self.beside)

    def goes_back_to(self, length: int) -> int:
        """The longest beginning with at most ``length`` tokens that a sequence can begin with; 0 is none."""
        return _agreed(length, self.beside)


class FullCache(LayeredCache):
    """Keys and values of all committed tokens.

    A forward pass writes the entries of its T tokens behind the committed ones (transformers calls
    `LayeredCache.update`). `keep` then commits those of the accepted nodes, and the next pass writes over the rest.
    Nothing is ever concatenated.

    Args:
        capacity: how many positions it holds: those of prompt, output and the widest tree.
        growable: whether a full buffer is replaced by one half as long again, for sequences whose length is open. A
            sequence of any length then copies each entry twice on average. Otherwise more positions are an error.
        takes_back: whether tokens are committed that may have to be taken back, as those of a draft model are: then the
            states of recurrent layers are kept behind each pass.

    Attributes:
        length: how many tokens are committed.
        form: how entries are kept.
    """

    form = CacheForm()

    def __init__(self, capacity: int, growable: bool = False, takes_back: bool = False):
        super().__init__(capacity)
        self.growable, self.takes_back = growable, takes_back
        self.length = 0

    def _window(self, kind: LayerKind, layers: int) -> WindowState:
        most = None if self.growable else self.capacity
        return WindowState(kind, layers, most, self.form.rounded if self.form.kv_dtype else None)

    def _make_room(self, count: int) -> None:
        end = self.length + count
        if end <= self.capacity:
            return
        if self.growable:
            self.enlarge(max(end, self.next_capacity), self.length)
        else:
            raise ValueError(f"the cache holds {self.capacity} positions; {end} were asked for")

    @property
    def next_capacity(self) -> int:
        """How many positions it holds when it has grown once more, if it may grow."""
        return self.capacity + self.growable * max(_SMALLEST_GROWTH, self.capacity // 2)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What is kept, each [layers, B, G, slots, ...]: keys and values, or what stands for them."""
        return self.keys, self.values

    def decoded(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., D], on the model's device, of `parts` of this cache or of some of their slots."""
        keys, values = parts
        return keys, values

    def span(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [layers, B, G, n, D] of the tokens from ``start`` to ``end``, to be read at once."""
        return self.decoded([part[:, :, :, start:end] for part in self.parts])

    def at(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = index.to(self.parts[0].device)
        return self.decoded([part.index_select(3, index) for part in self.parts])

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, G, length, D] of all committed tokens in a layer that attends to the whole sequence.

        They may be looked at until the next call or pass.
        """
        key, value = self._of_layer[self.layout.places[layer_idx]]
        return key[:, :, : self.length], value[:, :, : self.length]

    def beginning(self, count: int, keeping: Collection[int]) -> list[torch.Tensor]:
        """Keys and values [layers, B, G, n, D], by kind, that some layers have of the first ``count`` tokens."""
        found = []
        for kind, layers in self.layout.members.items():
            held = self if kind == FULL else self.states[kind]
            if isinstance(held, RecurrentStates):
                continue
            places = [place for place, layer in enumerate(layers) if layer in keeping]
            found += [one[places, :, :, :count] for one in (held.keys, held.values) if places]
        return found

    def entry_at(self, position: int, copies: Copies | None = None) -> list[torch.Tensor]:
        """Keys and values [layers, B, G, 1, D] of a token by kind of layer, its own or those in ``copies``."""
        one = slice(position, position + 1)
        parts = self.parts if copies is None else copies.parts
        beside = [state.snapshot for state in self.states.values()] if copies is None else copies.beside
        of_full = self.decoded([part[:, :, :, one] for part in parts]) if self.layout.full else ()
        return [*of_full, *(pair for own in beside for pair in own.at(position))]

    def copying(self, count: int) -> Work[Copies]:
        """Copies of what is kept of the first ``count`` tokens, to which it can go back, for `beginning_with`."""
        own = [part[:, :, :, :count] for part in self.parts if self.layout.full]
        copies = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in own)
        beside = tuple(state.copy(count) for state in self.states.values())
        yield from _copy(own, copies)
        return Copies(copies, beside)

    def beginning_with(self, copies: Copies, count: int, shape: AttentionShape, device: torch.device) -> Work[None]:
        """Commit the sequence's first tokens to the empty cache, which stays empty until all are there.

        Args:
            copies: what `copying` gave for a cache of the same form.
            count: how many tokens, to which the copies can go back.
            shape: of the layers that attend to the whole sequence.
            device: the model's.
        """
        parts = [part[:, :, :, :count] for part in copies.parts]
        self._make_room(count)
        if parts:
            batch = parts[0].shape[1]
            self._allocate(
                *(
                    torch.empty(batch, shape.kv_heads, 0, dim, dtype=shape.dtype, device=device)
                    for dim in (shape.dim, shape.value_dim)
                )
            )
            yield from _copy(parts, [own[:, :, :, :count] for own in self.parts])
        for state, copy in zip(self.states.values(), copies.beside, strict=True):
            state.begin_with(copy, count)  # type: ignore[arg-type]
        self.length = count

    def keep(self, path: Sequence[int]) -> None:
        """Commit the nodes ``path`` (ascending) of the last pass: their entries move up behind the committed ones."""
        # The first nodes of the path may be where they belong already, and need not move.
        still = next((index for index, node in enumerate(path) if node != index), len(path))
        if still < len(path) and len(self.keys):
            self._move([self.length + node for node in path[still:]], self.length + still)
        for state in self.states.values():
            state.keep(path)
        self.length += len(path)

    def rewind(self, length: int) -> int:
        """Take back the newest tokens, so that at most ``length`` stay; returns how many do.

        They may be fewer: a window may have given up what the next token would see, and then the sequence begins anew.
        """
        self.length = self.goes_back_to(length)
        for state in self.states.values():
            state.rewind(self.length)
        return self.length

    def goes_back_to(self, length: int) -> int:
        """The longest of the sequence's beginnings with at most ``length`` tokens that it can go back to."""
        return _agreed(length, list(self.states.values()))

    def mark(self) -> None:
        """See that the sequence can go back to where it is now, as far as that costs something only for some layers."""
        if (recurrent := self.recurrent) is not None:
            recurrent.mark()

    def _move(self, slots: Sequence[int], start: int) -> None:
        """Copy the entries in ``slots`` to the slots from ``start`` on."""
        if self.parts[0].is_cpu:
            # One by one, since PyTorch copies many numbers with threads, which afterwards wait on the cores that the
            # library's own need. A slot that is written to has been read.
            for part in self.parts:
                for slot, source in enumerate(slots, start):
                    part[:, :, :, slot] = part[:, :, :, source]
            return
        index = upload(slots, self.parts[0].device)
        for part in self.parts:
            part[:, :, :, start : start + len(slots)] = part.index_select(3, index)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _agreed(
    length: int, states: Sequence[WindowState | WindowCopy | RecurrentStates | RecurrentCopy | ReplayedCopy]
) -> int:
    """The greatest length of at most ``length`` tokens that all ``states`` can go back to."""
    asked = None
    while asked != length:
        asked = length
        for state in states:
            length = state.goes_back_to(length)
    return length


def _copy(sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> Work[None]:
    """Copy tensors [layers, ...] to others, some layers at a time."""
    layers = len(sources[0]) if sources else 0
    step = max(1, layers * _COPIED_AT_ONCE // max(1, sum(part.nbytes for part in sources)))
    for start in range(0, layers, step):
        for source, copy in zip(sources, copies, strict=True):
            copy[start : start + step] = source[start : start + step]
        if start + step < layers:
            yield Progress(_PART, _PART * -(-(layers - start - step) // step))
