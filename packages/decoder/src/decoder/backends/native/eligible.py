"""Which models the native library runs as a whole: those of some families, as transformers has them.

Their layers are root-mean-square norms, rotary attention or a mixer, and a gated SiLU or GELU or experts, with or
without biases, sinks, norms of heads and norms of what is added.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from decoder.backends.attention import not_known
from decoder.backends.forwards import is_changed
from decoder.backends.native import library as native
from decoder.backends.native.experts import ACTIVATIONS
from decoder.backends.native.families import LayerParts, family_of, parts_of, rotary_of
from decoder.backends.native.mixers import knows
from decoder.backends.native.packed_linear import Linear, packable
from decoder.backends.native.quantised import QuantisedEmbedding, QuantisedLinear
from decoder.backends.native.structures import MOST_CODED_DIM
from decoder.backends.norms import eps_of, looks_like_rms_norm
from decoder.cache.layout import FULL, LayerKind
from decoder.model.architectures import decoder_of

_ATTENTION = {"q_proj", "k_proj", "v_proj"}


def runs_as_a_whole(model: PreTrainedModel, dtype: torch.dtype, kinds: Sequence[LayerKind]) -> bool:
    """Whether a model is of these families, all in ``dtype``, with nothing of the user's around or in its layers.

    ``kinds`` are those of its layers.
    """
    decoder: Any = decoder_of(model)
    whole = family_of(model, "ForCausalLM") and family_of(decoder, "Model", "TextModel")
    if not (whole and hasattr(decoder, whole.rotary) and native.multiplies(dtype)):
        return False
    layers, embeddings = list(decoder.layers), decoder.embed_tokens
    plain = not _has_any_global_hook() and len(layers) == decoder.config.num_hidden_layers
    of_embeddings = embeddings.dtype if isinstance(embeddings, QuantisedEmbedding) else embeddings.weight.dtype
    if not plain or of_embeddings != dtype:
        return False
    around = [model, decoder, *layers]
    if any(map(is_changed, around)):
        return False
    pairs = list(zip(layers, kinds, strict=True))
    if not all(known_layer(layer, dtype, kind) for layer, kind in pairs):
        return False
    attending = [layer.self_attn for layer in layers if "self_attn" in layer._modules]
    mixers = [parts.mixer for parts in map(parts_of, layers) if parts.mixer is not None]
    alike = len({mixer.shape for mixer in mixers}) <= 1
    shapes = {(attention.head_dim, attention.scaling) for attention in attending}
    return alike and len(shapes) == 1 and turned_by(rotary_of(decoder), attending[0].head_dim) is not None


def turned_by(rotary: Any, dim: int) -> int | None:
    """How many of the ``dim`` numbers of a head are rotated, if it is the same everywhere."""
    if rotary is None:
        return 0
    named = rotary.named_buffers()
    sizes = {2 * len(own) for name, own in named if name.endswith("inv_freq") and "original" not in name}
    return None if len(sizes) > 1 else min(sizes, default=dim)


def known_layer(layer: Any, dtype: torch.dtype, kind: LayerKind = FULL) -> bool:
    """Whether a module is a layer of these families with nothing of the user's in it, which the library multiplies."""
    family = family_of(layer, "DecoderLayer")
    if family is None:
        return False
    # The user may have put another forward in a class's place, or in a module's.
    others = (getattr(type(one).forward, "__module__", None) != type(one).__module__ for one in layer.modules())
    within = [module for module in layer.modules() if module is not layer]
    if any(others) or any(is_changed(module) or module._backward_hooks for module in within):
        return False
    parts = LayerParts(layer, family)
    if not parts.complete:
        return False
    if parts.experts is not None and not _known_experts(parts, dtype):
        return False
    if parts.mlp is not None and not _known_mlp(parts):
        return False
    # An eps of its own for each norm would need another kernel.
    norms = list(parts.norms.values())
    if not all(looks_like_rms_norm(norm) for norm in norms) or len({eps_of(norm) for norm in norms}) > 1:
        return False
    return (
        (knows(parts.mixer) if parts.mixer is not None else _known_attention(parts, kind))
        and all(looks_like_rms_norm(norm) and _norms_in(norm, dtype) for norm in [*norms, *parts.head_norms])
        and all(_alike(group, dtype) for group in parts.groups)
    )


def _norms_in(norm: Any, dtype: torch.dtype) -> bool:
    """Whether a norm gives what it is given, in ``dtype``; gpt-oss keeps the weights of most in float32."""
    return norm.weight.dtype in (dtype, torch.float32 if type(norm).__name__ == "GptOssRMSNorm" else dtype)


def _known_mlp(parts: LayerParts) -> bool:
    """Whether a layer has one gated product behind attention."""
    names, activation = parts.family.mlp_parts, parts.family.activation
    known = type(getattr(parts.mlp, activation, nn.SiLU())).__name__ in ACTIVATIONS
    return known and parts.mlp._modules.keys() - {activation} == set(names)


def _known_experts(parts: LayerParts, dtype: torch.dtype) -> bool:
    """Whether a layer has a block of experts of these families, all in ``dtype``."""
    block = parts.block if family_of(parts.experts, "SparseMoeBlock", "MoE", "MLP") else None
    return block is not None and block.dtypes == {dtype}


def _known_attention(parts: LayerParts, kind: LayerKind) -> bool:
    """Whether attention has the parts of its family, and asks for nothing that the library does not do."""
    attention, family = parts.attention, parts.family
    plain = {*_ATTENTION, family.out}
    if attention._modules.keys() not in (plain, {*plain, *family.head_norms}):
        return False
    # What transformers' layers of these families hand to attention.
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    sizes = range(2, MOST_CODED_DIM + 1, 2)
    return not_known(attention, None, {"sliding_window": window}, kind) is None and attention.head_dim in sizes


def _alike(group: list[Linear], dtype: torch.dtype) -> bool:
    """Whether these layers can be one product, of inputs in ``dtype``."""
    kinds = {(type(layer), layer.weight.dtype, layer.bias is None) for layer in group}
    return len(set(group)) == len(group) and len(kinds) == 1 and all(_reads(layer, dtype) for layer in group)


def _reads(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the library multiplies a layer's weights by inputs of ``dtype``."""
    if not packable(layer):
        return False
    return dtype == (layer.dtype if isinstance(layer, QuantisedLinear) else layer.weight.dtype)
