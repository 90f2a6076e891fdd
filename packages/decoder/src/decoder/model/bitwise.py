"""Bitwise decoding: whether a model's logits can have the same bits whatever else is in a pass, and what that takes.

The bits of a token's logits are then a function of the model, its dtype, the device with its number of threads, the
libraries, and the tokens before it. So verification, plain decoding and prefill agree to the last bit, and rounding
never decides between two tokens whose scores are nearly equal.
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

from decoder.kernels import native
from decoder.kernels.bitwise_attention import SPARE, Rule
from decoder.kernels.cublas import rounds_to_tf32
from decoder.kernels.fast_paths import BITWISE, RECORDED, fault_of
from decoder.kernels.packed_linear import product_of, under_autocast
from decoder.model import bitwise_attention_test, bitwise_test
from decoder.model.fused_layer import FusedLayer

if TYPE_CHECKING:
    from decoder.model.target import Target

BitwiseSetting = bool | Literal["auto"]
_log = logging.getLogger(__name__)


class PassRule(NamedTuple):
    """What every pass must obey so that the bits of its rows are independent of each other.

    Attributes:
        attention: the rule for PyTorch's products in attention on a CPU; None where kernels need none.
        least: the least number of tokens in a pass; a shorter pass is padded.
        multiple: the number of tokens in a pass is padded to a multiple of this one,
        free: or to one of these numbers.
        most: the largest number of tokens in a pass, None if there is no limit; prompts are split and trees pruned.
        chunk: a number of tokens above ``most`` that a piece of a prompt may have, None if there is none.
    """

    attention: Rule | None = None
    least: int = 1
    multiple: int = 1
    free: frozenset[int] = frozenset()
    most: int | None = None
    chunk: int | None = None

    @property
    def spare(self) -> int:
        """Slots behind a text's last one at which attention may look."""
        return 0 if self.attention is None else SPARE

    @property
    def batched(self) -> bool:
        """Whether the attention of several texts can share products, if their caches stand in blocks."""
        return self.attention is not None and self.attention.batched

    @property
    def transposed(self) -> bool:
        """As for `kernels.bitwise_attention.Rule`."""
        return self.attention is not None and self.attention.transposed

    def padding(self, count: int) -> int:
        """How many tokens are added to a pass of ``count``."""
        padded = max(count, self.least)
        while padded % self.multiple and padded not in self.free:
            padded += 1
        return padded - count

    def borders(self, count: int, size: int) -> list[int]:
        """Where a prompt of ``count`` tokens is cut, both ends included; into pieces of about ``size`` if that is free.

        Shorter pieces come first, so that the last one has all queries that are observed.
        """
        most = self.most or size - size % self.multiple or size
        chunk = self.chunk or most
        rest = count % chunk
        short = range(rest % most or most, rest, most)
        return [*([0, *short] if rest else []), *range(rest, count + 1, chunk)]


FREE = PassRule()
"""The rule that asks for nothing."""

# Results for each model, so that several decoders of one model test it once.
_found: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, PassRule | None, str]] = WeakKeyDictionary()

# The (least, multiple, most) to try, the cheapest first. oneDNN splits the sum of a single row. FBGEMM takes rows in
# blocks of about six, and sums in another order in a block of one or two rows, which no multiple of three leaves over.
# With the last one all passes have the same width.
_WIDTHS = ((1, 1, None), (2, 1, None), (3, 3, None), (4, 4, None), (8, 8, None), (16, 16, 16))

