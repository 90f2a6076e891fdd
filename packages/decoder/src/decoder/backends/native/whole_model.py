"""A pass through a model of the Llama family by the native library: from token ids to hidden states.

All layers are one call, which also writes the caches; in a step of SmolLM2-135M the calls that layers make one by one
took a fifth of the time. Embedding, rotary angles, norm and head are the model's own modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, Array, byref, c_void_p, pointer
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from decoder.backends.attention import Scores
from decoder.backends.native import library as native
from decoder.backends.native.library import Attention, Layer, Pass, Text
from decoder.backends.native.llama import products_of
from decoder.backends.native.native_attention import NewTokens, bounds, native_attention
from decoder.backends.native.native_layer import NativeLayer, NativeScratch
from decoder.backends.native.packed_linear import joined
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.layout import LayerKind, Layout
from decoder.cache.window import WindowState

_FEW = 64  # tokens, up to which the queries of all layers may be kept until they are read

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [1, T, D] of the positions of a pass."""


class WholePass(NamedTuple):
    """What a pass through the layers has given.

    Attributes:
        hidden: behind the last layer, [1, T, d].
        inputs: of the layers that were asked for, [1, T, d] each, in order.
        queries: by layer, those of the last tokens, [1, H, n, D].
    """

    hidden: torch.Tensor
    inputs: list[torch.Tensor]
    queries: Mapping[int, torch.Tensor]


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


