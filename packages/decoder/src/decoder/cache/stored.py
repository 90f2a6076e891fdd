"""A full KV cache whose entries are kept quantised, in host memory, or both; passes are handed one layer at a time."""

from collections.abc import Sequence
from functools import cache

import torch

from decoder.backends.transfers import copy_vectors
from decoder.cache.form import CacheForm, Codes
from decoder.cache.full import Copies, FullCache
from decoder.cache.layout import Layout
from decoder.cache.pool import BufferPool
from decoder.cache.window import WindowState
from decoder.work import Work


class StoredCache(FullCache):
    """A `FullCache` for a `CacheForm` that passes cannot look at.

    While a layer runs, its entries stand in a working buffer, in the model's dtype and on its device. It is filled when
    the layer hands over its new entries, which the form rounds before anything attends to them. All layers share
    the buffer. An offloaded cache on CUDA has two and fills one while the layer before runs over the other.

    The native library reads and writes codes of int8 where they are kept (`keeps_codes`), and leaves the buffer alone.

    Passes over it are not recorded, since the size of what they copy changes.

    Args:
        capacity, growable: as for `FullCache`.
        form: how entries are kept.
    """

    recordable = False

    def __init__(self, capacity: int, growable: bool, form: CacheForm):
        super().__init__(capacity, growable)
        self.form = form
        # Of keys and of values, what is kept: [layers, B, G, slots, ...] each.
        self._kept: list[list[torch.Tensor]] = []
        self._copies: torch.cuda.Stream | None = None
        self._apart = False  # whether the device has no access to what is kept
        # Codes that were copied to the device, of keys and of values for each working buffer.
        self._arriving: list[list[torch.Tensor]] = []
        self._filled: dict[int, torch.cuda.Event] = {}  # by layer, when its working buffer is filled

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for kept in self._kept for part in kept)

    @property
    def keeps_codes(self) -> bool:
        """Whether it keeps codes of int8 that the native library can attend to; windows hold numbers."""
        windows = any(isinstance(state, WindowState) for state in self.states.values())
        return self.form.kv_dtype == "int8" and not self._apart and not windows

    @property
    def codes(self) -> tuple[Codes, Codes]:
        """Of keys and of values, all slots in all layers: [layers, B, G, slots, ...]."""
        keys, values = self._kept
        return Codes(*keys), Codes(*values)

    def codes_seen_by(self, count: int, layer_idx: int) -> tuple[Codes, Codes]:
        """What ``count`` new tokens attend to in a layer that attends to the whole sequence, as `seen_by`."""
        place, end = self.layout.places[layer_idx], self.length + count
        keys, values = (Codes(*(part[place][:, :, :end] for part in one)) for one in self.codes)
        return keys, values

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self._working_bytes + self._beside_bytes

    @property
    def device_bytes(self) -> int:
        """The part of `nbytes` that is on the model's device."""
        return self._working_bytes + self._beside_bytes if self.form.offload else self.nbytes

    @property
    def _beside_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    @property
    def _working_bytes(self) -> int:
        working = self._of_layer[: self._buffers]
        return sum(part.nbytes for parts in (*working, *self._arriving) for part in parts)

    @property
    def _buffers(self) -> int:
        return self.form.working_layers(self.keys.device)

    def prepare(self, layout: Layout, pool: BufferPool | None = None) -> None:
        super().prepare(layout)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.layout.kinds[layer_idx] in self.states:
            return super().update(key_states, value_states, layer_idx)
        count, place = key_states.shape[2], self.layout.places[layer_idx]
        self._make_room(count)
        self._allocate(key_states, value_states)
        self._fill_ahead(place)
        new = slice(self.length, self.length + count)
        of_layer = zip((key_states, value_states), self._kept, self._of_layer[place], strict=True)
        for states, kept, working in of_layer:
            encoded = self.form.encode(states)
            for part, own in zip(encoded, kept, strict=True):
                copy_vectors(part, own[place][:, :, new])
            self.form.decode(encoded, working[:, :, new])
        return self.seen_by(count, layer_idx)

    def decoded(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait_for_copies()
        size = len(parts) // 2
        return self._decoded(parts[:size], self.keys), self._decoded(parts[size:], self.values)

    def _decoded(self, kept: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        out = like.new_empty(*kept[0].shape[:-1], like.shape[-1])
        self.form.decode(tuple(part.to(like.device) for part in kept), out)
        return out

    def at(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._wait_for_copies()
        return super().at(index)

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._fill(self.layout.places[layer_idx])
        return super().layer(layer_idx)

    def copying(self, count: int) -> Work[Copies]:
        self._wait_for_copies()
        return (yield from super().copying(count))

    def _move(self, slots: Sequence[int], start: int) -> None:
        self._wait_for_copies()
        super()._move(slots, start)

    def _wait_for_copies(self) -> None:
        """Let the host wait until what passes have written to its memory is there."""
        if self._apart:
            torch.cuda.current_stream(self.keys.device).synchronize()

    def _fill_ahead(self, place: int) -> None:
        """See that a layer's working buffer holds its committed entries, and begin to fill the next layer's."""
        if self._copies is None:
            self._fill(place)
            return
        if not place:
            # A pass that failed may have left some.
            self._filled.clear()
        if place not in self._filled:
            self._begin_to_fill(place)
        torch.cuda.current_stream(self.keys.device).wait_event(self._filled.pop(place))
        if place + 1 < len(self.layout.full):
            self._begin_to_fill(place + 1)

    def _begin_to_fill(self, place: int) -> None:
        assert self._copies is not None
        # All that has been launched so far is done with this buffer: the layer before last, the last one that used it.
        self._copies.wait_stream(torch.cuda.current_stream(self.keys.device))
        with torch.cuda.stream(self._copies):
            self._fill(place)
            self._filled[place] = self._copies.record_event()

    def _fill(self, place: int) -> None:
        """Copy a layer's committed entries to its working buffer."""
        committed = slice(self.length)
        for which, (kept, working) in enumerate(zip(self._kept, self._of_layer[place], strict=True)):
            parts = [part[place][:, :, committed] for part in kept]
            if self._apart and self.form.kv_dtype is None:
                copy_vectors(parts[0], working[:, :, committed])
                continue
            if self._apart:
                here = [part[:, :, committed] for part in self._arriving[2 * (place % self._buffers) + which]]
                for part, copy in zip(parts, here, strict=True):
                    copy_vectors(part, copy)
                parts = here
            self.form.decode(parts, working[:, :, committed])

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self._kept:
            self._apart = self.form.offload and has_own_memory(key.device)
            self._copies = copy_stream(key.device) if self._apart else None
            self._kept = [[self._room(part) for part in self.form.encode(like[:, :, :0])] for like in (key, value)]
            self._make_working(key, value)

    def _room(self, part: torch.Tensor) -> torch.Tensor:
        """Slots in all layers for what is kept of entries, like ``part`` [B, G, any number, ...]."""
        batch, groups, _, size = part.shape
        shape = len(self.layout.full), batch, groups, self.capacity, size
        if not self.form.offload:
            return part.new_empty(shape)
        # What a device copies from pageable memory keeps the host waiting.
        return torch.empty(shape, dtype=part.dtype, pin_memory=self.keys.is_cuda or part.is_cuda)

    def _make_working(self, key: torch.Tensor, value: torch.Tensor) -> None:
        def buffer(like: torch.Tensor) -> torch.Tensor:
            return like.new_empty(*like.shape[:2], self.capacity, like.shape[3])

        pairs = [(buffer(key), buffer(value)) for _ in range(self.form.working_layers(key.device))]
        self._of_layer = [pairs[layer % len(pairs)] for layer in range(len(self.layout.full))]
        # With one buffer these are what each layer looks at.
        self.keys, self.values = (part.expand(len(self.layout.full), *part.shape) for part in pairs[0])
        self._arriving = []
        if self._apart and self.form.kv_dtype is not None:
            encoded = [self.form.encode(like[:, :, :0]) for like in (key, value)]
            self._arriving = [
                [part.new_empty(*part.shape[:2], self.capacity, part.shape[3]) for part in parts]
                for _ in pairs
                for parts in encoded
            ]
        if key.is_cuda and self._copies is not None:
            # Their memory must not become another tensor's while a copy to it may still be running.
            for part in (part for parts in (*pairs, *self._arriving) for part in parts):
                part.record_stream(self._copies)

    def enlarge(self, capacity: int, filled: int) -> None:
        self._wait_for_copies()
        self.capacity = capacity
        if not self._kept:
            return
        key, value = self._of_layer[0]
        self._of_layer = []
        for parts in self._kept:
            for place, part in enumerate(parts):
                parts[place] = self._room(part[0])
                parts[place][:, :, :, :filled] = part[:, :, :, :filled]
        self._make_working(key[:, :, :0], value[:, :, :0])


def has_own_memory(device: torch.device) -> bool:
    """Whether tensors in host memory must be copied to ``device`` before it can use them."""
    return device.type == "cuda"


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which copies run beside the computations of ``device``."""
    return torch.cuda.Stream(device)


def full_cache(form: CacheForm, capacity: int, growable: bool = False) -> FullCache:
    """An empty full cache of that form."""
    return FullCache(capacity, growable) if form.plain else StoredCache(capacity, growable, form)