_DEAR = 1.2  # in times of a pass without a rule: what "auto" does not pay

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
            and the log, and in float64, whose roundings are too small to matter. True raises ValueError instead.

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
        elif self.rule is not None:
            by.append(str(self.rule.attention))
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
        """The cheapest rule that passes all tests, with a description; or None, with what was wrong."""
        target = self._target
        if target.device.type != "cpu" and target.recorder is None:
            return None, f"on CUDA it needs {RECORDED}"
        if under_autocast():
            return None, "autocast chooses dtypes by itself"
        if target.ranks.size > 1:
            return None, "sums over processes that share a model have an order of their own"
        if any(isinstance(module._modules.get("experts"), torch.nn.Module) for module in target.model.modules()):
            return None, "a mixture of experts gives each of them another number of rows in every pass"
        if target.dtype == torch.float64 and self.wanted == "auto":
            return None, "float64 is left as it is: its roundings are too small to meet a tie"
        if target.recorder is not None:
            return self._find_on_cuda()
        shape = target.attention_shape._replace(dtype=target.dtype)
        attention, fault = None, None
        if target.attends_natively:
            fault = bitwise_attention_test.native_fault(shape)
        else:
            attention, fault = bitwise_attention_test.attention_rule(shape)
        if fault is not None:
            return None, fault
        for least, multiple, most in _WIDTHS:
            rule = PassRule(attention, least, multiple, most=most)
            fault = fault_of(partial(bitwise_test.products_fault, target, rule))
            if fault is None:
                if multiple > 1 and most is None:
                    rule = rule._replace(free=bitwise_test.free_counts(target, rule))
                if most is None and attention is not None:
                    rule = rule._replace(least=bitwise_test.cheaper_least(target, rule))
                if self.wanted == "auto" and (price := bitwise_test.price(target, rule)) > _DEAR:
                    rows = 1 + rule.padding(1)
                    return None, f"products of the {rows} rows that it needs take {price:.1f} times as long as of one"
                fault = self._fault_under(rule, bitwise_test.model_fault)
            if fault is None:
                open_width = f"{rule.least} token{'' if rule.least == 1 else 's'} or more in a pass"
                width = f"{most} tokens in each pass" if most else open_width
                if multiple > 1 and not most:
                    others = sum(count >= rule.least for count in rule.free)
                    width += f", a multiple of {multiple} or one of {others} other numbers"
                return rule, width if attention is None else f"{width}, rows by {attention.multiple} in attention"
        return None, fault

    def _find_on_cuda(self) -> tuple[PassRule | None, str]:
        """As `_find`: passes of one width, and pieces of prompts that are as wide as is found to give the same bits."""
        target = self._target
        if self.wanted == "auto":
            return None, "on CUDA only where it is asked for, since nobody has measured there what it costs"
        shape = target.attention_shape._replace(dtype=target.dtype)
        if shape.dtype == torch.float32 and rounds_to_tf32():
            return None, "float32 products are rounded to TF32 (torch.backends.cuda.matmul.fp32_precision)"
        if any(size * shape.dtype.itemsize % 16 for size in (shape.dim, shape.value_dim)):
            # Triton compiles other versions for other addresses, which follow from the layer and the capacity.
            return None, f"keys of {shape.dim} numbers and values of {shape.value_dim} do not fill pieces of 16 bytes"
        rule = PassRule(None, _WIDTH_ON_CUDA, _WIDTH_ON_CUDA, most=_WIDTH_ON_CUDA)
        try:
            fault = fault_of(partial(bitwise_attention_test.kernel_fault, shape, target.device))
            fault = fault or fault_of(partial(bitwise_test.products_fault, target, rule))
            fault = fault or self._fault_under(rule, bitwise_test.model_fault)
            if fault is not None:
                return None, fault
            positions = getattr(target.model.config, "max_position_embeddings", None) or 0
            for chunk in _CHUNKS_ON_CUDA:
                wider = rule._replace(chunk=chunk)
                if chunk <= positions and self._fault_under(wider, bitwise_test.chunk_fault) is None:
                    rule = wider
                    break
        finally:
            # What was recorded in the tests is not worth its memory.
            target.pool.clear()
        wide = "" if rule.chunk is None else f", {rule.chunk} of a prompt"
        return rule, f"{rule.most} tokens in each pass{wide}"

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