class WholeModel:
    """Runs the layers of a model that `llama.runs_as_a_whole`, whose products `packing` has made.

    Args:
        model: the model.
        dtype: of hidden states, keys and values.
        layout: its layers.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, layout: Layout):
        self._decoder: Any = model.get_decoder()
        self._scratch, self._dtype = NativeScratch(), dtype
        self._held, self._kinds, self._layout = [], list(layout.members), layout
        for number, module in enumerate(self._decoder.layers):
            products = {name: joined(group) for name, group in products_of(module)}
            weights = {name: product.weight for name, product in products.items() if product is not None}
            kind = self._kinds.index(layout.kinds[number])
            self._held.append(NativeLayer(module, weights, self._scratch, kind, layout.places[number]))
        first = self._held[0].layer
        self._heads, self._kv_heads, self._dim = first.heads, first.kv_heads, first.dim
        self._all_heads = self._heads + 2 * self._kv_heads
        self._scaling: float = self._decoder.layers[0].self_attn.scaling
        self._layers = (POINTER(Layer) * len(self._held))(*(pointer(layer.layer) for layer in self._held))
        self._pair = torch.empty(1, self._kv_heads, 0, self._dim, dtype=dtype)

    def run(
        self,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        new: Sequence[NewTokens],
        observed: int,
        wanted: Sequence[int],
    ) -> WholePass:
        """Run ids [2, T], tokens and positions of all texts in a row.

        Args:
            new: by text its new tokens.
            observed: of how many tokens, from the last one on, queries are returned.
            wanted: the layers whose inputs are returned; their number stands for the input of the final norm.
        """
        states = self._decoder.embed_tokens(ids[:1])
        angles = self._angles(states, ids[1:])
        caches = cache.caches if isinstance(cache, FlattenedCaches) else [cache]
        if (observed and states.shape[1] > _FEW) or not all(map(self.writes, caches)):
            return self._layer_by_layer(states, angles, cache, new, observed, wanted)
        kept = self._room_for_queries(states.shape[1]) if observed else None
        states = states.clone(memory_format=torch.contiguous_format)  # hooks may have kept the embeddings
        inputs: list[torch.Tensor] = []
        for first, last in pairwise(sorted({0, *wanted, len(self._held)})):
            inputs += [states.clone()] * wanted.count(first)
            self._run_layers(states, angles, caches, new, range(first, last), kept)
        inputs += [states.clone()] * wanted.count(len(self._held))
        return WholePass(states, inputs, {} if kept is None else KeptQueries(kept, self._heads, observed))

    def _angles(self, states: torch.Tensor, positions: torch.Tensor) -> list[Angles]:
        """By kind of layer."""
        rotary, types = self._decoder.rotary_emb, getattr(self._decoder.config, "layer_types", None)
        if not types or not hasattr(rotary, "layer_types"):
            cos, sin = rotary(states, position_ids=positions)
            if cos.shape[-1] < self._dim:  # as in gpt-oss, once for both halves
                cos, sin = (torch.cat((one, one), -1) for one in (cos, sin))
            return [(cos, sin)] * len(self._kinds)
        names = [types[layers[0]] for layers in self._layout.members.values()]
        return [rotary(states, positions, name) for name in names]

    def writes(self, cache: LayeredCache) -> bool:
        """Whether the library can write to a cache: to plain buffers of the model's dtype, which may come yet."""
        if not cache.recordable or cache.kv_length is not None:
            return False
        windows = [one for one in cache.states.values() if isinstance(one, WindowState)]
        if any(one.rounding is not None for one in windows):
            return False
        held: list[LayeredCache | WindowState] = [cache, *windows]
        pairs = [pair for one in held for pair in (one.keys, one.values) if len(pair)]
        return all(one.dtype == self._dtype and one.stride(-1) == 1 and one.is_cpu for one in pairs)

    def _room_for_queries(self, tokens: int) -> torch.Tensor:
        return torch.empty(len(self._held), tokens, self._all_heads, self._dim, dtype=self._dtype)

    def _layer_by_layer(
        self,
        states: torch.Tensor,
        angles: Sequence[Angles],
        cache: LayeredCache | FlattenedCaches,
        new: Sequence[NewTokens],
        observed: int,
        wanted: Sequence[int],
    ) -> WholePass:
        """`run`, where caches write by themselves, or all queries of so many tokens would take too much memory."""
        queries: dict[int, torch.Tensor] = {}
        inputs: list[torch.Tensor] = []
        for number, layer in enumerate(self._held):
            inputs += [states] * wanted.count(number)
            heads = layer.before_attention(states, angles[layer.layer.kind])
            if observed:
                last = heads[-observed:, : self._heads]
                # A view would keep all heads of a long chunk alive.
                queries[number] = last.clone().transpose(0, 1)[None]
            by_head = heads[None].transpose(1, 2)
            key, value = (
                by_head.narrow(1, start, self._kv_heads) for start in (self._heads, self._heads + self._kv_heads)
            )
            keys, values = cache.update(key, value, number)
            if not isinstance(keys, tuple):
                keys, values = (keys,), (values,)
            sinks = getattr(self._decoder.layers[number].self_attn, "sinks", None)
            scores = Scores(self._scaling, self._kinds[layer.layer.kind], sinks)
            attended = native_attention(heads, self._heads, keys, values, new, scores)
            states = layer.behind_attention(attended, states)
        return WholePass(states, inputs + [states] * wanted.count(len(self._held)), queries)

    def _run_layers(
        self,
        states: torch.Tensor,
        angles: Sequence[Angles],
        caches: Sequence[LayeredCache],
        new: Sequence[NewTokens],
        layers: range,
        kept: torch.Tensor | None,
    ) -> None:
        """Change the hidden states [1, T, d] of T tokens to those behind ``layers``; queries go to ``kept``.

        Raises:
            MemoryError: there is no memory for partial results of attention.
            ValueError: there is no room in a cache.
        """
        rows = states.shape[1]
        heads = states.new_empty(rows, self._all_heads, self._dim) if kept is None else kept[layers.start]
        attended = states.new_empty(rows, self._heads * self._dim)
        of_heads, count = self._all_heads * self._dim, len(self._kinds)
        texts = [self._texts(kind, caches, new) for kind in self._kinds]
        attention = (Attention * count)(
            *(
                Attention(
                    own,
                    None,
                    attended.data_ptr(),
                    of_heads,
                    self._heads,
                    self._kv_heads,
                    self._dim,
                    self._dim,
                    self._scaling,
                    self._dtype == torch.bfloat16,
                    **bounds(Scores(self._scaling, kind)),
                )
                for own, kind in zip(texts, self._kinds, strict=True)
            )
        )
        turned = [self._scratch.angles(*own, kind) for kind, own in enumerate(angles)]
        cosines, sines = ((c_void_p * count)(*(one.data_ptr() for one in each)) for each in zip(*turned, strict=True))
        whole = Pass(
            self._layers,
            layers.start,
            layers.stop,
            rows,
            states.data_ptr(),
            heads.data_ptr(),
            0 if kept is None else rows * of_heads,
            cosines,
            sines,
            self._scratch.address,
            count,
        )
        if native.library().run_layers(byref(whole), attention, len(caches), native.threads()):
            raise MemoryError("no memory for the partial results of attention")

    def _texts(self, kind: LayerKind, caches: Sequence[LayeredCache], new: Sequence[NewTokens]) -> Array[Text]:
        """What the caches hold in the layers of a kind, with room for the new tokens."""
        structures = (Text * len(caches))()
        for structure, cache, text in zip(structures, caches, new, strict=True):
            held = cache.states.get(kind, cache)
            assert isinstance(held, LayeredCache | WindowState)
            if isinstance(held, LayeredCache):
                held.make_ready(text.tokens, self._pair, self._pair)
                structure.first, structure.length = 0, text.length
            else:
                held.make_ready(cache.held + text.tokens, self._pair, self._pair)
                structure.first, structure.length = held.first, text.position
            structure.key_layer, _, structure.key_head, structure.key_slot, _ = held.keys.stride()
            structure.value_layer, _, structure.value_head, structure.value_slot, _ = held.values.stride()
            structure.keys, structure.values = held.keys.data_ptr(), held.values.data_ptr()
            structure.count = text.tokens
            structure.mask = None if text.mask is None else text.mask.data_ptr()
        return structures
