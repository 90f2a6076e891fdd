"""The backend of CUDA devices: recorded passes of fixed widths, split-KV attention, fused norms and rotary embeddings.

Layers with the same input (queries, keys and values; gate and up) are not joined to one product. That would need their
weights in one buffer, with the parameters as views of it. A state dict would then save the whole buffer with each of
them; `Module.to`, quantisers and adapters would separate them again; and a reference to one parameter would hold the
memory of all. A copy would double the memory of the layers. Little is lost, since recorded passes do not launch their
kernels one by one.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import transformers

from decoder.backends import bitwise_check
from decoder.backends.base import FREE, AttentionShape, Forwards, PassBackend, PassBatch, PassOutput, PassRule, Tree
from decoder.backends.bitwise import has_experts, rounds_to_tf32
from decoder.backends.cuda import attention_check, rows_check, split_kv
from decoder.backends.cuda.attention_kinds import ByPosition, Measured
from decoder.backends.cuda.cublas import full_reductions
from decoder.backends.cuda.cuda_graphs import CUDA, WIDEST_RECORDED, CudaGraphs, FixedPass, Recorder, padded_width
from decoder.backends.cuda.kernel_check import split_kv_fault
from decoder.backends.cuda.recorded_state import RecordedState
from decoder.backends.cuda.rotary import FusedRotary, fused_rotary, rotary_replaced
from decoder.backends.cuda.tails import tail_slots
from decoder.backends.faults import fault_of
from decoder.backends.forwards import under_autocast
from decoder.backends.modules import ModulePass, ids_of, one_sequence_at_a_time
from decoder.backends.norms import fused_norms
from decoder.backends.transfers import upload
from decoder.cache.base import LayeredCache
from decoder.work import Work

if TYPE_CHECKING:
    from decoder.model.target import Target

# Libraries choose other kernels for other numbers of rows, so all bitwise passes have this width. In half precision a
# product of so many rows takes about as long as reading its weights, and trees of the paper's size fit. More rows would
# be cut into tiles, whose sums may be split in different ways.
_WIDTH = 64
_CHUNKS = (512, 128)  # wider pieces of a prompt, where these turn out to have the same bits


class CudaBackend(PassBackend):
    """`PassBackend` for a model that is not `unavailable`.

    Args:
        target: the model.
        recorder: records its passes; None makes one.
    """

    name = CUDA
    warm_up_runs = 4  # one is run, one recorded, and two are replayed

    def __init__(self, target: "Target", recorder: Recorder | None = None):
        self._target, self._pass = target, ModulePass(target)
        self.recorder = recorder or CudaGraphs(target.device)
        self.rotary: dict[ModuleType, FusedRotary] = {}
        self._tested: AttentionShape | None = None
        self._forwards: Forwards = {}
        self.called: Forwards = {}

    @staticmethod
    def unavailable(target: "Target") -> str | None:
        """Why it does not run a model; None if it does."""
        if target.more_than_causal is not None:
            return f"for plain attention to the whole text, where {target.name} has {target.more_than_causal}"
        return split_kv.unavailable(target.device)

    @property
    def fault(self) -> str | None:
        return self.recorder.fault

    @property
    def covers(self) -> str:
        if self.recorder.fault is not None:
            return f"passes run unrecorded: {self.recorder.fault}"
        fused = [name for name, one in (("norms", self._forwards), ("rotary embeddings", self.rotary)) if one]
        return f"passes of up to {WIDEST_RECORDED} tokens, fused {' and '.join(fused) or 'nothing'}"

    def renewing(self) -> Work[None]:
        target = self._target
        shape = target.attention_shape_now
        if shape != self._tested:
            fault = split_kv_fault(shape, target.device)
            if fault is not None:
                raise RuntimeError(f"split-KV attention: {fault}")
            self._tested = shape
        shared = target.shared_layers()
        modules = [*target.modules, *target.helper_modules(), *shared.modules]
        forwards = fused_norms(modules)
        forwards |= shared.forwards(forwards)
        helpers = set(target.helper_modules())
        self.rotary = {} if target.dtype == torch.float64 else fused_rotary(target.modules, target.device)
        self._forwards = forwards
        self.called = {module: one for module, one in forwards.items() if module is target.norm or module in helpers}
        target.pool.renew(RecordedState(target.model, target.modules, self.recorder))
        return
        yield

    @property
    def _bitwise(self) -> PassRule:
        return self._target.bitwise.rule or FREE

    def prepare(self, cache: LayeredCache, count: int) -> None:
        cache.prepare(self._target.layout, self._target.pool)
        cache.begin(count)

    def run(self, batch: PassBatch) -> PassOutput:
        """See `PassBackend`; passes over one sequence are padded, recorded and replayed."""
        if len(batch.sequences) == 1:
            return self._run_one(batch)
        if not self.flattens or self._bitwise.width is not None:
            return one_sequence_at_a_time(self, batch)
        new, device = [], self._target.device
        for sequence in batch.sequences:
            self.prepare(sequence.cache, len(sequence.tokens))
            mask = None if (own := sequence.mask()) is None else upload(own, device)
            new.append(Measured.behind(sequence.cache, len(sequence.tokens), mask))
        # Its shape changes with every step.
        return self._pass.run(batch, new, self._forwards, rotary_replaced(self.rotary))

    def _run_one(self, batch: PassBatch) -> PassOutput:
        (sequence,), device = batch.sequences, self._target.device
        cache, count = sequence.cache, len(sequence.tokens)
        rule = self._bitwise if cache.purpose == "text" else FREE
        # Padding is the first token again. No other token sees it, and its entries are never committed.
        padding = rule.padding(count)
        if rule.width is None and isinstance(sequence, Tree):
            padding = padded_width(count) - count
        width, observed = count + padding, batch.observed and batch.observed + padding
        ids = ids_of(batch, torch.device("cpu") if not isinstance(sequence.tokens, torch.Tensor) else device)
        if padding:
            ids = torch.cat((ids, ids[:, :1].expand(-1, padding)), 1)
        self.prepare(cache, width)
        length = cache.get_seq_length()
        seen: torch.Tensor | None
        if rule.width is not None:
            depths = [position - length for position in sequence.positions] + [0] * padding
            seen = tail_slots(length, depths[:count], sequence.mask(), width)
        else:
            # Chains get a mask too, so that they share a pass with trees.
            seen = sequence.mask(width if width > 1 else None)
        kind = batch.logits, width, seen is None, rule.width is None, observed

        def run(ids: torch.Tensor, seen: torch.Tensor | None) -> PassOutput:
            given = batch.logits, ids, cache
            if rule.width is None:
                own = Measured.behind(cache, width, seen)
                return self._pass.run_ids(*given, [own], observed, self._forwards, rotary_replaced(self.rotary))
            assert seen is not None
            # Bits are promised where attention follows positions.
            with full_reductions():
                tails = [ByPosition(width, seen)]
                return self._pass.run_ids(*given, tails, observed, self._forwards, rotary_replaced(self.rotary))

        # Under autocast a graph would refer to copies of the weights that are freed when the user's block ends.
        if width > WIDEST_RECORDED or under_autocast() or not cache.recordable:
            output = run(upload(ids, device), None if seen is None else upload(seen, device))
        else:
            if kind not in cache.passes:
                cache.passes[kind] = FixedPass(self.recorder, device)
            output = cache.passes[kind](run, ids, seen)
        return output.first(count)

    def width(self, nodes: int) -> int:
        rule = self._bitwise
        return padded_width(nodes) if rule.width is None else nodes + rule.padding(nodes)

    def rule(self, demanded: bool) -> tuple[PassRule | None, str]:
        """See `PassBackend`: passes of one width, and pieces of prompts as wide as is found to give the same bits."""
        target = self._target
        if not demanded:
            return None, "on CUDA only where it is asked for, since nobody has measured there what it costs"
        if has_experts(target.model):
            return None, "a mixture of experts gives each of them another number of rows in every pass"
        shape = target.attention_shape_now
        if shape.dtype == torch.float32 and rounds_to_tf32():
            return None, "float32 products are rounded to TF32 (torch.backends.cuda.matmul.fp32_precision)"
        if any(size * shape.dtype.itemsize % 16 for size in (shape.dim, shape.value_dim)):
            # Triton compiles other versions for other addresses, which follow from the layer and the capacity.
            return None, f"keys of {shape.dim} numbers and values of {shape.value_dim} do not fill pieces of 16 bytes"
        rule = PassRule(_WIDTH)
        try:
            fault = fault_of(partial(attention_check.kernel_fault, shape, target.device))
            fault = fault or fault_of(partial(rows_check.products_fault, target, rule, self._forwards))
            fault = fault or self._fault_under(rule, bitwise_check.model_fault)
            if fault is not None:
                return None, fault
            positions = getattr(target.model.config, "max_position_embeddings", None) or 0
            for chunk in _CHUNKS:
                wider = rule._replace(chunk=chunk)
                if chunk <= positions and self._fault_under(wider, rows_check.chunk_fault) is None:
                    rule = wider
                    break
        finally:
            # What was recorded in the tests is not worth its memory.
            target.pool.clear()
        wide = "" if rule.chunk is None else f", {rule.chunk} of a prompt"
        return rule, f"{rule.width} tokens in each pass{wide}"

    def _fault_under(self, rule: PassRule, test: "Callable[[Target], str | None]") -> str | None:
        """The outcome of a test whose passes must obey ``rule``."""
        bitwise = self._target.bitwise
        bitwise.rule = rule
        try:
            return fault_of(partial(test, self._target))
        finally:
            bitwise.rule = None

    def computed_by(self) -> str:
        return f"{self.covers}; torch {torch.__version__}, transformers {transformers.__version__}"
