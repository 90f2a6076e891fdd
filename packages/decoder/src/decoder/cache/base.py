"""What all caches share: buffers of keys and values for all layers of a kind, and room for a pass to write in."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from transformers import Cache

from decoder.backends import large_pages
from decoder.backends.forwards import under_autocast
from decoder.cache.layout import RECURRENT, LayerKind, Layout
from decoder.cache.pool import BufferPool, Buffers
from decoder.cache.recurrent import RecurrentStates
from decoder.cache.replayed import new_states
from decoder.cache.window import WindowState

if TYPE_CHECKING:
    from decoder.backends.cuda.cuda_graphs import FixedPass


class LayeredCache(Cache, ABC):
    """Keys and values [layers, batch, KV heads, slots, head size]; a pass writes its entries behind those that stand.

    All layers that attend to the whole sequence share a buffer, so that what a step commits moves in one operation and
    not in one per layer. Layers of other kinds have a state for each kind.

    Where passes have fixed shapes (on CUDA), ``kv_length`` holds the number of entries that stand, int64 [1] in device
    memory: a recorded pass reads there where to write and how far to look, and is handed whole buffers. Elsewhere it
    is None, and passes are handed views of what is filled.

    Attributes:
        keys, values: the buffers, empty before the first pass.
        kv_length: see above.
        passes: the passes of fixed shape over these buffers, which go with them.
        pool: where buffers come from and go back to when the cache goes; None where no passes over it are recorded, so
            that buffers are freed with the cache.
        lender: the pool that other caches of the sequence may have buffers from.
        layout: the layers, as `prepare` was told.
        states: by kind, what other layers than those that attend to the whole sequence keep.

    Args:
        capacity: slots, entries per layer and KV head.
    """

    purpose: ClassVar[str] = "text"
    takes_back = False
    """Whether tokens are committed that may have to be taken back."""
    prompt_tokens = 0
    """How many of its first tokens recurrent layers know to be a prompt's; see `mixers.has_two_forms`."""
    recordable: ClassVar[bool] = True
    """Whether passes over it may be recorded, and its slots be written to by others than `update`."""
    pool: BufferPool | None = None
    lender: BufferPool | None = None
    pool_generation = 0

    def __init__(self, capacity: int):
        super().__init__(layers=[])
        self.capacity = capacity
        self.keys = self.values = torch.empty(0)
        self.kv_length: torch.Tensor | None = None
        self.passes: dict[tuple, FixedPass] = {}
        self.layout = Layout.of_full(1)
        self.states: dict[LayerKind, WindowState | RecurrentStates] = {}
        self._of_layer: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._written: torch.Tensor | None = None
        # The slots that the current pass writes: the first one and their number, and views of them in each layer.
        self._span: tuple[int, int] | None = None
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __del__(self):
        # However a sequence ends (done, closed, cancelled, failed), its caches go, and at once: nothing refers to them.
        if self.pool is not None:
            self.pool.give_back(self)

    def prepare(self, layout: Layout, pool: BufferPool | None = None) -> None:
        """Tell the cache which layers it is to hold, and whose buffers it may have where passes have fixed shapes.

        Under autocast it gets none: it makes its own, of the dtype that autocast chooses.
        """
        self.layout, self.lender = layout, pool
        if layout.beside and not self.states:
            self.states = self._new_states()
        if pool is not None and self.kv_length is None:
            if not under_autocast() and not len(self.keys):
                pool.lend(self)
            if self.kv_length is None:
                self.kv_length = torch.zeros(1, dtype=torch.long, device=pool.device)

    def _new_states(self) -> dict[LayerKind, WindowState | RecurrentStates]:
        return {
            kind: new_states(self.layout, self.prompt_tokens, self.takes_back)
            if kind == RECURRENT
            else self._window(kind, len(own))
            for kind, own in self.layout.beside.items()
        }

    def _window(self, kind: LayerKind, layers: int) -> WindowState:
        return WindowState(kind, layers)

    def buffers(self) -> Buffers:
        """The buffers with what was recorded over them; passes that ran once, as those of a prompt do, are left out."""
        passes = {kind: fixed for kind, fixed in self.passes.items() if fixed.lasting}
        return Buffers(self.capacity, self.keys, self.values, self.kv_length, passes)

    def take_over(self, buffers: Buffers) -> None:
        """Use another cache's buffers in place of new ones."""
        self.capacity, self.keys, self.values, self.kv_length, self.passes = buffers
        self._of_layer = list(zip(self.keys, self.values, strict=True))

    def begin(self, count: int) -> None:
        """A pass over ``count`` tokens is to come.

        Raises:
            ValueError: there is no room for them.
        """
        self._make_room(count)
        for state in self.states.values():
            state.make_room(self.held + count)
        if self.kv_length is not None:
            # A number in the launch of a kernel: the host does not wait.
            self.kv_length.fill_(self.get_seq_length())

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write a layer's new entries [B, G, T, D]; returns what to attend to, the new entries last.

        That is [B, G, kv_length + T, D], or with fixed shapes the layer's whole buffers. Of a layer that does not
        attend to the whole sequence it is what its new tokens may see.
        """
        state = self.states.get(self.layout.kinds[layer_idx]) if self.states else None
        if isinstance(state, WindowState):
            return state.update(key_states, value_states, self.layout.places[layer_idx], self.held)
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
        """See that there are buffers for entries like these [B, G, any, D], with room for ``count`` more."""
        self._make_room(count)
        self._allocate(key, value)

    def slots_for(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer's new entries go, for which room is made: [B, G, T, D], with fixed shapes whole buffers."""
        count = key_states.shape[2]
        self.make_ready(count, key_states, value_states)
        if self.kv_length is not None:
            if not self.layout.places[layer_idx]:
                self._written = self.kv_length + torch.arange(count, device=self.kv_length.device)
            return self._of_layer[self.layout.places[layer_idx]]
        span = self.get_seq_length(), count
        if span != self._span:
            # Views of all layers are made at once, because calls are most of a small model's step.
            slots = (buffer.narrow(3, *span).unbind() for buffer in (self.keys, self.values))
            self._span, self._slots = span, list(zip(*slots, strict=True))
        return self._slots[self.layout.places[layer_idx]]

    def seen_by(self, count: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``count`` new tokens attend to once they are written, as `update` gives it."""
        key, value = self._of_layer[self.layout.places[layer_idx]]
        if self.kv_length is not None:
            return key, value
        end = self.get_seq_length() + count
        return key[:, :, :end], value[:, :, :end]

    def at(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [layers, B, G, n, D] of the entries in slots ``index``, int64 [n] on the model's device."""
        return self.keys.index_select(3, index), self.values.index_select(3, index)

    def allocate_as(self, other: "LayeredCache") -> None:
        """Make the buffers, unless they are there, for entries like those of ``other``."""
        if not len(self.keys) and len(other.keys):
            self.prepare(other.layout, other.lender)
            self._allocate(other.keys[0], other.values[0])

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if not len(self.keys):
            self.keys, self.values = self._both(key, value, len(self.layout.full))
            self._of_layer = list(zip(self.keys, self.values, strict=True))

    def enlarge(self, capacity: int, filled: int) -> None:
        """Move the first ``filled`` entries to buffers of ``capacity`` slots."""
        self.capacity = capacity
        # Recorded passes know the old buffers. Of old and new ones no more are held at a time than need be.
        self.passes.clear()
        self._of_layer.clear()
        self._slots, self._span = [], None
        if self.layout.side_by_side and len(self.keys):
            old = self.keys, self.values
            self.keys, self.values = self._both(old[0][0], old[1][0], len(old[0]))
            for new, one in zip((self.keys, self.values), old, strict=True):
                new[:, :, :, :filled] = one[:, :, :, :filled]
        else:
            for name in ("keys", "values"):
                one = getattr(self, name)
                if len(one):
                    new = self._buffer(one[0], len(one))
                    new[:, :, :, :filled] = one[:, :, :, :filled]
                    setattr(self, name, new)
        self._of_layer = list(zip(self.keys, self.values, strict=True))

    def _both(self, key: torch.Tensor, value: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for entries like these [B, G, any, D], or one of which both are parts."""
        if not self.layout.side_by_side:
            return self._buffer(key, layers), self._buffer(value, layers)
        sizes = [key.shape[3], value.shape[3]]
        keys, values = self._buffer(key, layers, sum(sizes)).split(sizes, -1)
        return keys, values

    def _buffer(self, like: torch.Tensor, layers: int, size: int | None = None) -> torch.Tensor:
        batch, groups, _, dim = like.shape
        return large_pages.empty((layers, batch, groups, self.capacity, size or dim), like.dtype, like.device)

    @property
    def recurrent(self) -> RecurrentStates | None:
        """What recurrent layers keep; None of a model that has none."""
        state = self.states.get(RECURRENT)
        return state if isinstance(state, RecurrentStates) else None

    @property
    def held(self) -> int:
        """How many tokens stand behind those that are committed, and are not to be written over."""
        return 0

    @abstractmethod
    def _make_room(self, count: int) -> None:
        """See that ``count`` more entries find room behind those that stand, or raise ValueError."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers: 2 x layers x batch x KV heads x slots x head size x bytes per number."""
        return self.keys.nbytes + self.values.nbytes + sum(state.nbytes for state in self.states.values())
