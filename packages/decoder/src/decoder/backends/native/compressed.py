"""Multi-head latent attention over compressed keys as they are kept, with products of the library.

A layer makes keys and values of all heads from a compressed row of each token, linearly. So the product of a query with
a key is that of the query, sent through the transposed matrix of its head, with the row; and the weighted sum of values
is that of rows, sent through the other matrix (DeepSeek-V2, arXiv 2405.04434, section 2.1). Nothing is made anew of the
whole text in a pass.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from decoder.backends.base import BackendFault
from decoder.backends.forwards import is_changed
from decoder.backends.latent import is_latent
from decoder.backends.memory import available_memory
from decoder.backends.native import library as native
from decoder.backends.native.packed_linear import SHARE, PackedCopy, fingerprint_of, packable, renewed
from decoder.backends.native.packed_weight import Fp32Weight, NativeWeight, bf16_holds
from decoder.backends.native.quantised import QuantisedLinear
from decoder.backends.native.structures import PackedWeight
from decoder.work import Progress, Work

_EACH = 16  # tokens that take about as long as packing the matrices of a layer


class _ByHead(NamedTuple):
    """A product for each head: of [H, T, in] to [H, T, out], each head with a matrix of its own."""

    each: list[NativeWeight]
    given: Any  # an array of what the library reads

    @classmethod
    def of(cls, weights: Iterable[torch.Tensor]) -> "_ByHead":
        """Of matrices [H, out, in]: float32 ones where some are no bfloat16 numbers, since one call takes one kind."""
        joined = torch.stack(list(weights))
        kind = NativeWeight if bf16_holds(joined.flatten(0, 1)) else Fp32Weight
        each = [kind(weight.contiguous(), None) for weight in joined]
        return cls(each, (PackedWeight * len(each))(*(one.product for one in each)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        heads, rows, _ = x.shape
        dtype = self.each[0].dtype
        x = x.to(dtype).contiguous()
        out = x.new_empty(heads, rows, self.given[0].outputs)
        is_bf16 = dtype == torch.bfloat16
        native.library().linear_each(self.given, heads, x.data_ptr(), rows, is_bf16, out.data_ptr(), native.threads())
        return out


class PackedExpansion(PackedCopy):
    """The forward of an attention layer that keeps compressed keys, with its ``kv_b_proj`` by head.

    Attributes:
        held: what compresses queries, and what restores values.
    """

    held: tuple[_ByHead, _ByHead]

    def _fingerprint_of(self, given: Any) -> list[torch.Tensor]:
        self._of = ref(given)  # by which the packed copy is found: it must not keep it
        return fingerprint_of([given.kv_b_proj])

    def _pack(self, given: Any) -> None:
        layer = given.kv_b_proj
        self._nope, rank = given.qk_nope_head_dim, given.kv_lora_rank
        if isinstance(layer, QuantisedLinear):
            weight = layer.rows(torch.arange(layer.out_features)).to(layer.dtype)
        else:
            weight = layer.weight.detach()
        by_head = weight.view(-1, self._nope + given.v_head_dim, rank)
        keys, values = by_head.split([self._nope, given.v_head_dim], 1)
        self.held = _ByHead.of(keys.transpose(1, 2)), _ByHead.of(values)
        self.kind = type(self.held[0].each[0])

    @property
    def _layer(self) -> Any:
        return self._of()

    def forward(self, *args: Any, **named: Any) -> Any:
        layer = self._layer
        layer.expand_kv = _as_kept
        try:
            return type(layer).forward(layer, *args, **named, compressed=self)
        finally:
            del layer.expand_kv

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """That of ``kv_b_proj`` by PyTorch, where something beside attention calls it, as ranking keys does."""
        weight = self._layer.kv_b_proj
        return type(weight).forward(weight, x)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """See `Compressed`."""
        own, turned = query[0].split([self._nope, query.shape[-1] - self._nope], -1)
        return torch.cat((self.held[0](own).to(query.dtype), turned), -1)[None]

    def entries(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Compressed`."""
        rank, size = key.shape[3], key.shape[3] + value.shape[3]
        step = key.stride(2)
        if step == value.stride(2) == size and value.data_ptr() == key.data_ptr() + rank * key.itemsize:
            whole = key.as_strided((*key.shape[:3], size), (*key.stride()[:2], step, 1))
        else:
            whole = torch.cat((key, value), -1)
        return whole, whole[..., :rank]

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """See `Compressed`."""
        return self.held[1](attended[0].transpose(0, 1)).to(attended.dtype).transpose(0, 1)[None].contiguous()


def _as_kept(key: Any, value: Any) -> tuple[Any, Any]:
    return key, value


_packed: WeakKeyDictionary[nn.Module, PackedExpansion] = WeakKeyDictionary()


def expanding(modules: Iterable[Any]) -> list[Any]:
    """The attention layers that keep compressed keys, if their ``kv_b_proj`` is one that the library can multiply."""
    latent = [module for module in modules if is_latent(module) and not is_changed(module)]
    latent = [module for module in latent if not is_changed(module.kv_b_proj)]
    return [module for module in latent if packable(module.kv_b_proj) and module.kv_b_proj.bias is None]


def packing_expansions(layers: Sequence[Any]) -> Work[dict[nn.Module, Callable]]:
    """Forwards for layers that `expanding` gave and for the matrices that they hold by head.

    Raises:
        BackendFault: the copies would take more than half of the available memory.
    """
    matrices = [layer.kv_b_proj for layer in layers if layer not in _packed]
    new = sum(one.out_features * one.in_features * torch.float32.itemsize for one in matrices)
    if new > SHARE * available_memory(torch.device("cpu")):
        raise BackendFault("there is no memory for a copy by head of the matrices that expand keys and values")
    found: dict[nn.Module, Callable] = {}
    for number, layer in enumerate(layers, start=1):
        packed = renewed(_packed, layer, PackedExpansion)
        found[layer], found[layer.kv_b_proj] = packed.forward, packed.product
        yield Progress(_EACH, _EACH * (len(layers) - number))
    return found
