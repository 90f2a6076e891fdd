"""The target: the Hugging Face model that is decoded. Its passes are run by the backend of its device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.backends.base import (
    FREE,
    AttentionShape,
    BackendFault,
    Chain,
    PassBackend,
    PassBatch,
    PassOutput,
    PassRule,
    Tree,
)
from decoder.backends.bitwise import Bitwise, BitwiseSetting
from decoder.backends.choose import BITWISE, FLATTENED, TESTS, Chosen, Finding, choosing
from decoder.backends.forwards import replaced, structure_of, under_autocast
from decoder.backends.kept_tests import take
from decoder.backends.modules import standing_for, tempered
from decoder.backends.native.quantised import QuantisedLinear
from decoder.backends.probe import probe
from decoder.backends.reference.backend import Reference
from decoder.backends.reference.mixers import has_two_forms, mixers_of
from decoder.backends.transfers import upload
from decoder.cache.base import LayeredCache
from decoder.cache.full import Copies, FullCache
from decoder.cache.layout import FULL, RECURRENT, Layout
from decoder.cache.pool import BufferPool
from decoder.cache.window import window_slots
from decoder.model.architectures import decoder_of, layer_kinds, refuse_devices, refuse_unsupported
from decoder.parallel.products import SharedLayers
from decoder.parallel.ranks import ranks_of
from decoder.parallel.sharding import refuse_unshareable
from decoder.sampling.token_tree import TokenTree
from decoder.timings import stage
from decoder.work import Work, finish

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")
_STATES = 16  # of recurrent layers, that a sequence has at most times: those behind the nodes of a small tree
_PREFILL_CHUNK = 512
_PREFILL_CHUNK_ON_CUDA = 2048
_SHORT_CHUNK = 64
_SHORT_CHUNK_ON_CUDA = 512


class Target:
    """Runs the user's model over a cache, inside a `patched` block, and leaves the model as it was.

    When it is made, the reference runs the model on a small tree. This shows whether every layer uses our attention and
    cache, and by what the model scales the output of its language-model head. The backend that is chosen then runs the
    same tree, and must give the same.

    Attributes:
        backend: runs the passes.
        reference: the backend that all others are compared with.
        modules: all modules of the model, as they were when somebody looked last.
        feature_layers: the layers whose inputs passes return as features; their number stands for the input of the
            final norm.

    Raises:
        ValueError: the architecture cannot be decoded exactly, or the model is not on a single CPU or CUDA device.
    """

    def __init__(self, model: PreTrainedModel):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"a transformers model (PreTrainedModel) is needed, not {type(model).__name__}")
        refuse_unsupported(model.config, type(model))
        self.model = model
        self.name: str = model.config.model_type
        self.decoder = decoder_of(model)
        self.lm_head = model.get_output_embeddings()
        norm = next((found for name in _NORM_NAMES if (found := getattr(self.decoder, name, None)) is not None), None)
        if norm is None or self.lm_head is None:
            raise ValueError(f"{self.name} has no final norm or language-model head where draft heads could attach")
        if not isinstance(self.lm_head.weight, torch.Tensor):
            kind = type(self.lm_head).__name__
            raise ValueError(
                f"the language-model head ({kind}) holds no weights as numbers: quantise the other layers alone"
            )
        self.norm: nn.Module = norm
        self.vocab_size, self.hidden_size = self._head_shape()
        refuse_devices(model, self.device)
        self.ranks = ranks_of(model)
        """The processes that share the model."""
        refuse_unshareable(model.config, self.ranks.size)
        self._shared = SharedLayers(model, self.ranks)
        self._helpers: list[nn.Module] = []
        self._gathers = False
        self.draft_vocabularies: dict[nn.Module, Any] = {}  # `drafters.draft_vocabulary.DraftVocabulary`
        """By draft heads, their `DraftVocabulary`, which outlives generations."""
        self.feature_layers: tuple[int, ...] = ()
        self.pool = BufferPool(self.device)
        """Cache buffers of sequences that have ended; used only if passes are recorded."""
        self.bitwise = Bitwise(self)
        self._fixed = False  # whether `use` has chosen the backend
        self._tests, self._told_of_tests = take(model), ""
        self._take_in()
        finish(self._choosing(self.has_passed))

    @property
    def has_passed(self) -> bool:
        """Whether the tests at load have passed in another process, and nothing has changed since then."""
        return self._tests is not None and self._tests.passed is not None

    def _choosing(self, has_passed: bool = False) -> Work[None]:
        """Look at the model anew, and choose the backend by what is found; it is not tested if it has passed."""
        # What the model is made of shows with the backend's products, too.
        self.reference = Reference(self, restores=not has_passed)
        yield from self.reference.renewing()
        self.layout = Layout(layer_kinds(self.model.config), mixers=len(self.mixers))
        """What its layers see and keep of a sequence."""
        probed = probe(self, self.reference)
        self.logit_scale, self.layout = probed.logit_scale, probed.layout
        """What the model multiplies its logits by."""
        self.keeps_compressed = probed.latent
        """Whether layers keep compressed keys."""
        # Recorded passes know each buffer by itself.
        self.layout.side_by_side = probed.latent and self.device.type == "cpu"
        self.attention_shapes = probed.shapes
        """By kind of layer, of what shape its attention is."""
        self.asked = probed.asked
        """By layer, what it asks its attention for."""
        self._state_bytes = probed.state_bytes
        self.more_than_attention = "recurrent layers" if self.mixers else "compressed keys" if probed.latent else None
        """In words, what the model has beside attention over its keys and values; None if it has nothing."""
        asked = [self.more_than_attention, *(scores.more_than_causal for scores in probed.asked.values())]
        self.more_than_causal = next((words for words in asked if words), None)
        """In words, what a layer does beside plain attention to the whole text; None if no layer does."""
        structure = self.structure
        if has_passed:
            self.reference = Reference(self)
            yield from self.reference.renewing()
        self._chosen: Chosen = yield from choosing(self, None if has_passed else probed.expected)
        self.backend: PassBackend = self._chosen.backend
        self._structure: object = structure

    def use(self, backend: PassBackend) -> None:
        """Run passes by this backend from now on, whatever changes."""
        self._fixed, self._chosen = True, Chosen(backend, backend.name, None)
        self.backend = backend
        self.refresh_weights()

    def speed_up(self, module: nn.Module) -> None:
        """Replace the layers of ``module`` (draft heads, for example) by faster functions, too, in `patched` blocks."""
        self._helpers.append(module)
        if not self._gathers:
            self.refresh_weights()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """A block at whose end all are sped up together that `speed_up` is called for: each time costs a look at all
        weights."""
        self._gathers, before = True, len(self._helpers)
        try:
            yield
        finally:
            self._gathers = False
        if len(self._helpers) > before:
            self.refresh_weights()

    def helper_modules(self) -> list[nn.Module]:
        """The modules of those that `speed_up` was called for."""
        return [module for helper in self._helpers for module in helper.modules()]

    def shared_layers(self) -> SharedLayers:
        """The layers that processes share, as they are now."""
        if not self._shared.current:
            self._shared = SharedLayers(self.model, self.ranks)
        return self._shared

    def refresh_weights(self) -> None:
        """Adapt to changes that the user has made to the model: its weights, dtype or layers.

        Raises:
            ValueError: the vocabulary has changed.
        """
        finish(self.refreshing())

    def refreshing(self) -> Work[None]:
        """`refresh_weights` in parts; no pass should run before it is done."""
        if self._head_shape()[0] != self.vocab_size or self.model.get_output_embeddings() is not self.lm_head:
            raise ValueError("the model's vocabulary has changed: make a new Decoder")
        self._take_in()
        # Autocast lasts for a block of the user's, and the reference runs there.
        if self._fixed or under_autocast() or self.structure == self._structure:
            yield from self.reference.renewing()
            try:
                yield from self.backend.renewing()
            except BackendFault:  # it does not run the model as it is now
                yield from self._choosing()
        else:
            yield from self._choosing()
        self.bitwise.refresh()

    def _take_in(self) -> None:
        """Look at the model's modules as they are now."""
        self.modules = list(self.model.modules())
        self.mixers = mixers_of(self.modules)
        """The recurrent layers."""
        self.has_two_forms = any(map(has_two_forms, self.mixers))
        """Whether they compute tokens of a prompt in another way than those behind it."""
        self.layers: int = self.model.config.num_hidden_layers
        self.standing_for = standing_for(self.modules)
        """Forwards of attention layers that several layers share."""
        self.tempered = tempered(self.modules)
        """Forwards of attention layers whose queries attention multiplies by what follows from their positions."""

    @property
    def logit_cap(self) -> float | None:
        """c, where the model makes c tanh(x / c) of its logits x."""
        return getattr(self.model.config, "final_logit_softcapping", None)

    @property
    def attention_shape(self) -> AttentionShape:
        """Of the layers that attend to the whole text, or of the first one if none does."""
        return self.attention_shapes.get(FULL) or next(iter(self.attention_shapes.values()))

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in the layers that keep those of the whole sequence."""
        return len(self.layout.full) * self.attention_shape.entry_bytes

    def beside_bytes(self, tokens: int) -> int:
        """Bytes of what the other layers keep of a sequence of so many tokens."""
        chunk = self.prefill_chunk(False)
        windows = sum(
            len(layers) * self.attention_shapes[kind].entry_bytes * window_slots(kind, min(chunk, tokens), tokens)
            for kind, layers in self.layout.beside.items()
            if kind != RECURRENT
        )
        return windows + _STATES * self._state_bytes

    @property
    def structure(self) -> object:
        """What tells the model from one of other layers; not its weights."""
        return self.device, self.layers, structure_of(self.modules)

    def make_bitwise(self, wanted: BitwiseSetting) -> None:
        """Make the bits of a token's logits independent of what else is in their pass, if `bitwise` finds a way.

        Raises:
            ValueError: ``wanted`` is True and there is no way, or it is none of True, False and "auto".
        """
        self.bitwise = Bitwise(self, wanted)
        self.bitwise.refresh()
        tests, all_pass = self._tests, self._chosen.why_not is None and self.bitwise.holds
        if tests is not None and all_pass:
            if tests.passed is None and tests.keep():
                self._told_of_tests = f"passed now; the next load relies on it, by {tests.file}"
            elif tests.passed is not None:
                self._told_of_tests = f"passed on {tests.passed}, and nothing has changed since, by {tests.file}"
        # What changes from now on is tested.
        self._tests = None

    @property
    def _rule(self) -> PassRule:
        return self.bitwise.rule or FREE

    def _head_shape(self) -> tuple[int, int]:
        """How many outputs and inputs the language-model head has; quantised weights are in an order of their own."""
        head = self.lm_head
        return head.shape if isinstance(head, QuantisedLinear) else tuple(head.weight.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits."""
        return self.lm_head.dtype if isinstance(self.lm_head, QuantisedLinear) else self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def attention_shape_now(self) -> AttentionShape:
        """The shape of heads in the dtype that the model has now."""
        return self.attention_shape._replace(dtype=self.dtype)

    @property
    def attention_shapes_now(self) -> list[AttentionShape]:
        """The same for each kind of layer."""
        return [shape._replace(dtype=self.dtype) for shape in self.attention_shapes.values()]

    @property
    def draws_whole_trees(self) -> bool:
        """Whether the tokens of all nodes are drawn at once, since reading from the device takes the host long."""
        return self.device.type == "cuda"

    @property
    def flattens(self) -> bool:
        """Whether several sequences are verified in one pass."""
        return bool(self.backend.flattens) and self.most_nodes is None

    def findings(self) -> list[Finding]:
        """What runs the model here and what does not, and why."""
        chosen, backend = self._chosen, self.backend
        flattened = "several texts are verified together", "the model gives something else then, or cannot run them"
        return [
            Finding(chosen.of_device, chosen.why_not is None, chosen.why_not or backend.covers),
            Finding(FLATTENED, bool(backend.flattens), flattened[not backend.flattens]),
            Finding(BITWISE, self.bitwise.holds, self.bitwise.reason),
            *([Finding(TESTS, True, self._told_of_tests)] if self._told_of_tests else []),
        ]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A block in which drafters may call parts of the model (final norm, head, draft heads) in their fast version.

        The model's own layers are patched for each pass only, see `ModulePass`. The block lasts for one step, so that
        between two chunks of a stream the model is as the user made it.
        """
        with replaced(self.backend.called):
            yield

    def read_features(self, layers: Sequence[int]) -> None:
        """Return the inputs of these layers with every pass, for a draft model; see `PassOutput.features`.

        Raises:
            ValueError: the model's layers are not found, or hand on more than a hidden state of each token.
        """
        if not isinstance(getattr(self.decoder, "layers", None), nn.ModuleList):
            raise ValueError(f"{self.name} has no list of layers whose inputs could be read")
        if (count := len(self.decoder.layers)) != self.layers:
            raise ValueError(
                f"{self.name} counts {self.layers} layers and has {count}, so those that draft heads read are not known"
            )
        if (states := getattr(self.model.config, "altup_num_inputs", 1)) > 1:
            raise ValueError(f"layers of {self.name} hand on {states} states of each token, and draft heads read one")
        self.feature_layers = tuple(layers)

    def beginning_with(self, cache: FullCache, copies: Copies, count: int, dtype: torch.dtype) -> Work[None]:
        """`FullCache.beginning_with` with entries of ``dtype``, for a cache that no pass has prepared yet."""
        self.backend.prepare(cache, count)
        yield from cache.beginning_with(copies, count, self.attention_shape._replace(dtype=dtype), self.device)

    def prefill_borders(self, count: int, short: bool = False) -> list[int]:
        """Where `prefill` cuts ``count`` tokens for its passes, both ends included; ``short`` ones if it is to."""
        return self._rule.borders(count, self.prefill_chunk(short))

    def prefill_chunk(self, short: bool) -> int:
        """How many tokens of a prompt a pass takes: as many as take little longer together than in more passes.

        Short ones are for those who must look at something else between two of them.
        """
        if self.device.type == "cuda":
            return _SHORT_CHUNK_ON_CUDA if short else _PREFILL_CHUNK_ON_CUDA
        return _SHORT_CHUNK if short else _PREFILL_CHUNK

    @stage("prefill")
    def prefill(
        self,
        tokens: Sequence[int],
        cache: FullCache,
        observed: int = 0,
        read: Callable[[PassOutput], None] | None = None,
        logits: bool = False,
    ) -> Mapping[int, torch.Tensor]:
        """Run ``tokens`` through the model chunk by chunk, and commit them behind what the cache holds.

        Args:
            observed: how many tokens' queries to return.
            read: called with what the pass over each chunk has returned, which another pass may overwrite.
            logits: whether passes have logits, too.

        Returns:
            By layer, the queries [1, H, T, D] of the last ``observed`` tokens, or of all if there are fewer.
        """
        queries: Mapping[int, torch.Tensor] = {}
        for start, end in pairwise(self.prefill_borders(len(tokens))):
            own = Chain(tokens[start:end], cache.length, cache)
            output = self.backend.run(PassBatch([own], logits, observed if end == len(tokens) else 0))
            cache.keep(range(end - start))
            queries = output.queries
            if read is not None:
                read(output)
        # Copies, since the outputs of a recorded pass are overwritten by the next one.
        return {layer: query.clone() for layer, query in queries.items()}

    def width(self, nodes: int) -> int:
        """How many rows a verification of ``nodes`` nodes computes and how many slots it writes: padding counts."""
        return self.backend.width(nodes)

    @property
    def most_nodes(self) -> int | None:
        """The largest number of nodes that a tree may have; None if there is no limit."""
        return self._rule.width

    @stage("verify")
    def forward(
        self, trees: Sequence[TokenTree], caches: Sequence[FullCache], observe: bool = False
    ) -> list[PassOutput]:
        """Verify: run every node of each sequence's tree over that sequence's full cache.

        The position of a node is the number of committed tokens plus its depth. The trees of several sequences are
        verified in one flattened pass, with the nodes of all trees in a row; if that cannot be, in a pass each.

        Args:
            trees: a tree per sequence.
            caches: the full cache of each sequence. Nodes' entries are written to it, and `FullCache.keep` commits
            some.
            observe: whether to return the queries of all nodes as well.
        """
        sequences = [Tree(*sequence) for sequence in zip(trees, caches, strict=True)]
        output = self.backend.run(PassBatch(sequences, True, sum(map(len, trees)) if observe else 0))
        if len(trees) == 1:
            return [output]
        borders = pairwise(accumulate(map(len, trees), initial=0))
        return [output.part(slice(*border)) for border in borders]

    @stage("draft")
    def draft(self, tokens: Sequence[int] | torch.Tensor, position: int, cache: LayeredCache) -> torch.Tensor:
        """A draft pass: the hidden states h0 [T, d] before the final norm of T tokens in a row, without logits.

        The tokens attend to ``cache``, which usually holds a part of the sequence, and causally to each other. If
        passes are recorded, any other pass overwrites the result.

        Args:
            tokens: token ids, or a tensor of them, int64 [T] on the model's device, which the host need not have read.
            position: the position of the first one.
            cache: the cache to attend to and to write the tokens' entries to.
        """
        return self.backend.run(PassBatch([Chain(tokens, position, cache)], False)).hidden

    @stage("draft")
    def embed(self, tokens: int | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The input embedding [d] of a token, or those of several [n, d]; a tensor must be on the model's device."""
        ids = tokens if isinstance(tokens, torch.Tensor) else upload(tokens, self.device)
        return self.model.get_input_embeddings()(ids)

    @property
    def embedding_scale(self) -> float:
        """What the model's embeddings are multiplied by as they are looked up."""
        embeddings = self.model.get_input_embeddings()
        return getattr(embeddings, "scalar_embed_scale", getattr(embeddings, "scale", 1.0))

    def wait(self) -> None:
        """Wait until the device has finished all work, so that times can be measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @stage("draft")
    def head(self, normalised: torch.Tensor, rows: nn.Module | None = None) -> torch.Tensor:
        """Logits [..., V] of normalised hidden states [..., d], scaled and capped as the model does its own.

        If ``rows`` are given, they are used instead of the language-model head: a layer with some rows of it, whose
        logits are those of the corresponding tokens.
        """
        return self.capped((self.lm_head if rows is None else rows)(normalised))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of the outputs of its language-model head."""
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return logits if self.logit_cap is None else (logits / self.logit_cap).tanh() * self.logit_cap
