"""Bitwise decoding: whether a model's logits can have the same bits whatever else is in a pass, and what that takes.

The bits of a token's logits are then a function of the model, its dtype, the device with its number of threads, the
libraries, and the tokens before it. So verification, plain decoding and prefill agree to the last bit, and rounding
never decides between two tokens whose scores are nearly equal.
"""

import logging
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from decoder.kernels.bitwise_attention import Rule
from decoder.kernels.fast_paths import BITWISE, fault_of
from decoder.kernels.packed_linear import product_of, under_autocast
from decoder.model import bitwise_test

if TYPE_CHECKING:
    from decoder.model.target import Target

BitwiseSetting = bool | Literal["auto"]
_log = logging.getLogger(__name__)


class PassRule(NamedTuple):
    """What every pass must obey so that the bits of its rows are independent of each other.

    Attributes:
        attention: the rule for the products in attention.
        least: the least number of tokens in a pass; a shorter pass is padded.
        multiple: the number of tokens in a pass is padded to a multiple of this one,
        free: or to one of these numbers.
        most: the largest number of tokens in a pass, None if there is no limit; prompts are split and trees pruned.
    """

    attention: Rule
    least: int = 1
    multiple: int = 1
    free: frozenset[int] = frozenset()
    most: int | None = None

    def padding(self, count: int) -> int:
        """How many tokens are added to a pass of ``count``."""
        padded = max(count, self.least)
        while padded % self.multiple and padded not in self.free:
            padded += 1
        return padded - count


# Results for each model, so that several decoders of one model test it once.
_found: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, PassRule | None, str]] = WeakKeyDictionary()

# The (least, multiple, most) to try, the cheapest first. oneDNN splits the sum of a single row. FBGEMM takes rows in
# blocks of about six, and sums in another order in a block of one or two rows, which no multiple of three leaves over.
# With the last one all passes have the same width.
_WIDTHS = ((1, 1, None), (2, 1, None), (3, 3, None), (4, 4, None), (8, 8, None), (16, 16, 16))


class Bitwise:
    """Finds the `PassRule` for a target, and again whenever something that it depends on has changed.

    Args:
        target: the model.
        wanted: whether bitwise decoding is on. "auto" switches it off if no rule holds, with the reason in ``reason``
            and the log, and in float64, whose roundings are too small to matter. True raises ValueError instead.

    Attributes:
        rule: the rule, None while bitwise decoding is off.
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
        """Test again if what a pass runs has changed since the last test: layers, hooks, dtype, threads, fast paths.

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
        if self.rule is None and self.wanted is True:
            self._tested = None
            raise ValueError(f"bitwise cannot be had here: {self.reason}; leave it at 'auto' or switch it off")
        self._target.paths.enter(BITWISE, self.rule is not None, self.reason)

    def _state(self) -> Hashable:
        target = self._target
        replacements = target.replacements().layers

        def of(module: torch.nn.Module) -> Hashable:
            weight = getattr(module, "weight", None)
            hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
            # Which library packs a product follows from the values of its weights.
            other = replacements.get(module)
            runs = getattr(product_of(other) or other, "kind", type(other))
            return id(module), type(module), id(module.__dict__.get("forward")), hooks, type(weight), runs

        around = torch.get_num_threads(), under_autocast(), target.recorder is not None
        return *around, target.lm_head.weight.dtype, tuple(map(of, target.model.modules()))

    def _find(self) -> tuple[PassRule | None, str]:
        """The cheapest rule that passes all tests, with a description; or None, with what was wrong."""
        target = self._target
        if target.device.type != "cpu" or target.recorder is not None:
            return None, "on a CPU only"
        if under_autocast():
            return None, "autocast chooses dtypes by itself"
        if target.ranks.size > 1:
            return None, "sums over processes that share a model have an order of their own"
        if any(isinstance(module._modules.get("experts"), torch.nn.Module) for module in target.model.modules()):
            return None, "a mixture of experts gives each of them another number of rows in every pass"
        if target.lm_head.weight.dtype == torch.float64 and self.wanted == "auto":
            return None, "float64 is left as it is: its roundings are too small to meet a tie"
        attention, fault = bitwise_test.attention_rule(
            target.attention_shape._replace(dtype=target.lm_head.weight.dtype)
        )
        if attention is None:
            return None, fault
        for least, multiple, most in _WIDTHS:
            rule = PassRule(attention, least, multiple, most=most)
            fault = fault_of(partial(bitwise_test.products_fault, target, rule))
            if fault is None:
                if multiple > 1 and most is None:
                    rule = rule._replace(free=bitwise_test.free_counts(target, rule))
                # The passes of this test must obey the rule.
                self.rule = rule
                fault = fault_of(partial(bitwise_test.model_fault, target))
                self.rule = None
            if fault is None:
                width = f"{most} tokens in each pass" if most else f"{least} tokens or more in a pass"
                if multiple > 1 and not most:
                    width = f"a multiple of {multiple} tokens in a pass, or one of {len(rule.free)} other numbers"
                return rule, f"{width}, rows by {attention.multiple} in attention"
        return None, fault
