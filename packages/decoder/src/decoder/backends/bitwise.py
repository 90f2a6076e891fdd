"""Bitwise decoding: whether a model's logits can have the same bits whatever else is in a pass, and what that takes.

The bits of a token's logits are then a function of the model, its dtype, the device with its number of threads, the
libraries, and the tokens before it. So verification, plain decoding and prefill agree to the last bit, and rounding
never decides between two tokens whose scores are nearly equal.

On a CPU it comes from the native library, which sums each row of a product and each token's attention in an order of
their own. On CUDA all passes have one width.
"""

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from decoder.backends.base import PassRule
from decoder.backends.forwards import under_autocast

if TYPE_CHECKING:
    from decoder.model.target import Target

BitwiseSetting = bool | Literal["auto"]
_log = logging.getLogger(__name__)


# Results for each model, so that several decoders of one model test it once.
_found: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, PassRule | None, str]] = WeakKeyDictionary()


class Bitwise:
    """Finds the `PassRule` for a target, and again whenever something that it depends on has changed.

    Args:
        target: the model.
        wanted: whether bitwise decoding is on. "auto" switches it off if no rule holds, with the reason in ``reason``
            and the log. True raises ValueError instead.

    Attributes:
        rule: the rule, None while bitwise decoding is off.
        reason: why it is off, or which rule holds.
        holds: whether the bits are as promised: there is a rule, and nothing has changed under a running generation.
    """

    def __init__(self, target: "Target", wanted: BitwiseSetting = False):
        if not isinstance(wanted, bool) and wanted != "auto":
            raise ValueError(f"bitwise must be True, False or 'auto', not {wanted!r}")
        self._target, self.wanted = target, wanted
        self.rule: PassRule | None = None
        self.reason = "not asked for"
        self.holds = False
        self._tested: Hashable = None
        self._around: tuple = ()

    def refresh(self) -> None:
        """Test again if what a pass runs has changed since the last test: layers, hooks, dtype, threads, backend.

        Raises:
            ValueError: bitwise decoding is demanded, and no rule holds.
        """
        if not self.wanted:
            return
        state = self._state()
        if state != self._tested:
            self._tested, self.rule = None, None
            model = self._target.model
            tested, rule, reason = _found.get(model, (None, None, ""))
            if tested != (state, self.wanted):
                rule, reason = self._find()
                _found[model] = (state, self.wanted), rule, reason
            self._tested, self.rule, self.reason = state, rule, reason
            if rule is None:
                _log.info("bitwise is off: %s", reason)
        self.holds, self._around = self.rule is not None, _around()
        if not self.holds and self.wanted is True:
            self._tested = None
            raise ValueError(f"bitwise cannot be had here: {self.reason}; leave it at 'auto' or switch it off")

    def check(self) -> None:
        """Look, before a step, at what the user may change in a running generation: autocast, threads, TF32.

        Raises:
            ValueError: it has changed, and bitwise decoding is demanded. With "auto" it is off from then on.
        """
        if not self.holds or (now := _around()) == self._around:
            return
        names = ("the number of threads", "autocast", "TF32")
        changed = [name for name, old, new in zip(names, self._around, now, strict=True) if old != new]
        self.holds, self._tested = False, None
        self.reason = f"{' and '.join(changed)} changed while a text was generated"
        if self.wanted is True:
            raise ValueError(f"bitwise does not hold any more: {self.reason}; leave it as it was until the text ends")
        _log.warning("bitwise is off: %s", self.reason)

    def _state(self) -> Hashable:
        target = self._target
        return *_around(), target.backend.name, target.backend.covers, target.structure

    def _find(self) -> tuple[PassRule | None, str]:
        """The rule that holds, with a description; or None, with what is wrong."""
        target = self._target
        if under_autocast():
            return None, "autocast chooses dtypes by itself"
        if target.ranks.size > 1:
            return None, "sums over processes that share a model have an order of their own"
        return target.backend.rule(self.wanted is True)


def has_experts(model: torch.nn.Module) -> bool:
    """Whether a model chooses experts for each token."""
    return any(isinstance(module._modules.get("experts"), torch.nn.Module) for module in model.modules())


def rounds_to_tf32() -> bool:
    """Whether products of float32 numbers on CUDA are rounded to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _around() -> tuple[int, bool, bool]:
    """What the user may change around a pass."""
    return torch.get_num_threads(), under_autocast(), rounds_to_tf32()
