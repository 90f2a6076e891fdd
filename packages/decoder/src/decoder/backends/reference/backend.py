"""The backend that runs everywhere: every dtype, every device; slow, and right up to rounding.

Only weights that the native library keeps in a file's format are restored by that library.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from decoder.backends.attention import Scores
from decoder.backends.base import Forwards, PassBackend, PassBatch, PassOutput, PassRule
from decoder.backends.forwards import under_autocast
from decoder.backends.memory import floats
from decoder.backends.modules import ModulePass, one_sequence_at_a_time
from decoder.backends.native.quantised import QuantisedLinear
from decoder.backends.reference.attention import Masked
from decoder.backends.reference.mixers import token_by_token
from decoder.cache.base import LayeredCache
from decoder.cache.recurrent import CHANGED, NodeStates
from decoder.work import Work

if TYPE_CHECKING:
    from decoder.model.target import Target

_PART, _MOST = 32, 127  # inputs that are rounded together, and the largest whole number
_AT_ONCE = 2**18  # weights that are restored at a time


class Reference(PassBackend):
    """`PassBackend`: transformers' own modules, and `Masked` attention.

    Args:
        target: the model.
        why: why no other backend runs it, in words.
        restores: whether weights in formats of their own are restored, so that nothing is multiplied by what is to be
            compared with it.
    """

    name = "reference"
    covers = "transformers' own modules"

    def __init__(self, target: "Target", why: str = "", restores: bool = True):
        self._target, self._pass, self._why, self._restores = target, ModulePass(target), why, restores
        self.called: Forwards = {}

    def renewing(self) -> Work[None]:
        quantised = [one for one in self._target.modules if isinstance(one, QuantisedLinear) and self._restores]
        restored: Forwards = {one: partial(_restored, one) for one in quantised}
        casting = self._casting()
        self.called = {layer: one for layer, one in casting.items() if layer is self._target.lm_head}
        self._forwards = {
            **restored,
            **casting,
            **self._target.shared_layers().forwards({}),
            **token_by_token(self._target.mixers),
        }
        return
        yield

    def _casting(self) -> Forwards:
        """Linear layers of a model of several dtypes, such as norms in float32 beside products in bfloat16."""
        floating = {one.dtype for one in self._target.model.parameters() if one.is_floating_point()}
        linear = [one for one in self._target.modules if type(one) is nn.Linear] if len(floating) > 1 else []
        return {layer: partial(_cast, layer) for layer in linear}

    def prepare(self, cache: LayeredCache, count: int) -> None:
        cache.prepare(self._target.layout)
        cache.begin(count)

    def run(self, batch: PassBatch) -> PassOutput:
        if len(batch.sequences) > 1 and not self.flattens:
            return one_sequence_at_a_time(self, batch)
        device, new = self._target.device, []
        if self._target.mixers and under_autocast():
            raise ValueError(f"{self._target.name} has recurrent layers, which are not run under autocast")
        for sequence in batch.sequences:
            self.prepare(sequence.cache, len(sequence.tokens))
            if (recurrent := sequence.cache.recurrent) is not None:
                if not isinstance(recurrent, NodeStates):
                    raise ValueError(f"the layers of {self._target.name} {CHANGED}")
                recurrent.begin(sequence.parents, sequence.cache.held)
            new.append(Masked.of(sequence, device))
        return self._pass.run(batch, new, self._forwards)

    def run_asking(self, asked: dict[int, Scores], batch: PassBatch, compares_masks: bool) -> PassOutput:
        """`run`, of which ``asked`` is told by layer what it asks its attention for.

        Raises:
            ValueError: masks are compared, and one is another than the configuration says.
        """
        self._pass.asked, self._pass.compares_masks = asked, compares_masks
        try:
            return self.run(batch)
        finally:
            self._pass.asked, self._pass.compares_masks = None, False

    def rule(self, demanded: bool) -> tuple[PassRule | None, str]:
        return None, self._why

    def computed_by(self) -> str:
        return self.covers


def _cast(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A layer's outputs for inputs [..., in] of another dtype, in theirs."""
    return nn.functional.linear(x.to(layer.weight.dtype), layer.weight, layer.bias).to(x.dtype)


def _restored(layer: QuantisedLinear, x: torch.Tensor) -> torch.Tensor:
    """A layer's outputs for inputs [..., in], rounded as its products round them, with weights in single precision."""
    parts = x.float().unflatten(-1, (-1, _PART))
    steps = parts.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _MOST
    rounded = ((parts / steps).round() * steps).flatten(-2)
    # Some outputs at a time, whose weights stay in the processor's cache. They are restored in one place: parts of a
    # large matrix, if they came and went one by one, could take as much memory as the whole.
    some = torch.arange(layer.out_features).split(max(1, _AT_ONCE // layer.in_features))
    room, out = floats(len(some[0]), layer.in_features), rounded.new_empty(*x.shape[:-1], layer.out_features)
    for part in some:
        out[..., part[0] : part[-1] + 1] = nn.functional.linear(rounded, layer.rows(part, room[: len(part)]))
    return (out if layer.bias is None else out + layer.bias.float()).to(x.dtype)
