"""A decoder layer of the Llama family in few calls, on a CPU with packed products.

transformers' layer makes many small calls besides its products, and passes a dozen modules. In a step of a small
model that takes as long as the products. The fused layer computes the same in two calls besides attention with the
native library, else in some twenty: norms, cache and attention are those of every pass, and keys and queries are
rotated together.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from decoder.backends import attention as attention_kernel
from decoder.backends.attention import (
    AttentionShape,
    TextInPass,
    attend_natively,
    more_than_causal,
    tree_attention,
)
from decoder.backends.native.activations import silu
from decoder.backends.native.int4 import Int4Linear
from decoder.backends.native.native_layer import NativeLayer, NativeScratch, native_weights
from decoder.backends.native.norms import FusedNorm, fused_norm, looks_like_rms_norm
from decoder.backends.native.packed_linear import PackedLinears, joined
from decoder.backends.native.quantised import QuantisedLinear
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.full import FullCache
from decoder.work import finish

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LAYERS = {(f"transformers.models.{name}.modeling_{name}", f"{name.capitalize()}DecoderLayer") for name in FAMILIES}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS_OF_HEADS = {"q_norm", "k_norm"}
# Largest norm of the errors as a share of that of the results.
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2**-4}
_LENGTH, _TOKENS = 3, 5  # of the test: cached and new tokens


class Angles:
    """The cosines and sines of a pass, as all fused layers of a model use them."""

    def __init__(self) -> None:
        self._given: torch.Tensor | None = None
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, D] both, from [1, T, D]: the sines of a head's first half are negated."""
        if self._made is None or self._given is not sin:
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
            self._given, self._made = sin, (cos[0, :, None], signed[:, None])
        return self._made


class FusedLayer:
    """The forward of one decoder layer, for passes over one row of tokens without gradients.

    Args:
        layer: the layer, whose products are packed.
        angles, scratch: shared by the layers of a model.

    Attributes:
        native: the layer in two calls of the native library, for hidden states of ``native_dtype``; None without one.
    """

    def __init__(self, layer: Any, angles: Angles, scratch: NativeScratch):
        attention = layer.self_attn
        self.attention, self._angles, self.scratch = attention, angles, scratch
        self._norm_in, self._norm_between = map(fused_norm, (layer.input_layernorm, layer.post_attention_layernorm))
        self.products: dict[str, PackedLinears] = {}
        for name, owner, parts in _products(layer):
            product = joined([owner._modules[part] for part in parts])
            assert product is not None
            self.products[name] = product
        self._dim = attention.head_dim
        queries, keys, _ = self.products["qkv"].sizes
        self._heads, self._kv_heads = queries // self._dim, keys // self._dim
        self._rotated = self._heads + self._kv_heads
        self._head_norm: FusedNorm | None = None
        if "q_norm" in attention._modules:
            weights = [
                norm.weight.detach().expand(count, -1)
                for norm, count in ((attention.q_norm, self._heads), (attention.k_norm, self._kv_heads))
            ]
            self._head_norm = FusedNorm(torch.cat(weights), attention.q_norm.variance_epsilon)

        self.native: NativeLayer | None = None
        self.native_dtype: torch.dtype | None = None
        native = native_weights(self.products, layer.input_layernorm.weight.dtype)
        # An eps of its own for each norm would need another kernel.
        if native is not None and self._norm_in.eps == self._norm_between.eps:
            norms, sizes = (self._norm_in, self._norm_between), (self._heads, self._kv_heads, self._dim)
            self.native_dtype = layer.input_layernorm.weight.dtype
            self.native = NativeLayer(native, norms, self._head_norm, *sizes, scratch)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: LayeredCache | FlattenedCaches | None = None,
        use_cache: bool = True,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **of_attention,
    ) -> torch.Tensor:
        """As the layer's own forward: hidden states [1, T, d] of T tokens to those behind the layer."""
        assert position_embeddings is not None and past_key_values is not None and attention_mask is None
        tokens, layer = hidden_states.shape[1], self.attention.layer_idx
        native_layer = self.native if hidden_states.dtype == self.native_dtype else None
        if native_layer is not None:
            turned = heads = native_layer.before_attention(hidden_states, position_embeddings)
        else:
            heads = self.products["qkv"].product(self._norm_in(hidden_states)).view(tokens, -1, self._dim)
            turned = self._turned(heads.narrow(1, 0, self._rotated), *self._angles.of(*position_embeddings))
        by_head = turned[None].transpose(1, 2)
        key = by_head.narrow(1, self._heads, self._kv_heads)
        value = heads[None].transpose(1, 2).narrow(1, self._rotated, self._kv_heads)
        keys, values = past_key_values.update(key, value, layer)
        if of_attention["texts"][0].native is not None and of_attention.get("queries") is None:
            given = turned, self._heads, keys, values, self.attention.scaling
            attended = attend_natively(of_attention["texts"], *given)
        else:
            query = by_head.narrow(1, 0, self._heads)
            scaling = self.attention.scaling
            attended = tree_attention(self.attention, query, keys, values, None, scaling, **of_attention)[0]
        if native_layer is not None:
            return native_layer.behind_attention(attended, hidden_states)
        hidden = self.products["o"].product(attended.view(1, tokens, -1)).add_(hidden_states)
        gate, up = self.products["gate_up"].product(self._norm_between(hidden)).chunk(2, -1)
        return self.products["down"].product(silu(gate).mul_(up)).add_(hidden)

    @property
    def kind(self) -> Hashable:
        """What tells fused layers apart besides the modules of the layer."""
        kinds = tuple(product.kind for product in self.products.values())
        return self.attention.scaling, self.native is not None, kinds

    def _turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries and keys [T, heads, D], rotated by their positions.

        Each product and sum is an operation of its own, so that it is rounded alike wherever it stands.
        """
        if self._head_norm is not None:
            heads = self._head_norm(heads)
        return (heads * cos).add_(heads.roll(self._dim // 2, -1).mul_(sin))


def _products(layer: Any) -> list[tuple[str, Any, tuple[str, ...]]]:
    return [
        ("qkv", layer.self_attn, ("q_proj", "k_proj", "v_proj")),
        ("o", layer.self_attn, ("o_proj",)),
        ("gate_up", layer.mlp, ("gate_proj", "up_proj")),
        ("down", layer.mlp, ("down_proj",)),
    ]


def fusible(layer: Any) -> bool:
    """Whether a module is a layer of a known family, with packed products and nothing of the user's in it."""
    if (type(layer).__module__, type(layer).__name__) not in _LAYERS:
        return False
    if not isinstance(layer.__dict__.get("forward"), FusedLayer | None):
        return False
    # The user may have put another forward in a class's place, or a hook on all modules.
    others = (getattr(type(one).forward, "__module__", None) != type(one).__module__ for one in layer.modules())
    if any(others) or _has_any_global_hook():
        return False
    within = [module for module in layer.modules() if module is not layer]
    if any(
        "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in within
    ):
        return False
    if layer._modules.keys() != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if attention._modules.keys() not in (_ATTENTION, _ATTENTION | _NORMS_OF_HEADS):
        return False
    if mlp._modules.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention._modules[name] for name in _NORMS_OF_HEADS if name in attention._modules]
    # What transformers' layers of these families hand to attention.
    window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return (
        more_than_causal(attention, None, {"sliding_window": window}) is None
        and all(looks_like_rms_norm(norm) and norm.weight.dtype == norms[0].weight.dtype for norm in norms)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and attention.head_dim % 2 == 0
        and all(joined([owner._modules[part] for part in parts]) for _, owner, parts in _products(layer))
    )


