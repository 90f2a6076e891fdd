"""Which layers go on from a state in the native library: what it reads of transformers' modules.

Each is a convolution over the last tokens and, but for those that are nothing else, a state [key size, value size] for
each head, which decays and to which each token adds the product of a key and a value. One that is not here runs through
its own module in the reference.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from decoder.backends.native.packed_linear import Linear
from decoder.backends.native.structures import MOST_WIDTH


class MixerParts(NamedTuple):
    """What the library reads of a layer; channels are queries and keys, in Mamba C and B, and values.

    Attributes:
        inputs, gates, out: the products, of layers that read the same; of no gates where the inputs have them, too.
        keys, values: how many heads there are; without keys there is nothing behind the convolution.
        key_dim, dim: of what sizes.
        places: where in a token's inputs the heads of queries, keys, values, gates, decays, rates and what values are
            multiplied by stand; those of decays and rates in the gates, if there are any.
        conv, bias: of the convolution, [channels, width] and [channels].
        decay, decay_bias: by head; a state is multiplied by exp(decay softplus(input + decay_bias)).
        skip: by head how much of the values is added.
        norm: its weights, [values x dim].
        eps, group: of the norm, and how many numbers are normalised together; 0 without a norm.
        delta: whether values are corrected by what is stored under their keys.
        gates_first: whether gates come before the norm.
        known: whether nothing in it is set to what the library does not do.
    """

    inputs: list[Linear]
    gates: list[Linear]
    out: Linear
    keys: int
    values: int
    key_dim: int
    dim: int
    places: Sequence[Sequence[int]]
    conv: torch.Tensor
    bias: torch.Tensor | None
    decay: torch.Tensor | None = None
    decay_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float = 0.0
    group: int = 0
    delta: bool = False
    gates_first: bool = False
    known: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """What is the same for all such layers of a model."""
        return self.keys, self.values, self.key_dim, self.dim, self.conv.shape[1]


def _heads(count: int, size: int, first: int = 0) -> list[int]:
    """Where heads of a size stand, one behind the other."""
    return list(range(first, first + count * size, size))


def _delta_rule(module: Any, inputs: list[Linear], gates: list[Linear], places: Sequence[Sequence[int]]) -> MixerParts:
    decay = -module.A_log.detach().float().exp()
    norm = module.norm.weight.detach().repeat(module.num_v_heads)
    return MixerParts(
        inputs,
        gates,
        module.out_proj,
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.head_v_dim,
        [*places, [0] * module.num_v_heads],
        module.conv1d.weight.detach()[:, 0],
        module.conv1d.bias,
        decay,
        module.dt_bias,
        norm=norm,
        eps=module.norm.variance_epsilon,
        group=module.head_v_dim,
        delta=True,
        known=module.activation in ("silu", "swish") and module.norm.activation == "silu",
    )


def _gated_delta_net(module: Any) -> MixerParts:
    """Qwen3.5's: queries, keys, values and gates one behind the other."""
    key_size, keys, values, size = module.head_k_dim, module.num_k_heads, module.num_v_heads, module.head_v_dim
    of_values = 2 * keys * key_size
    places = [
        _heads(keys, key_size),
        _heads(keys, key_size, keys * key_size),
        _heads(values, size, of_values),
        _heads(values, size, of_values + values * size),
        _heads(values, 1, values),
        _heads(values, 1),
    ]
    inputs = [module.in_proj_qkv, module.in_proj_z]
    return _delta_rule(module, inputs, [module.in_proj_b, module.in_proj_a], places)


def _grouped_delta_net(module: Any) -> MixerParts:
    """Qwen3-Next's: by head of keys its queries, keys, values and gates."""
    key_size, keys, size = module.head_k_dim, module.num_k_heads, module.head_v_dim
    each = module.num_v_heads // keys
    width = 2 * key_size + 2 * each * size

    def by_key(first: int, step: int, stride: int) -> list[int]:
        return [key * stride + first + value * step for key in range(keys) for value in range(each)]

    places = [
        _heads(keys, width),
        _heads(keys, width, key_size),
        by_key(2 * key_size, size, width),
        by_key(2 * key_size + each * size, size, width),
        by_key(each, 1, 2 * each),
        by_key(0, 1, 2 * each),
    ]
    return _delta_rule(module, [module.in_proj_qkvz], [module.in_proj_ba], places)


def _mamba2(module: Any) -> MixerParts:
    """Mamba2, whose inputs are gates, values, B, C and time steps."""
    keys, key_size, values, size = module.n_groups, module.ssm_state_size, module.num_heads, module.head_dim
    inner, of_keys = values * size, keys * key_size
    places = [
        _heads(keys, key_size, 2 * inner + of_keys),
        _heads(keys, key_size, 2 * inner),
        _heads(values, size, inner),
        _heads(values, size),
        _heads(values, 1, 2 * (inner + of_keys)),
        *[[0] * values] * 2,
    ]
    # Its channels are values, B and C.
    x, b, c = torch.arange(inner + 2 * of_keys).split([inner, of_keys, of_keys])
    order = torch.cat((c, b, x))
    bias, limits = module.conv1d.bias, tuple(module.time_step_limit)
    return MixerParts(
        [module.in_proj],
        [],
        module.out_proj,
        keys,
        values,
        key_size,
        size,
        places,
        module.conv1d.weight.detach()[order, 0],
        None if bias is None else bias.detach()[order],
        -module.A_log.detach().float().exp(),
        module.dt_bias,
        skip=module.D,
        norm=module.norm.weight.detach(),
        eps=module.norm.variance_epsilon,
        group=module.norm.group_size,
        gates_first=True,
        # With limits the tokens of a prompt are computed in another way than those behind it.
        known=module.activation in ("silu", "swish") and limits == (0.0, math.inf),
    )


def _short_convolution(module: Any) -> MixerParts:
    """LFM2's, whose inputs are B, C and values: C times the convolution of B times the values."""
    size, heads = module.out_proj.in_features, module.config.num_attention_heads
    dim = size // heads
    empty: list[int] = []
    places = [
        *(empty, empty),
        _heads(heads, dim, 2 * size),
        _heads(heads, dim, size),
        *[[0] * heads] * 2,
        _heads(heads, dim),
    ]
    return MixerParts(
        *([module.in_proj], [], module.out_proj, 0, heads, 0, dim, places),
        module.conv.weight.detach()[:, 0],
        module.conv.bias,
        known=size % heads == 0,
    )


MIXERS: dict[str, Callable[[Any], MixerParts]] = {
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
    "Qwen3NextGatedDeltaNet": _grouped_delta_net,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
}
"""By class, what the library reads of a module."""


def knows(parts: MixerParts) -> bool:
    """Whether the library computes what a module does."""
    return parts.known and parts.conv.shape[1] <= MOST_WIDTH and (not parts.keys or parts.values % parts.keys == 0)
