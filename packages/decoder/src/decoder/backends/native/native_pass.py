"""All layers of a pass in one call of the native library, which also writes the caches.

In a step of SmolLM2-135M the calls that layers make one by one took a fifth of the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, byref, pointer

import torch

from decoder.backends.attention import TextInPass
from decoder.backends.native import library as native
from decoder.backends.native.library import Attention, Layer, Pass, Text
from decoder.backends.native.native_layer import NativeLayer, NativeScratch
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches

_FEW = 64  # tokens, up to which the queries of all layers may be kept until they are read


class KeptQueries(Mapping[int, torch.Tensor]):
    """By layer the queries [1, H, n, D] of a pass's last n tokens, which become tensors when they are looked up."""

    def __init__(self, heads: torch.Tensor, query_heads: int, observed: int):
        self._heads, self._query_heads, self._observed = heads, query_heads, observed

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._heads[layer, -self._observed :, : self._query_heads].transpose(0, 1)[None]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._heads)))

    def __len__(self) -> int:
        return len(self._heads)


class NativePass:
    """Runs the layers of one model.

    Args:
        layers: in order; all of one shape and dtype, with one scratch.
        dtype: of hidden states, keys and values.
        scaling: of attention.
    """

    def __init__(self, layers: Sequence[NativeLayer], scratch: NativeScratch, dtype: torch.dtype, scaling: float):
        self._held, self._scratch, self._dtype, self._scaling = layers, scratch, dtype, scaling
        first = layers[0].layer
        self._heads, self._kv_heads, self._dim = first.heads, first.kv_heads, first.dim
        self._all_heads = self._heads + 2 * self._kv_heads
        self._layers = (POINTER(Layer) * len(layers))(*(pointer(layer.layer) for layer in layers))
        self._pair = torch.empty(1, self._kv_heads, 0, self._dim, dtype=dtype)

    def runs(self, cache: LayeredCache | FlattenedCaches, texts: Sequence[TextInPass], states: torch.Tensor) -> bool:
        """Whether it can run such a pass: over caches of plain buffers, of the model's dtype."""
        if texts[0].native is None or states.dtype != self._dtype or not states.is_cpu:
            return False
        return all(map(self._writes, cache.caches if isinstance(cache, FlattenedCaches) else [cache]))

    def _writes(self, cache: LayeredCache) -> bool:
        """Whether it can write to a cache, whose buffers may not be there yet."""
        if not cache.recordable or cache.kv_length is not None:
            return False
        pairs = (cache.keys, cache.values) if len(cache.keys) else ()
        return all(one.dtype == self._dtype and one.stride(-1) == 1 and one.is_cpu for one in pairs)

    def room_for_queries(self, tokens: int) -> torch.Tensor | None:
        """Where to keep the queries of all layers; None where the tokens are too many."""
        if tokens > _FEW:
            return None
        return torch.empty(len(self._layers), tokens, self._all_heads, self._dim, dtype=self._dtype)

    def queries(self, kept: torch.Tensor | None, observed: int) -> Mapping[int, torch.Tensor]:
        """By layer, the queries of the last ``observed`` tokens that were ``kept``."""
        return {} if kept is None else KeptQueries(kept, self._heads, observed)

    def __call__(
        self,
        states: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayeredCache | FlattenedCaches,
        texts: Sequence[TextInPass],
        layers: range,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Change the hidden states [1, T, d] of T tokens to those behind ``layers``.

        Args:
            angles: cosines and sines [1, T, D].
            kept: from `room_for_queries`.

        Raises:
            MemoryError: there is no memory for partial results of attention.
            ValueError: there is no room in a cache.
        """
        rows = states.shape[1]
        caches = cache.caches if isinstance(cache, FlattenedCaches) else [cache]
        structures = (Text * len(caches))()
        for structure, own, text in zip(structures, caches, texts, strict=True):
            own.make_ready(text.tokens, self._pair, self._pair)
            keys, values = own.keys, own.values
            structure.key_layer, _, structure.key_head, structure.key_slot, _ = keys.stride()
            structure.value_layer, _, structure.value_head, structure.value_slot, _ = values.stride()
            structure.keys, structure.values = keys.data_ptr(), values.data_ptr()
            structure.length, structure.count = own.get_seq_length(), text.tokens
            structure.mask = None if text.mask is None else text.mask.data_ptr()
        heads = states.new_empty(rows, self._all_heads, self._dim) if kept is None else kept[layers.start]
        attended = states.new_empty(rows, self._heads * self._dim)
        cosines, sines = self._scratch.angles(*angles)
        of_heads = self._all_heads * self._dim
        is_bf16 = self._dtype == torch.bfloat16
        attention = Attention(
            structures,
            None,
            attended.data_ptr(),
            of_heads,
            self._heads,
            self._kv_heads,
            self._dim,
            self._dim,
            self._scaling,
            is_bf16,
        )
        whole = Pass(
            self._layers,
            layers.start,
            layers.stop,
            rows,
            states.data_ptr(),
            heads.data_ptr(),
            0 if kept is None else rows * of_heads,
            cosines.data_ptr(),
            sines.data_ptr(),
            self._scratch.address,
        )
        if native.library().run_layers(byref(whole), byref(attention), len(caches), native.threads()):
            raise MemoryError("no memory for the partial results of attention")
