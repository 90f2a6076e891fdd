"""The backend of CPUs: passes by the native library, whose bits for a token follow from its sequence alone.

Models of the families in `families.py` are run as a whole. Of others transformers' modules run, with linear layers,
norms, activations and attention that give a row the same bits wherever it stands.
"""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch
import transformers
from torch import nn

from decoder.backends import bitwise_check
from decoder.backends.base import FREE, Chain, Forwards, PassBackend, PassBatch, PassOutput, PassRule
from decoder.backends.faults import fault_of
from decoder.backends.forwards import replaced, under_autocast
from decoder.backends.modules import ModulePass, cache_of, ids_of, one_sequence_at_a_time
from decoder.backends.native import library as native
from decoder.backends.native import native_attention
from decoder.backends.native.activations import activations, calls_by_place
from decoder.backends.native.compressed import expanding, packing_expansions
from decoder.backends.native.eligible import runs_as_a_whole
from decoder.backends.native.experts import PackedRouter, packing_experts
from decoder.backends.native.families import parts_of
from decoder.backends.native.levels import NativeLevels, native_levels
from decoder.backends.native.native_attention import NewTokens
from decoder.backends.native.packed_linear import Linear, Packed, joined, packed_by, packing
from decoder.backends.native.quantised import QuantisedEmbedding
from decoder.backends.native.state_updates import quicker
from decoder.backends.native.whole_model import WholeModel, asked_alike
from decoder.backends.norms import fused_norms
from decoder.backends.reference.mixers import token_by_token
from decoder.cache.base import LayeredCache
from decoder.cache.layout import Layout
from decoder.cache.recurrent import CHANGED, NodeStates
from decoder.cache.replayed import ReplayedStates
from decoder.draft_heads import DraftHead
from decoder.sampling.native_choice import NativeChoice, native_choice
from decoder.work import Work

if TYPE_CHECKING:
    from decoder.drafters.draft_vocabulary import DraftVocabulary
    from decoder.model.target import Target
    from decoder.sampling.params import SamplingParams

NATIVE = "native library"
OWN_NUMBERS = "the model's numbers"
"""How the report calls weights of no quantised format."""


