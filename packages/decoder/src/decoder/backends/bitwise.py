"""Bitwise decoding: whether a model's logits can have the same bits whatever else is in a pass, and what that takes.

The bits of a token's logits are then a function of the model, its dtype, the device with its number of threads, the
libraries, and the tokens before it. So verification, plain decoding and prefill agree to the last bit, and rounding
never decides between two tokens whose scores are nearly equal.

On a CPU it comes from the native library, which sums each row of a product and each token's attention in an order of
their own. On CUDA all passes have one width.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedModel

from decoder.backends import attention_check, bitwise_check
from decoder.backends.cuda.cublas import rounds_to_tf32
from decoder.backends.fast_paths import BITWISE, NATIVE, PACKED, RECORDED, fault_of
from decoder.backends.native import library as native
from decoder.backends.native.fused_layer import FusedLayer
from decoder.backends.native.packed_linear import product_of, under_autocast

if TYPE_CHECKING:
    from decoder.model.target import Target

BitwiseSetting = bool | Literal["auto"]
_log = logging.getLogger(__name__)


class PassRule(NamedTuple):
    """What every pass must obey so that the bits of its rows are independent of each other.

    Attributes:
        width: the number of tokens that a pass has with its padding; None if it may have any. Prompts are split and
            trees pruned.
        chunk: a multiple of ``width`` that a piece of a prompt may have, None if there is none.
    """

    width: int | None = None
    chunk: int | None = None

    def padding(self, count: int) -> int:
        """How many tokens are added to a pass of ``count``."""
        return 0 if self.width is None else -count % self.width

    def borders(self, count: int, size: int) -> list[int]:
        """Where a prompt of ``count`` tokens is cut, both ends included; into pieces of about ``size`` if that is free.

        Shorter pieces come first, so that the last one has all queries that are observed.
        """
        most = self.width or size
        chunk = self.chunk or most
        rest = count % chunk
        short = range(rest % most or most, rest, most)
        return [*([0, *short] if rest else []), *range(rest, count + 1, chunk)]


FREE = PassRule()
"""The rule that asks for nothing: what holds where the native library runs the model."""

# Results for each model, so that several decoders of one model test it once.
_found: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, PassRule | None, str]] = WeakKeyDictionary()

# On CUDA libraries choose other kernels for other numbers of rows, so all passes have this width. In half precision a
# product of so many rows takes about as long as reading its weights, and trees of the paper's size fit. More rows would
# be cut into tiles, whose sums may be split in different ways.
_WIDTH_ON_CUDA = 64
_CHUNKS_ON_CUDA = (512, 128)  # wider pieces of a prompt, where these turn out to have the same bits


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
        self.holds, self._around = self.rule is not None, _around()
        if not self.holds and self.wanted is True:
            self._tested = None
            raise ValueError(f"bitwise cannot be had here: {self.reason}; leave it at 'auto' or switch it off")
        self._target.paths.enter(BITWISE, self.holds, self.reason)

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
        self._target.paths.leave_off(BITWISE, self.reason)

    def computed_by(self) -> str:
        """What the bits depend on beside the model, its dtype and the number of threads, to compare two runs by."""
        replacements = self._target.replacements().layers
        products = Counter[str]()
        for module in self._target.model.modules():
            other = replacements.get(module)
            packed = other.products.values() if isinstance(other, FusedLayer) else filter(None, [product_of(other)])
            products.update(product.kind.__name__ for product in packed)
        by = [f"{count} {kind}" for kind, count in sorted(products.items())] or ["no packed products"]
        if self._target.attends_natively:
            by.append("native attention")
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        return f"{', '.join(by)}; {versions}; {native.library_name()}"

    def _state(self) -> Hashable:
        target = self._target
        replacements = target.replacements().layers

        def of(module: torch.nn.Module) -> Hashable:
            weight = getattr(module, "weight", None)
            hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
            # Which library packs a product follows from the values of its weights.
            other = replacements.get(module)
            runs = getattr(product_of(other) or other, "kind", type(other))
            forward = id(module.__dict__.get("forward", type(module).forward))
            return id(module), type(module), forward, hooks, type(weight), runs

        around = *_around(), target.recorder is not None
        return *around, target.attends_natively, target.dtype, tuple(map(of, target.model.modules()))

    def _find(self) -> tuple[PassRule | None, str]:
        """The rule that holds, with a description; or None, with what is wrong."""
        target = self._target
        if target.device.type != "cpu" and target.recorder is None:
            return None, f"on CUDA it needs {RECORDED}"
        if under_autocast():
            return None, "autocast chooses dtypes by itself"
        if target.ranks.size > 1:
            return None, "sums over processes that share a model have an order of their own"
        if any(isinstance(module._modules.get("experts"), torch.nn.Module) for module in target.model.modules()):
            return None, "a mixture of experts gives each of them another number of rows in every pass"
        if target.recorder is not None:
            return self._find_on_cuda()
        for needed in (NATIVE, PACKED):
            if not target.paths[needed].on:
                return None, f"on a CPU it needs {needed}, off here: {target.paths[needed].reason}"
        fault = bitwise_check.multiplied_elsewhere(target)
        if fault is None:
            fault = fault_of(partial(attention_check.native_fault, target.attention_shape_now))
        fault = fault or fault_of(partial(bitwise_check.products_fault, target, FREE))
        fault = fault or self._fault_under(FREE, bitwise_check.model_fault)
        return (FREE, "any number of tokens in a pass") if fault is None else (None, fault)

    def _find_on_cuda(self) -> tuple[PassRule | None, str]:
        """As `_find`: passes of one width, and pieces of prompts that are as wide as is found to give the same bits."""
        target = self._target
        if self.wanted == "auto":
            return None, "on CUDA only where it is asked for, since nobody has measured there what it costs"
        shape = target.attention_shape_now
        if shape.dtype == torch.float32 and rounds_to_tf32():
            return None, "float32 products are rounded to TF32 (torch.backends.cuda.matmul.fp32_precision)"
        if any(size * shape.dtype.itemsize % 16 for size in (shape.dim, shape.value_dim)):
            # Triton compiles other versions for other addresses, which follow from the layer and the capacity.
            return None, f"keys of {shape.dim} numbers and values of {shape.value_dim} do not fill pieces of 16 bytes"
        rule = PassRule(_WIDTH_ON_CUDA)
        try:
            fault = fault_of(partial(attention_check.kernel_fault, shape, target.device))
            fault = fault or fault_of(partial(bitwise_check.products_fault, target, rule))
            fault = fault or self._fault_under(rule, bitwise_check.model_fault)
            if fault is not None:
                return None, fault
            positions = getattr(target.model.config, "max_position_embeddings", None) or 0
            for chunk in _CHUNKS_ON_CUDA:
                wider = rule._replace(chunk=chunk)
                if chunk <= positions and self._fault_under(wider, bitwise_check.chunk_fault) is None:
                    rule = wider
                    break
        finally:
            # What was recorded in the tests is not worth its memory.
            target.pool.clear()
        wide = "" if rule.chunk is None else f", {rule.chunk} of a prompt"
        return rule, f"{rule.width} tokens in each pass{wide}"

    def _fault_under(self, rule: PassRule, test: "Callable[[Target], str | None]") -> str | None:
        """The outcome of a test whose passes must obey ``rule``."""
        self.rule = rule
        try:
            return fault_of(partial(test, self._target))
        finally:
            self.rule = None


def _around() -> tuple[int, bool, bool]:
    """What the user may change around a pass."""
    return torch.get_num_threads(), under_autocast(), rounds_to_tf32()
