"""Experts with weights in the formats of GGUF files, which the native library multiplies as they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from decoder.backends.native.expert_products import ExpertProducts
from decoder.backends.native.quantised import QuantisedMatrix, QuantisedRows, QuantisedWeight

PARTS = ("gate", "up", "down")


class QuantisedExperts(nn.Module):
    """A stack of experts.

    Args:
        like: transformers' module for the same experts.
        matrices: by part, of `PARTS`, those of all experts, of one format each; without "up" where nothing is gated.
        biases: by part [experts, out]; without entries where experts have none.
        dtype: of inputs and outputs.

    Attributes:
        gating: how experts are gated, as `experts.gating_of` says.
    """

    like: torch.Tensor

    def __init__(
        self,
        like: Any,
        gating: dict[str, float],
        matrices: Mapping[str, Sequence[QuantisedMatrix]],
        biases: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ):
        super().__init__()
        self.gating, self._shapes = gating, {part: own[0].shape for part, own in matrices.items()}
        if "act_fn" in like._modules:
            self.act_fn = like.act_fn
        self._kinds = {part: own[0].kind for part, own in matrices.items()}
        for part, own in matrices.items():
            stacked = torch.stack([matrix.weight.data for matrix in own])
            self.register_parameter(part, nn.Parameter(stacked, requires_grad=False))
        for part, bias in biases.items():
            self.register_parameter(f"{part}_bias", nn.Parameter(bias.float(), requires_grad=False))
        # It follows conversions of the model, and so tells its dtype.
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""
        return self.like.dtype

    def products(self) -> ExpertProducts:
        """Those of all experts, which read the memory of the parameters."""
        parts, numbers = list(self._kinds), range(len(self.get_parameter(PARTS[0])))
        return ExpertProducts([[self._product(part, number) for part in parts] for number in numbers], self.gating)

    def _product(self, part: str, number: int) -> QuantisedWeight:
        bias = self._parameters.get(f"{part}_bias")
        weight, shape = self.get_parameter(part).data[number], self._shapes[part]
        of_bias = None if bias is None else bias.data[number]
        return QuantisedWeight([QuantisedRows(self._kinds[part], *shape, weight, of_bias, self.dtype)])

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts ``ids`` [T, k] of rows [T, d] give, times ``weights`` [T, k]."""
        return self.products()(hidden, ids, weights)

    def extra_repr(self) -> str:
        return ", ".join(f"{part}: {kind.name}" for part, kind in self._kinds.items())
