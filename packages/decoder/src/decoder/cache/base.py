"""What all caches share: one buffer of keys and one of values for all layers, and room for a pass to write in."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from transformers import Cache

from decoder.cache.blocks import Block, Blocks
from decoder.cache.pool import BufferPool, Buffers
from decoder.kernels.bitwise_attention import empty_transposed, ends_in_one_softmax
from decoder.kernels.cuda_graphs import FixedPass
from decoder.kernels.packed_linear import under_autocast

_ZEROED_AT_ONCE = 256


class LayeredCache(Cache, ABC):
    """Keys and values [layers, batch, KV heads, slots, head size]; a pass writes its pairs behind those that stand.

    All layers share a buffer, so that what a step commits moves in one operation and not in one per layer.

    Where passes have fixed shapes (on CUDA), ``kv_length`` holds the number of pairs that stand, int64 [1] in device
    memory: a recorded pass reads there where to write and how far to look, and is handed whole buffers. Elsewhere it
    is None, and passes are handed views of what is filled; or, where attention is by position, whole buffers, with
    ``spare`` slots of finite numbers behind what is filled.

    Attributes:
        keys, values: the buffers, empty before the first pass.
        kv_length: see above.
        passes: the passes of fixed shape over these buffers, which go with them.
        pool: where buffers come from and go back to when the cache goes; None where no passes over it are recorded, so
            that buffers are freed with the cache.
        lender: the pool that other caches of the text may have buffers from.
        transposed: whether new buffers for keys have the slots of each number beside each other, where one softmax
            covers a text of that length; see `kernels.bitwise_attention.Rule`.
        beside: where the buffers are a part of larger ones, beside those of other texts; see `cache.blocks`.
        block, place: these larger buffers, and which part of them; None and 0 where there are none.

    Args:
        capacity: slots, pairs per layer and KV head.
    """

    purpose: ClassVar[str] = "text"
    recordable: ClassVar[bool] = True
    """Whether passes over it may be recorded, and its slots be written to by others than `update`."""
    pool: BufferPool | None = None
    lender: BufferPool | None = None
    pool_generation = 0
    transposed = False
    beside: Blocks | None = None
    block: Block | None = None
    place = 0

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.capacity = capacity
        self.keys = self.values = torch.empty(0)
        self.kv_length: torch.Tensor | None = None
        self.passes: dict[tuple, FixedPass] = {}
        self.spare = 0
        self._finite = 0  # slots that hold numbers, with the spare ones
        self._layers = 1
        self._of_layer: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._written: torch.Tensor | None = None
        # The slots that the current pass writes: the first one and their number, and views of them in each layer.
        self._span: tuple[int, int] | None = None
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __del__(self):
        # However a text ends (done, closed, cancelled, failed), its caches go, and at once: nothing refers to them.
        if self.pool is not None:
            self.pool.give_back(self)
        self._leave_block()

    def prepare(self, layers: int, pool: BufferPool | None = None, spare: int = 0, transposed: bool = False) -> None:
        """Tell the cache how many layers it is to hold, and whose buffers it may have where passes have fixed shapes.

        Under autocast it gets none: it makes its own, of the dtype that autocast chooses.

        Args:
            spare: slots behind the last one that passes may look at.
            transposed: as the attribute.
        """
        self._layers, self.lender, self.transposed = layers, pool, transposed
        if spare > self.spare:
            self.spare = spare
            if len(self.keys):
                self.enlarge(self.capacity, self.get_seq_length())
        if pool is not None and self.kv_length is None:
            if not under_autocast() and not len(self.keys):
                pool.lend(self)
            if self.kv_length is None:
                self.kv_length = torch.zeros(1, dtype=torch.long, device=pool.device)

    def buffers(self) -> Buffers:
        """The buffers with what was recorded over them; passes that ran once, as those of a prompt do, are left out."""
        passes = {kind: fixed for kind, fixed in self.passes.items() if fixed.lasting}
        return Buffers(self.capacity, self.keys, self.values, self.kv_length, passes)

    def take_over(self, buffers: Buffers) -> None:
        """Use another cache's buffers in place of new ones."""
        self.capacity, self.keys, self.values, self.kv_length, self.passes = buffers
        self._of_layer = list(zip(self.keys, self.values, strict=True))

    def begin(self, count: int, padding: int = 0) -> None:
        """A pass over ``count`` tokens is to come, the last of which are ``padding``.

        Raises:
            ValueError: there is no room for the others.
        """
        self._make_room(count, padding)
        if self.kv_length is not None:
            # A number in the launch of a kernel: the host does not wait.
            self.kv_length.fill_(self.get_seq_length())

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write a layer's new pairs [B, G, T, D]; returns what to attend to, the new pairs last.

        That is [B, G, kv_length + T, D], or with fixed shapes the layer's whole buffers.
        """
        count = key_states.shape[2]
        for slots, states in zip(
            self.slots_for(key_states, value_states, layer_idx), (key_states, value_states), strict=True
        ):
            if self.kv_length is None:
                slots.copy_(states)
            else:
                slots.index_copy_(2, self._written, states.to(slots.dtype))
        return self.seen_by(count, layer_idx)

    def make_ready(self, count: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See that there are buffers for pairs like these [B, G, any, D], with room for ``count`` more."""
        self._make_room(count)
        self._allocate(key, value)

    def slots_for(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer's new pairs go, for which room is made: [B, G, T, D], with fixed shapes whole buffers."""
        count = key_states.shape[2]
        self.make_ready(count, key_states, value_states)
        if self.kv_length is not None:
            if not layer_idx:
                self._written = self.kv_length + torch.arange(count, device=self.kv_length.device)
            return self._of_layer[layer_idx]
        span = self.get_seq_length(), count
        if span != self._span:
            # Views of all layers are made at once, because calls are most of a small model's step.
            end = sum(span)
            if self.spare:
                self.make_finite(end + self.spare)
            slots = (buffer.narrow(3, *span).unbind() for buffer in (self.keys, self.values))
            self._span, self._slots = span, list(zip(*slots, strict=True))
        return self._slots[layer_idx]

    def seen_by(self, count: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``count`` new tokens attend to once they are written, as `update` gives it."""
        key, value = self._of_layer[layer_idx]
        if self.kv_length is not None or self.spare:
            return key, value
        end = self.get_seq_length() + count
        return key[:, :, :end], value[:, :, :end]

    def at(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [layers, B, G, n, D] of the pairs in the slots ``index``, int64 [n] on the model's device."""
        return self.keys.index_select(3, index), self.values.index_select(3, index)

    def make_finite(self, end: int) -> None:
        """See that the slots before ``end``, as far as there are any, hold finite numbers.

        Zeros are written where nothing ever was: not in all slots at once, since a buffer may be large.
        """
        slots = self.keys.shape[3]
        if self._finite < min(end, slots):
            start, self._finite = self._finite, min(end + _ZEROED_AT_ONCE, slots)
            self.keys[:, :, :, start : self._finite] = 0
            self.values[:, :, :, start : self._finite] = 0

    def allocate_as(self, other: "LayeredCache") -> None:
        """Make the buffers, unless they are there, for pairs like those of ``other``."""
        if not len(self.keys):
            self.prepare(len(other.keys), other.lender)
            self._allocate(other.keys[0], other.values[0])

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if not len(self.keys):
            if not self._enter_block(key, value, self._layers):
                self.keys = self._buffer(key, self._layers, self.transposed)
                self.values = self._buffer(value, self._layers)
            self._of_layer = list(zip(self.keys, self.values, strict=True))

    def _enter_block(self, key: torch.Tensor, value: torch.Tensor, layers: int) -> bool:
        """Take a part of larger buffers, if there are any for pairs like these."""
        found = None if self.beside is None else self.beside.enter(key, value, layers, self.capacity + self.spare)
        if found is None:
            return False
        self.block, self.place = found
        own = slice(self.place, self.place + 1)
        self.keys, self.values = self.block.keys[:, own], self.block.values[:, own]
        # An ended text may have left infinities there.
        self.capacity, self._finite = self.block.slots - self.spare, 0
        return True

    def _leave_block(self) -> None:
        if self.block is not None:
            self.block.free.add(self.place)
            self.block.left.add(self.place)
            self.block = self.beside = None

    def enlarge(self, capacity: int, filled: int) -> None:
        """Move the first ``filled`` pairs to buffers of ``capacity`` slots."""
        self.capacity, self._finite = capacity, filled
        # Recorded passes know the old buffers. Of old and new ones no more are held at a time than need be.
        self.passes.clear()
        self._of_layer.clear()
        self._slots, self._span = [], None
        for name, transposed in (("keys", self.transposed), ("values", False)):
            old = getattr(self, name)
            if len(old):
                new = self._buffer(old[0], len(old), transposed)
                new[:, :, :, :filled] = old[:, :, :, :filled]
                setattr(self, name, new)
        # The larger buffers are its own.
        self._leave_block()
        self._of_layer = list(zip(self.keys, self.values, strict=True))

    def _buffer(self, like: torch.Tensor, layers: int, transposed: bool = False) -> torch.Tensor:
        batch, groups, _, dim = like.shape
        sizes = layers, batch, groups, self.capacity + self.spare, dim
        if transposed and ends_in_one_softmax(self.capacity, like.dtype):
            return empty_transposed(like, *sizes)
        return like.new_empty(sizes)

    @abstractmethod
    def _make_room(self, count: int, padding: int = 0) -> None:
        """See that ``count`` more pairs, with ``padding``, find room behind those that stand, or raise ValueError."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: 2 x layers x batch x KV heads x slots x head size x bytes per number."""
        return self.keys.nbytes + self.values.nbytes
