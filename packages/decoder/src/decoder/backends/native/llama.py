"""Which models the native library runs as a whole: those of the Llama family, as transformers has them.

Their layers are root-mean-square norms, rotary attention and a gated SiLU or GELU or experts, with or without biases,
sinks, norms of heads and norms of what is added.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from decoder.backends.attention import not_known
from decoder.backends.native import library as native
from decoder.backends.native.experts import block_of
from decoder.backends.native.int4 import Int4Linear
from decoder.backends.native.native_layer import norms_of
from decoder.backends.native.packed_linear import Linear, packable
from decoder.backends.native.quantised import QuantisedEmbedding, QuantisedLinear
from decoder.backends.norms import eps_of, looks_like_rms_norm
from decoder.cache.layout import FULL, LayerKind

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "glm4_moe", "gpt_oss")
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS_OF_HEADS = {"q_norm", "k_norm"}
_ACTIVATIONS = ("SiLU", "SiLUActivation", "GELUTanh")


def _is_of(module: nn.Module, *parts: str) -> bool:
    """Whether a module is the one of that name that transformers has for a family, such as ``DecoderLayer``."""
    found = type(module).__module__, type(module).__name__
    names = {
        (f"transformers.models.{name}.modeling_{name}", f"{name.title().replace('_', '')}{part}")
        for name in _FAMILIES
        for part in parts
    }
    return found in names


def runs_as_a_whole(model: PreTrainedModel, dtype: torch.dtype, kinds: Sequence[LayerKind]) -> bool:
    """Whether a model is of these families, all in ``dtype``, with nothing of the user's around or in its layers.

    ``kinds`` are those of its layers.
    """
    decoder: Any = model.get_decoder()
    if not (_is_of(model, "ForCausalLM") and _is_of(decoder, "Model", "TextModel") and native.multiplies(dtype)):
        return False
    layers, embeddings = list(decoder.layers), decoder.embed_tokens
    plain = not _has_any_global_hook() and len(layers) == decoder.config.num_hidden_layers
    of_embeddings = embeddings.dtype if isinstance(embeddings, QuantisedEmbedding) else embeddings.weight.dtype
    if not plain or of_embeddings != dtype:
        return False
    around = [model, decoder, *layers]
    if any("forward" in one.__dict__ or one._forward_hooks or one._forward_pre_hooks for one in around):
        return False
    pairs = list(zip(layers, kinds, strict=True))
    if not all(known_layer(layer, dtype, kind) for layer, kind in pairs):
        return False
    shapes = {(layer.self_attn.head_dim, layer.self_attn.scaling) for layer in layers}
    return len(shapes) == 1 and _turns_all(decoder.rotary_emb, layers[0].self_attn.head_dim)


def _turns_all(rotary: Any, dim: int) -> bool:
    """Whether all numbers of a head are rotated."""
    frequencies = [own for name, own in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    return all(2 * len(own) == dim for own in frequencies)


def known_layer(layer: Any, dtype: torch.dtype, kind: LayerKind = FULL) -> bool:
    """Whether a module is a layer of these families with nothing of the user's in it, which the library multiplies."""
    if not _is_of(layer, "DecoderLayer"):
        return False
    # The user may have put another forward in a class's place, or in a module's.
    others = (getattr(type(one).forward, "__module__", None) != type(one).__module__ for one in layer.modules())
    within = [module for module in layer.modules() if module is not layer]
    if any(others) or any(
        "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in within
    ):
        return False
    if layer._modules.keys() != {"self_attn", "mlp", *norms_of(layer)}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if attention._modules.keys() not in (_ATTENTION, _ATTENTION | _NORMS_OF_HEADS):
        return False
    if not (_known_experts(mlp, dtype) if "experts" in mlp._modules else _known_mlp(layer)):
        return False
    norms = [layer.get_submodule(name) for name in norms_of(layer)]
    # An eps of its own for each norm would need another kernel.
    if not all(looks_like_rms_norm(norm) for norm in norms) or len({eps_of(norm) for norm in norms}) > 1:
        return False
    norms += [attention._modules[name] for name in _NORMS_OF_HEADS if name in attention._modules]
    # What transformers' layers of these families hand to attention.
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return (
        not_known(attention, None, {"sliding_window": window}, kind) is None
        and all(looks_like_rms_norm(norm) and _norms_in(norm, dtype) for norm in norms)
        and attention.head_dim % 2 == 0
        and all(_alike(group, dtype) for group in groups_of(layer))
    )


def _norms_in(norm: Any, dtype: torch.dtype) -> bool:
    """Whether a norm gives what it is given, in ``dtype``; gpt-oss keeps the weights of most in float32."""
    return norm.weight.dtype in (dtype, torch.float32 if type(norm).__name__ == "GptOssRMSNorm" else dtype)


def _known_mlp(layer: Any) -> bool:
    """Whether a layer has one gated product behind attention."""
    mlp, inputs = layer.mlp, layer.self_attn.q_proj.in_features
    return (
        mlp._modules.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and type(mlp.act_fn).__name__ in _ACTIVATIONS
        # Where gate and up are to stand, rows wait for the norm behind attention.
        and (len(norms_of(layer)) == 2 or 2 * mlp.gate_proj.out_features >= inputs)
    )


def _known_experts(mlp: Any, dtype: torch.dtype) -> bool:
    """Whether a module is a block of experts of these families, all in ``dtype``."""
    block = block_of(mlp) if _is_of(mlp, "SparseMoeBlock", "MoE", "MLP") else None
    return block is not None and block.dtypes == {dtype}


def products_of(layer: Any) -> Iterator[tuple[str, list[Linear]]]:
    """The products of a layer by their names in the library's `Layer`, each of linear layers that read the same."""
    attention, mlp = layer.self_attn, layer.mlp
    yield "qkv", [attention.q_proj, attention.k_proj, attention.v_proj]
    yield "o", [attention.o_proj]
    if "experts" not in mlp._modules:
        yield "gate_up", [mlp.gate_proj, mlp.up_proj]
        yield "down", [mlp.down_proj]


def groups_of(layer: Any) -> list[list[Linear]]:
    """The linear layers of a layer, those of one product together."""
    block = block_of(layer.mlp)
    return [group for _, group in products_of(layer)] + (block.groups if block is not None else [])


def _alike(group: list[Linear], dtype: torch.dtype) -> bool:
    """Whether these layers can be one product, of inputs in ``dtype``."""
    kinds = {(type(layer), layer.weight.dtype, layer.bias is None) for layer in group}
    return len(set(group)) == len(group) and len(kinds) == 1 and all(_reads(layer, dtype) for layer in group)


def _reads(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the library multiplies a layer's weights by inputs of ``dtype``."""
    if not packable(layer):
        return False
    if isinstance(layer, Int4Linear):
        return dtype == (torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32)
    return dtype == (layer.dtype if isinstance(layer, QuantisedLinear) else layer.weight.dtype)
