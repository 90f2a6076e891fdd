"""Whether a model's logits are the same bits whatever else is in a pass, and what its passes need for that.

The bits of a token's logits are then a function of the model, its dtype, the device with its number of threads, the
libraries, and the tokens before it: so verification, plain decoding and prefill agree to the last bit, and no tie can
turn a text.
"""

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from decoder.kernels.bitwise_attention import Rule
from decoder.kernels.fast_paths import BITWISE, fault_of
from decoder.kernels.packed_linear import under_autocast
from decoder.model import bitwise_test

if TYPE_CHECKING:
    from decoder.model.target import Target

BitwiseSetting = bool | Literal["auto"]
_log = logging.getLogger(__name__)


class PassRule(NamedTuple):
    """What passes must be like.

    Attributes:
        attention: of the products in attention.
        least: tokens of a pass; a shorter one is padded.
        most: tokens of a pass, None without bound: a prompt is cut, a tree cut off.
    """

    attention: Rule
    least: int = 1
    most: int | None = None


# Decoders of one model need not each test it.
_found: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, PassRule | None, str]] = WeakKeyDictionary()

# From the cheapest to what holds wherever one shape of a product gives one number: all passes of the same width.
_WIDTHS = ((1, None), (2, None), (16, 16))


class Bitwise:
    """Finds the rule of a target, again whenever something that it depends on has changed.

    Args:
        target: the model.
        wanted: "auto" leaves it off where it cannot be had, with the reason in ``reason`` and the log, and in float64,
            where roundings are too small to meet a tie; True raises ValueError.

    Attributes:
        rule: None while it is off.
        reason: why it is off, or which rule holds.
    """

    def __init__(self, target: "Target", wanted: BitwiseSetting = False):
        if wanted not in (True, False, "auto"):
            raise ValueError(f"bitwise must be True, False or 'auto', not {wanted!r}")
        self._target, self.wanted = target, wanted
        self.rule: PassRule | None = None
        self.reason = "not asked for"
        self._tested: Hashable = None

    def refresh(self) -> None:
        """Test anew if layers, hooks, dtype or the number of threads are others than when it was tested last.

        Raises:
            ValueError: it is wanted and cannot be had.
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
        if self.rule is None and self.wanted is True:
            self._tested = None
            raise ValueError(f"bitwise cannot be had here: {self.reason}; leave it at 'auto' or switch it off")
        self._target.paths.enter(BITWISE, self.rule is not None, self.reason)

    def _state(self) -> Hashable:
        def of(module: torch.nn.Module) -> Hashable:
            weight = getattr(module, "weight", None)
            hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
            return id(module), type(module), id(module.__dict__.get("forward")), hooks, type(weight)

        target = self._target
        around = torch.get_num_threads(), under_autocast(), target.recorder is not None
        return *around, target.lm_head.weight.dtype, tuple(map(of, target.model.modules()))

    def _find(self) -> tuple[PassRule | None, str]:
        """The cheapest rule that passes all tests, and its words; else what is wrong with the last one."""
        target = self._target
        if target.device.type != "cpu" or target.recorder is not None:
            return None, "on a CPU only"
        if under_autocast():
            return None, "autocast chooses dtypes by itself"
        if any(isinstance(module._modules.get("experts"), torch.nn.Module) for module in target.model.modules()):
            return None, "a mixture of experts gives each of them another number of rows in every pass"
        if target.lm_head.weight.dtype == torch.float64 and self.wanted == "auto":
            return None, "float64 is left as it is: its roundings are too small to meet a tie"
        attention, fault = bitwise_test.attention_rule(target.attention_shape)
        if attention is None:
            return None, fault
        for least, most in _WIDTHS:
            rule = PassRule(attention, least, most)
            fault = fault_of(lambda rule=rule: bitwise_test.products_fault(target, rule.least, rule.most))
            if fault is None:
                # The passes that are tested are run by it.
                self.rule = rule
                fault = fault_of(lambda rule=rule: bitwise_test.model_fault(target))
                self.rule = None
            if fault is None:
                width = f"{most} tokens in each pass" if most else f"{least} tokens or more in a pass"
                return rule, f"{width}, rows by {attention.multiple} in attention"
        return None, fault