def fused_layers(modules: Iterable[nn.Module]) -> dict[nn.Module, FusedLayer]:
    """Forwards for those ``modules`` that are `fusible`."""
    angles, scratch = Angles(), NativeScratch()
    return {module: FusedLayer(module, angles, scratch) for module in modules if fusible(module)}


@torch.inference_mode()
@torch.autocast("cpu", enabled=False)
def fused_layer_fault(layer: Any, fused: FusedLayer) -> str | None:
    """Compare both forwards, with our attention, over a cache of random pairs; what is wrong, in words."""
    generator = torch.Generator().manual_seed(0)
    dtype = layer.input_layernorm.weight.dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    size, dim = len(layer.input_layernorm.weight), fused.attention.head_dim
    hidden = random(1, _TOKENS, size)
    # The halves of a head get angles of their own, so that a rotation of other pairs shows.
    angles = random(1, _TOKENS, dim), random(1, _TOKENS, dim)
    keys, values = (random(1, 1, count // dim, _LENGTH, dim) for count in fused.products["qkv"].sizes[1:])
    shape = AttentionShape(fused._heads, keys.shape[2], dim, values.shape[4], dtype)
    config = fused.attention.config
    implementation, index = config._attn_implementation, fused.attention.layer_idx

    def run(forward) -> tuple[torch.Tensor, ...]:
        cache = FullCache(_LENGTH + _TOKENS)
        cache.prepare(index + 1)
        finish(
            cache.beginning_with(
                [pairs.expand(index + 1, -1, -1, -1, -1) for pairs in (keys, values)], shape, keys.device
            )
        )
        cache.begin(_TOKENS)
        text = TextInPass(_TOKENS)
        output = forward(hidden, past_key_values=cache, position_embeddings=angles, texts=[text])
        return output, cache.keys[index], cache.values[index]

    config._attn_implementation = attention_kernel.NAME
    try:
        expected = run(type(layer).forward.__get__(layer))
    finally:
        config._attn_implementation = implementation
    # transformers' forward multiplies codes by PyTorch's kernel, which rounds inputs and outputs. Products with
    # quantised weights round inputs, and one that is off by a rounding may be rounded to its neighbour.
    rounds = any(isinstance(module, Int4Linear | QuantisedLinear) for module in layer.modules())
    allowed = _ALLOWED[torch.bfloat16 if rounds else dtype]
    for name, mine, theirs in zip(("hidden states", "keys", "values"), run(fused), expected, strict=True):
        error = float((mine - theirs).double().norm() / theirs.double().norm())
        if not error <= allowed:
            return f"the {name} of a {type(layer).__name__} are off by {error:.2g} of their norm"
    return None