class NativeBackend(PassBackend):
    """`PassBackend` for a model that is not `unavailable`.

    Attributes:
        whole: runs the model; None where its modules do.
    """

    name = NATIVE

    def __init__(self, target: "Target"):
        self._target, self._modules = target, ModulePass(target)
        self.whole: WholeModel | None = None
        self._layout: Layout = target.layout
        self._forwards: Forwards = {}
        self.called: Forwards = {}

    @staticmethod
    def unavailable(target: "Target") -> str | None:
        """Why the library does not run a model; None if it does."""
        shapes = target.attention_shapes_now
        if target.keeps_compressed:
            # A key is what is kept in place of key and value, and a value the first part of it.
            shapes = [one._replace(dim=one.dim + one.value_dim, value_dim=one.dim) for one in shapes]
        faults = [native_attention.unavailable(shape, target.device) for shape in shapes]
        faults += map(native_attention.not_known, target.asked.values())
        return next((fault for fault in faults if fault is not None), None)

    @property
    def covers(self) -> str:
        runs = "transformers' modules with its products and attention" if self.whole is None else "passes in one call"
        formats = [OWN_NUMBERS if name == "Native" else name for name in sorted(self._kinds())]
        return f"{runs}; weights as {', '.join(formats) or 'they are'}"

    def renewing(self) -> Work[None]:
        target = self._target
        shared, whole = target.shared_layers(), _runs_as_a_whole(target)
        outside = [target.norm, target.lm_head, target.model.get_input_embeddings(), *target.helper_modules()]
        parts = [parts_of(layer) for layer in target.decoder.layers] if whole else []
        groups = [group for own in parts for group in own.groups]
        experts = [module for own in parts if own.block is not None for module in own.block[:2]]
        modules = outside if whole else [*target.modules, *target.helper_modules(), *shared.modules]
        compressed = [] if whole else expanding(target.modules)
        by_head = {layer.kv_b_proj for layer in compressed}
        alone = [module for module in modules if module not in by_head]
        forwards = fused_norms(modules) | (yield from packing(alone, groups)) | activations(modules)
        forwards |= yield from packing_expansions(compressed)
        forwards |= yield from packing_experts([*modules, *experts])
        forwards |= shared.forwards(forwards)
        if not whole:
            # Each token from the state behind its parent, by itself, so that its bits follow from its sequence alone.
            forwards |= token_by_token(target.mixers, quicker)
        called = {module: forward for module, forward in forwards.items() if module in set(outside)}
        self.whole = WholeModel(target.decoder, target.dtype, target.layout, target.asked) if whole else None
        self._layout = target.layout if self.whole is None else self.whole.layout
        self.flattens = True if whole else self.flattens
        self._forwards, self.called = forwards, called

    def prepare(self, cache: LayeredCache, count: int) -> None:
        cache.prepare(self._layout)
        cache.begin(count)

    def run(self, batch: PassBatch) -> PassOutput:
        target = self._target
        if under_autocast():  # which chooses dtypes inside of the model's own modules
            return target.reference.run(batch)
        if len(batch.sequences) > 1 and not self.flattens:
            return one_sequence_at_a_time(self, batch)
        new = []
        for sequence in batch.sequences:
            cache, count = sequence.cache, len(sequence.tokens)
            self.prepare(cache, count)
            if (states := cache.recurrent) is not None:
                if self.whole is not None and isinstance(states, ReplayedStates):
                    states.begin(sequence.parents, cache.held, isinstance(sequence, Chain))
                elif self.whole is None and isinstance(states, NodeStates):
                    states.begin(sequence.parents, cache.held)
                else:
                    raise ValueError(f"the layers of {target.name} {CHANGED}")
            new.append(NewTokens(cache.get_seq_length(), count, sequence.mask(), sequence.positions[0]))
        if self.whole is None:
            return self._modules.run(batch, new, self._forwards)
        with replaced(self.called):
            ids = ids_of(batch, target.device)
            found = self.whole.run(ids, cache_of(batch), new, batch.observed, target.feature_layers)
            logits = target.head(target.norm(found.hidden))[0] if batch.logits else found.hidden.new_empty(0, 0)
        for sequence in batch.sequences:
            if isinstance(states := sequence.cache.recurrent, ReplayedStates):
                states.finish()
        features = torch.cat(found.inputs, -1)[0] if found.inputs else None
        return PassOutput(found.hidden[0], logits, found.queries, features)

    def rule(self, demanded: bool) -> tuple[PassRule | None, str]:
        """See `PassBackend`: the library's bits hold by construction; what else runs is tested."""
        fault = self._multiplied_elsewhere()
        if fault is None and not self._target.has_passed:
            fault = fault_of(partial(bitwise_check.model_fault, self._target))
        return (FREE, "any number of tokens in a pass") if fault is None else (None, fault)

    def _multiplied_elsewhere(self) -> str | None:
        """In words, the first layer that the library does not multiply; None if it multiplies all."""
        within = {layer for own in self._target.decoder.layers for layer in own.modules()} if self.whole else set()
        # What a recurrent layer has beside products, as its convolution, runs for one token at a time.
        within |= {own for mixer in self._target.mixers for own in mixer.modules() if not isinstance(own, Linear)}
        with replaced(self._forwards):
            for name, module in self._target.model.named_modules():
                packed = packed_by(module.__dict__.get("forward"))
                if isinstance(packed, PackedRouter):
                    within |= {*module.modules()}  # of which nothing else is called
                if isinstance(module, nn.Embedding | QuantisedEmbedding | DraftHead) or module in within:
                    continue
                if self.whole is None and (called := calls_by_place(module)):
                    return f"{name} ({type(module).__name__}) calls PyTorch's {called}, whose bits depend on other rows"
                weights = any(own is not None and own.ndim > 1 for own in module._parameters.values())
                if weights and packed is None:
                    return f"the native library does not multiply {name} ({type(module).__name__})"
        return None

    def computed_by(self) -> str:
        by = [f"{count} {kind}" for kind, count in sorted(self._kinds().items())] or ["no packed products"]
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        return f"{', '.join(by)}, native attention; {versions}; {native.library_name()}"

    def _kinds(self) -> Counter[str]:
        """How often the model's weights are held in each form."""
        layers = self._target.decoder.layers if self.whole else ()
        products: list[Packed | None] = [joined(group) for layer in layers for group in parts_of(layer).groups]
        products += [packed_by(self._forwards.get(module)) for module in self._target.modules]
        return Counter(product.kind.__name__.removesuffix("Weight") for product in products if product is not None)

    def choice(self, params: "SamplingParams", bias: torch.Tensor | None = None) -> NativeChoice | None:
        return native_choice(params, self._target.device, bias)

    def levels(self, heads: nn.Module, vocabulary: "DraftVocabulary") -> NativeLevels | None:
        return native_levels(self._target, heads, vocabulary, self.called)


def _runs_as_a_whole(target: "Target") -> bool:
    return (
        not target.shared_layers().modules
        and runs_as_a_whole(target.model, target.dtype, target.layout.kinds)
        and asked_alike(target.layout, target.asked)
        and _scores_as_asked(target)
    )


def _scores_as_asked(target: "Target") -> bool:
    """Whether layers still scale their scores as they did when they were asked, which the user may have changed."""
    modules = (layer._modules.get("self_attn") for layer in target.decoder.layers)
    attending = {number: module for number, module in enumerate(modules) if module is not None}
    return all(module.scaling == target.asked[number].scaling for number, module in attending.items())
