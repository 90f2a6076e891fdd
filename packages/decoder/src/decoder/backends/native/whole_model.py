"""A pass through a model of one of `families.py` by the native library: from token ids to hidden states.

All layers are one call, which also writes the caches; in a step of SmolLM2-135M the calls that layers make one by one
took a fifth of the time. Embedding, norm and head are the model's own modules.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from ctypes import POINTER, Array, byref, c_int32, c_int64, c_void_p, pointer
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch

from decoder.backends.attention import Scores
from decoder.backends.memory import floats
from decoder.backends.native import library as native
from decoder.backends.native.angles import Angles, AngleTable
from decoder.backends.native.eligible import turned_by
from decoder.backends.native.families import parts_of, rotary_of
from decoder.backends.native.native_attention import NewTokens, native_attention, settings
from decoder.backends.native.native_layer import NativeLayer, NativeScratch
from decoder.backends.native.packed_linear import joined
from decoder.backends.native.structures import Attention, Layer, Pass, RecurrentState, SequenceKV
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.layout import RECURRENT, LayerKind, Layout, StateSizes
from decoder.cache.replayed import ReplayedStates
from decoder.cache.stored import StoredCache
from decoder.cache.window import WindowState

_FEW = 64  # tokens, up to which the queries of all layers may be kept until they are read


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

    def __init__(self, heads: torch.Tensor, layers: Sequence[int], query_heads: int, observed: int):
        self._heads, self._layers, self._query_heads, self._observed = heads, layers, query_heads, observed

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._heads[layer, -self._observed :, : self._query_heads].transpose(0, 1)[None]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class WholeModel:
    """Runs the layers of a model that `llama.runs_as_a_whole`, whose products `packing` has made.

    Args:
        decoder: the model without its language-model head.
        dtype: of hidden states, keys and values.
        layout: its layers.
        asked: by layer what it asks its attention for, all layers of a kind the same.

    Attributes:
        layout: the same, with the sizes of states.
    """

    def __init__(self, decoder: Any, dtype: torch.dtype, layout: Layout, asked: Mapping[int, Scores]):
        self._decoder, self._scratch, self._dtype = decoder, NativeScratch(), dtype
        self._held, self._kinds = [], [kind for kind in layout.members if kind != RECURRENT]
        self.layout = copy(layout)
        self._scores = [asked[layout.members[kind][0]]._replace(sinks=None) for kind in self._kinds]
        self._settings = [settings(scores) for scores in self._scores]
        dim = next(own.head_dim for one in decoder.layers if (own := one._modules.get("self_attn")) is not None)
        rotary = rotary_of(decoder)
        turned = turned_by(rotary, dim)
        assert turned is not None  # or `runs_as_a_whole` would not have said that it does
        told = hasattr(rotary, "layer_types") and getattr(decoder.config, "layer_types", None)
        types = [told[layout.members[kind][0]] for kind in self._kinds] if told else []
        self._angles = AngleTable(rotary, types, len(self._kinds), turned, dtype)
        attending: list[Layer] = []
        mixers: list[Layer] = []
        for number, module in enumerate(decoder.layers):
            products = {name: joined(group) for name, group in parts_of(module).products()}
            weights = {name: product.held for name, product in products.items() if product is not None}
            attends = layout.kinds[number].attends
            kind = self._kinds.index(layout.kinds[number]) if attends else 0
            place = layout.places[number] if attends else len(mixers)
            self._held.append(NativeLayer(module, weights, self._scratch, turned, kind, place))
            (attending if attends else mixers).append(self._held[-1].layer)
        first = attending[0]
        self._heads, self._kv_heads, self._dim = first.heads, first.kv_heads, first.dim
        self._all_heads = first.qkv.outputs // first.dim
        self._attended = max(layer.o.inputs for layer in (*attending, *mixers))
        self._layers = (POINTER(Layer) * len(self._held))(*(pointer(layer.layer) for layer in self._held))
        self._pair = torch.empty(1, self._kv_heads, 0, self._dim, dtype=dtype, device="cpu")
        self._mixed, self._per_new, self._per_token = floats(0), 0, 0
        if mixers:
            sizes = (c_int64 * 4)()
            native.library().mixer_sizes(byref(mixers[0]), sizes)
            state, inputs, self._per_new, self._per_token = sizes
            self.layout.state_sizes = StateSizes(len(mixers), state, inputs)

    def run(
        self,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        new: Sequence[NewTokens],
        observed: int,
        wanted: Sequence[int],
    ) -> WholePass:
        """Run ids [2, T], tokens and positions of all sequences in a row.

        Args:
            new: by sequence its new tokens.
            observed: of how many tokens, from the last one on, queries are returned.
            wanted: the layers whose inputs are returned; their number stands for the input of the final norm.
        """
        states = self._decoder.embed_tokens(ids[:1])
        if (scale := getattr(self._decoder, "embedding_multiplier", 1.0)) != 1:
            states = states * scale
        angles = self._angles.at(ids[1])
        caches = caches_of(cache)
        if not all(map(self.writes, caches)):
            return self._layer_by_layer(states, angles, cache, new, observed, wanted)
        states = states.clone(memory_format=torch.contiguous_format)  # hooks may have kept the embeddings
        # The queries of many tokens are copied from layer to layer: those of all layers would take too much memory.
        many = observed and states.shape[1] > _FEW
        kept = self._room_for_queries(states.shape[1], 1 if many else len(self._held)) if observed else None
        borders = range(len(self._held) + 1) if many else sorted({0, *wanted, len(self._held)})
        inputs: list[torch.Tensor] = []
        queries: dict[int, torch.Tensor] = {}
        for first, last in pairwise(borders):
            inputs += [states.clone()] * wanted.count(first)
            self._run_layers(states, angles, caches, new, range(first, last), kept)
            if many and kept is not None and not self._held[first].layer.mixer:
                queries[first] = kept[0, -observed:, : self._heads].clone().transpose(0, 1)[None]
        inputs += [states.clone()] * wanted.count(len(self._held))
        if kept is None or many:
            return WholePass(states, inputs, queries)
        return WholePass(states, inputs, KeptQueries(kept, self.layout.attending, self._heads, observed))

    def writes(self, cache: LayeredCache) -> bool:
        """Whether the library can write to a cache, whose buffers may come yet: the model's numbers, or codes."""
        if cache.kv_length is not None:
            return False
        if self.reads_codes(cache):
            return True
        if not cache.recordable:
            return False
        windows = [one for one in cache.states.values() if isinstance(one, WindowState)]
        if any(one.rounding is not None for one in windows):
            return False
        held: list[LayeredCache | WindowState] = [cache, *windows]
        pairs = [pair for one in held for pair in (one.keys, one.values) if len(pair)]
        return all(one.dtype == self._dtype and one.stride(-1) == 1 and one.is_cpu for one in pairs)

    def reads_codes(self, cache: LayeredCache) -> TypeGuard[StoredCache]:
        """Whether the library attends to a cache's codes, in whatever company the cache is."""
        return isinstance(cache, StoredCache) and cache.keeps_codes and self._dim % 4 == 0

    def _room_for_queries(self, tokens: int, layers: int) -> torch.Tensor:
        """For queries, keys, values and gates of all layers, or of one layer after another."""
        room = torch.empty(layers, tokens, self._all_heads, self._dim, dtype=self._dtype, device="cpu")
        return room.expand(len(self._held), -1, -1, -1)

    def _layer_by_layer(
        self,
        states: torch.Tensor,
        angles: Sequence[Angles],
        cache: LayeredCache | FlattenedCaches,
        new: Sequence[NewTokens],
        observed: int,
        wanted: Sequence[int],
    ) -> WholePass:
        """`run`, where caches write by themselves."""
        queries: dict[int, torch.Tensor] = {}
        inputs: list[torch.Tensor] = []
        caches = caches_of(cache)
        for number, layer in enumerate(self._held):
            inputs += [states] * wanted.count(number)
            if layer.layer.mixer:
                states = states.clone(memory_format=torch.contiguous_format)
                self._run_layers(states, angles, caches, new, range(number, number + 1), None)
                continue
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
            seen = [
                one.codes_seen_by(own.tokens, number) if self.reads_codes(one) else (key, value)
                for one, own, key, value in zip(caches, new, keys, values, strict=True)
            ]
            keys, values = zip(*seen, strict=True)
            sinks = getattr(self._decoder.layers[number].self_attn, "sinks", None)
            scores = self._scores[layer.layer.kind]._replace(sinks=sinks)
            attended = native_attention(heads, self._heads, keys, values, new, scores)
            states = layer.behind_attention(layer.gated(attended, heads), states)
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

        The library writes each layer's keys and values to the caches (`write_kv` in layers.c), where `_texts` tells.

        Raises:
            MemoryError: there is no memory for partial results of attention.
            ValueError: there is no room in a cache.
        """
        rows, of_heads = states.shape[1], self._all_heads * self._dim
        heads = states.new_empty(rows, self._all_heads, self._dim) if kept is None else kept[layers.start]
        attended = states.new_empty(rows, self._attended)
        # A mixer alone needs nothing of what attention does, for which caches may have to be asked in another way.
        kinds = [] if len(layers) == 1 and self._held[layers.start].layer.mixer else self._kinds
        attention = (Attention * max(1, len(kinds)))(
            *(
                Attention(
                    self._texts(kind, caches, new),
                    None,
                    attended.data_ptr(),
                    of_heads,
                    self._heads,
                    self._kv_heads,
                    self._dim,
                    self._dim,
                    is_bf16=self._dtype == torch.bfloat16,
                    **asked,
                )
                for kind, (asked, _) in zip(kinds, self._settings, strict=False)
            )
        )
        attention[0].out, attention[0].is_bf16 = attended.data_ptr(), self._dtype == torch.bfloat16
        cosines, sines = (
            (c_void_p * len(angles))(*(one.data_ptr() for one in each)) for each in zip(*angles, strict=True)
        )
        memories, held = self._memories(caches)
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
            len(kinds),
            memories,
            self._mixed.data_ptr(),
        )
        if native.library().run_layers(byref(whole), attention, len(caches), native.threads()):
            raise MemoryError("no memory for the partial results of a pass")
        del held

    def _memories(self, caches: Sequence[LayeredCache]) -> tuple[Array[RecurrentState] | None, list[Array]]:
        """What recurrent layers keep of the sequences, and what must be held while the library reads it."""
        replays = [states.replay for cache in caches if isinstance(states := cache.recurrent, ReplayedStates)]
        if not replays:
            return None, []
        new = sum(len(one.parents) for one in replays)
        numbers = new * self._per_new + (new + sum(len(one.replayed) for one in replays)) * self._per_token
        if numbers > len(self._mixed):
            self._mixed = floats(numbers)
        memories, held = (RecurrentState * len(replays))(), []
        for memory, one in zip(memories, replays, strict=True):
            given = [(c_int32 * len(own))(*own) for own in (one.replayed, one.parents, one.slots)]
            memory.before, memory.kept, memory.room = one.before.data_ptr(), one.inputs.data_ptr(), one.inputs.shape[1]
            memory.after = None if one.after is None else one.after.data_ptr()
            memory.replayed, memory.parents, memory.slots = map(native.address, given)
            memory.replays, memory.folded, memory.count = len(one.replayed), one.folded, len(one.parents)
            held += given
        return memories, held

    def _texts(self, kind: LayerKind, caches: Sequence[LayeredCache], new: Sequence[NewTokens]) -> Array[SequenceKV]:
        """Where the caches hold keys and values in the layers of a kind, with room for the new tokens' own."""
        structures = (SequenceKV * len(caches))()
        for structure, cache, sequence in zip(structures, caches, new, strict=True):
            held = cache.states.get(kind, cache)
            assert isinstance(held, LayeredCache | WindowState)
            if isinstance(held, LayeredCache):
                held.make_ready(sequence.tokens, self._pair, self._pair)
                structure.first, structure.length = 0, sequence.length
            else:
                held.make_ready(cache.held + sequence.tokens, self._pair, self._pair)
                structure.first, structure.length = held.first, sequence.position
            keys, values = held.keys, held.values
            if isinstance(held, LayeredCache) and self.reads_codes(held):
                (keys, scales), (values, value_scales) = held.codes
                structure.key_scales, structure.value_scales = scales.data_ptr(), value_scales.data_ptr()
                structure.scale_layer, _, structure.scale_head, _, _ = scales.stride()
            structure.key_layer, _, structure.key_head, structure.key_slot, _ = keys.stride()
            structure.value_layer, _, structure.value_head, structure.value_slot, _ = values.stride()
            structure.keys, structure.values = keys.data_ptr(), values.data_ptr()
            structure.count = sequence.tokens
            structure.mask = None if sequence.mask is None else sequence.mask.data_ptr()
        return structures


def asked_alike(layout: Layout, asked: Mapping[int, Scores]) -> bool:
    """Whether all layers of a kind ask their attention for the same, but for sinks, of which each has its own."""
    return all(
        _same(asked[layer]._replace(sinks=None), asked[first]._replace(sinks=None))
        for kind, (first, *others) in layout.members.items()
        if kind != RECURRENT
        for layer in others
    )


def _same(one: Scores, other: Scores) -> bool:
    pairs: Iterator[tuple[Any, Any]] = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def caches_of(cache: LayeredCache | FlattenedCaches) -> Sequence[LayeredCache]:
    """The caches of the sequences of a pass."""
    return cache.caches if isinstance(cache, FlattenedCaches) else [cache]
