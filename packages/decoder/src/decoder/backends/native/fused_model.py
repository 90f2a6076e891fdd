"""A pass through a model of the Llama family whose layers are all fused: from token ids to logits in one loop.

transformers' own forwards around the layers prepare masks that nothing reads here and wrap each layer in several calls.
In a step of the reference model that was a fifth of the time, in one of SmolLM2-135M a twentieth.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.backends.attention import TextInPass
from decoder.backends.kernel_check import ALLOWED, difference
from decoder.backends.native.fused_layer import FAMILIES, FusedLayer
from decoder.backends.native.native_pass import NativePass
from decoder.backends.native.packed_linear import replaced
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.full import FullCache

if TYPE_CHECKING:
    from decoder.backends.fast_layers import FastLayers
    from decoder.backends.model_pass import ModelPass, PassOutput

_MODELS = {
    (f"transformers.models.{name}.modeling_{name}", f"{name.capitalize()}{part}")
    for name in FAMILIES
    for part in ("Model", "ForCausalLM")
}
_TOKENS = 4  # of the test


class FusedModel:
    """Runs the decoder of a model whose layers are fused; embedding, rotary angles, norm and head are its own modules.

    Args:
        decoder: the model without its language-model head.
        layers: the forwards of its layers.
    """

    def __init__(self, decoder: Any, layers: Sequence[FusedLayer]):
        self._decoder, self._layers = decoder, layers
        self._native = _native_pass(layers)

    def __call__(
        self,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        texts: Sequence[TextInPass],
        observed: int = 0,
        wanted: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor], Mapping[int, torch.Tensor]]:
        """The hidden states before the final norm, the inputs of the ``wanted`` layers, [1, T, d] all, and queries.

        The inputs come in the order in which layers run, one that is wanted twice two times. The number of layers
        stands for the input of the norm. The queries are those of `PassOutput`, of the last ``observed`` tokens. The
        other arguments are those of `ModelPass.run`.
        """
        states = self._decoder.embed_tokens(ids[:1])
        angles = self._decoder.rotary_emb(states, position_ids=ids[1:])
        if self._native is not None and self._native.runs(cache, texts, states):
            kept_heads = self._native.room_for_queries(states.shape[1]) if observed else None
            if not observed or kept_heads is not None:
                states = states.clone(memory_format=torch.contiguous_format)  # hooks may have kept the embeddings
                kept = self._run_natively(states, angles, cache, texts, kept_heads, wanted)
                return states, kept, self._native.queries(kept_heads, observed)
        queries: dict[int, torch.Tensor] = {}
        given = dict(past_key_values=cache, position_embeddings=angles, texts=texts)
        given |= dict(queries=queries if observed else None, observed=observed)
        kept = []
        for number, layer in enumerate(self._layers):
            kept += [states] * wanted.count(number)
            states = layer(states, **given)
        return states, kept + [states] * wanted.count(len(self._layers)), queries

    def _run_natively(
        self,
        states: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayeredCache | FlattenedCaches,
        texts: Sequence[TextInPass],
        kept_heads: torch.Tensor | None,
        wanted: Sequence[int],
    ) -> list[torch.Tensor]:
        """Run the layers over ``states``, which change; the inputs of the ``wanted`` ones."""
        assert self._native is not None
        kept: list[torch.Tensor] = []
        for first, last in pairwise(sorted({0, *wanted, len(self._layers)})):
            kept += [states.clone()] * wanted.count(first)
            self._native(states, angles, cache, texts, range(first, last), kept_heads)
        return kept + [states.clone()] * wanted.count(len(self._layers))


def _native_pass(layers: Sequence[FusedLayer]) -> NativePass | None:
    """All layers in one call, if the native library runs each of them and they are alike."""
    native = [layer.native for layer in layers if layer.native is not None]
    alike = {(layer.native_dtype or torch.float32, layer.attention.scaling, layer.scratch) for layer in layers}
    shapes = {(layer.layer.heads, layer.layer.kv_heads, layer.layer.dim, layer.layer.size) for layer in native}
    if len(native) < len(layers) or len(alike) > 1 or len(shapes) > 1:
        return None
    ((dtype, scaling, scratch),) = alike
    return NativePass(native, scratch, dtype, scaling)


def fused_model(model: PreTrainedModel, layers: Mapping[nn.Module, Callable]) -> FusedModel | None:
    """A `FusedModel`, or None where the model is of another family, has other layers, or the user has changed it.

    Args:
        layers: the replacements of its modules, fused layers among them.
    """
    decoder: Any = model.get_decoder()
    if any((type(one).__module__, type(one).__name__) not in _MODELS for one in (model, decoder)):
        return None
    own = list(decoder.layers)
    if len(own) != decoder.config.num_hidden_layers or any("forward" in one.__dict__ for one in (model, decoder)):
        return None
    if any(one._forward_hooks or one._forward_pre_hooks for one in (model, decoder, *own)):
        return None
    fused = [forward for layer in own if isinstance(forward := layers.get(layer), FusedLayer)]
    return FusedModel(decoder, fused) if len(fused) == len(own) else None


@torch.inference_mode()
@torch.autocast("cpu", enabled=False)
def fused_model_fault(
    fused: FusedModel, model_pass: "ModelPass", faster: "FastLayers", attends_natively: bool = False
) -> str | None:
    """Compare a pass of it with one of transformers' forwards over the same fused layers; what is wrong, in words."""
    ids = torch.arange(2 * _TOKENS) % model_pass.model.config.vocab_size
    # Each token of the second pass sees the one before it and not the one before that, as in a tree.
    mask = torch.eye(_TOKENS, dtype=torch.bool) | torch.eye(_TOKENS, dtype=torch.bool).roll(-1, 1).tril()

    def run(other: FusedModel | None) -> "PassOutput":
        """Of a second pass, behind cached tokens."""
        cache = FullCache(2 * _TOKENS)
        cache.prepare(model_pass.model.config.num_hidden_layers)
        for start in (0, _TOKENS):
            cache.begin(_TOKENS)
            native = start if attends_natively else None
            text = TextInPass(_TOKENS, mask if start else None, native=native)
            given = torch.stack((ids, torch.arange(2 * _TOKENS)))[:, start : start + _TOKENS], cache, [text], _TOKENS
            with replaced(faster.called):
                output = model_pass.run(model_pass.model, *given, faster._replace(model=other))
            cache.keep(range(_TOKENS))
        return output

    mine, theirs = run(fused), run(None)
    if mine.queries.keys() != theirs.queries.keys():
        return "it hands over the queries of other layers"
    pairs = [(mine.hidden, theirs.hidden), (mine.logits, theirs.logits)]
    pairs += [(query, theirs.queries[layer]) for layer, query in mine.queries.items()]
    for one, other in pairs:
        assert one is not None and other is not None
        fault = difference(one, other, ALLOWED[one.dtype])
        if fault:
            return fault
    return None
