"""The target: the Hugging Face model that is decoded, and its forward passes over our caches.

The model is reached through transformers' documented extension points. Norms, linear layers and rotary embeddings have
none; they are replaced while a pass runs, where a test has found a faster function equal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.backends.attention import AttentionShape, TextInPass
from decoder.backends.bitwise import FREE, Bitwise, BitwiseSetting, PassRule
from decoder.backends.cuda.cuda_graphs import WIDEST_RECORDED, FixedPass, Recorder, padded_width
from decoder.backends.cuda.recorded_state import RecordedState
from decoder.backends.cuda.recording_check import tested_recorder
from decoder.backends.cuda.tails import tail_slots
from decoder.backends.fast_layers import FastLayers, tested_attention, tested_layers, tested_model, tested_rotary
from decoder.backends.fast_paths import DRAWS, FLATTENED, RECORDED, ROTARY, FastPath, FastPaths
from decoder.backends.model_pass import ModelPass, PassOutput
from decoder.backends.native import library as native
from decoder.backends.native.packed_linear import replaced, under_autocast
from decoder.backends.native.quantised import QuantisedLinear
from decoder.backends.probe import probe, runs_flattened
from decoder.backends.transfers import upload
from decoder.backends.verification import Verification
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.full import FullCache
from decoder.cache.pool import BufferPool
from decoder.model.architectures import refuse_devices, refuse_unsupported
from decoder.parallel.products import SharedLayers
from decoder.parallel.ranks import ranks_of
from decoder.parallel.sharding import refuse_unshareable
from decoder.sampling.native_choice_check import native_choice_fault
from decoder.sampling.token_tree import TokenTree
from decoder.timings import stage
from decoder.work import Work, finish

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_PREFILL_CHUNK = 512
_PREFILL_CHUNK_ON_CUDA = 2048
_SHORT_CHUNK = 64
_SHORT_CHUNK_ON_CUDA = 512


class Target:
    """Runs the user's model over a cache, inside a `patched` block, and leaves the model as it was.

    When it is made, the model is run on a tree of three tokens. This shows whether every layer uses our attention and
    cache, and by what the model scales the output of its language-model head. It is also run on two texts at once, to
    find out whether it can be.

    Raises:
        ValueError: the architecture cannot be decoded exactly, or the model is not on a single CPU or CUDA device.
    """

    def __init__(self, model: PreTrainedModel):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"a transformers model (PreTrainedModel) is needed, not {type(model).__name__}")
        refuse_unsupported(model.config, type(model))
        self.model = model
        self.name: str = model.config.model_type
        self.decoder = model.get_decoder()
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
        self.draft_vocabularies: dict[nn.Module, Any] = {}  # `drafters.draft_vocabulary.DraftVocabulary`
        """By draft heads, their `DraftVocabulary`, which outlives generations."""
        self._model_pass = ModelPass(model, norm)
        self.paths = FastPaths(self.device)
        """Which fast paths are used here, and why not the others."""
        self.pool = BufferPool(self.device)
        """Cache buffers of texts that have ended; used only if passes are recorded."""
        self.bitwise = Bitwise(self)
        self.attends_natively = False
        """Whether the native library attends; found out when the shape of heads is known."""
        self.draws_natively = self._test_draws()
        """Whether the native library draws tokens and runs draft heads."""
        self.recorder: Recorder | None = None  # set below, if the tests for recorded passes succeed
        self._take_in()
        probed = probe(self)
        self.attention_shape: AttentionShape = probed.attention_shape
        self._test_attention()
        self.kv_bytes: int = probed.kv_bytes
        """Bytes of a token's keys and values in all layers."""
        self.logit_scale = probed.logit_scale
        """What the model multiplies its logits by."""
        self.flattens = runs_flattened(self)
        flattened = "several texts are verified together", "the model gives something else then, or cannot run them"
        self.paths.enter(FLATTENED, self.flattens, flattened[not self.flattens])
        if self.ranks.size == 1:
            self.set_recorder(tested_recorder(self, self.attention_shape))
        else:
            self.paths.leave_off(RECORDED, "not for a model that processes share")

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record passes with ``recorder`` from now on; None records no passes."""
        self.recorder = recorder
        self.refresh_weights()

    def speed_up(self, module: nn.Module) -> None:
        """Replace the layers of ``module`` (draft heads, for example) by faster functions, too, in `patched` blocks."""
        self._helpers.append(module)
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Adapt to changes that the user has made to the model: its weights, dtype or layers.

        Where nothing asks for them, packed weights are brought up to date when the next pass runs.

        Raises:
            ValueError: the vocabulary has changed.
        """
        self._look_again()
        self.bitwise.refresh()

    def refreshing(self) -> Work[None]:
        """`refresh_weights` in parts, packed weights included; no pass should run before it is done."""
        self._look_again()
        yield from self._replacing()
        self.bitwise.refresh()

    def _look_again(self) -> None:
        if self._head_shape()[0] != self.vocab_size or self.model.get_output_embeddings() is not self.lm_head:
            raise ValueError("the model's vocabulary has changed: make a new Decoder")
        self._take_in()
        self._test_attention()
        if self.recorder is not None:
            self.pool.renew(RecordedState(self.model, self._modules, self.recorder))

    def _take_in(self) -> None:
        """Look at the model's modules as they are now."""
        self._modules = self._model_pass.modules = list(self.model.modules())
        self.layers: int = self.model.config.num_hidden_layers
        self._faster: FastLayers | None = None

    def _test_attention(self) -> None:
        """Find out whether the native library attends for the model as it is now."""
        # The user may have moved the model since the paths were tested.
        on_cpu = self.recorder is None and self.device.type == "cpu"
        self.attends_natively = on_cpu and tested_attention(self.attention_shape_now, self.paths)

    def _test_draws(self) -> bool:
        """Find out whether the native library draws tokens as the sampler defines them."""
        if self.device.type != "cpu" or not native.available():
            self.paths.leave_off(DRAWS, "needs the native library, on a CPU")
            return False
        return self.paths.passes_test(DRAWS, "tokens", native_choice_fault, "tokens, and levels of draft heads")

    def make_bitwise(self, wanted: BitwiseSetting) -> None:
        """Make the bits of a token's logits independent of what else is in their pass, if `bitwise` finds a way.

        Raises:
            ValueError: ``wanted`` is True and there is no way, or it is none of True, False and "auto".
        """
        self.bitwise = Bitwise(self, wanted)
        self.bitwise.refresh()

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
    def draws_whole_trees(self) -> bool:
        """Whether the tokens of all nodes are drawn at once, since reading from the device takes the host long."""
        return self.device.type == "cuda"

    def replacements(self) -> FastLayers:
        """The functions that replace the model's own ones while a pass runs."""
        return self._faster or finish(self._replacing())

    def _replacing(self) -> Work[FastLayers]:
        """Make `replacements`."""
        modules = self._modules
        of_helpers = [module for helper in self._helpers for module in helper.modules()]
        if not self._shared.current:
            self._shared = SharedLayers(self.model, self.ranks)
        layers = yield from tested_layers([*modules, *of_helpers], self._shared, self.paths)
        called = {self.norm, self.lm_head, self.model.get_input_embeddings(), *of_helpers}
        if self.recorder is None:
            self.paths.leave_off(ROTARY, f"needs {RECORDED}")
        faster = FastLayers(
            layers=layers,
            called={module: forward for module, forward in layers.items() if module in called},
            # The rotary kernel needs Triton, and there is a recorder only where Triton works.
            rotary={} if self.recorder is None else tested_rotary(modules, self.attention_shape, self.paths),
        )
        faster = faster._replace(model=tested_model(self._model_pass, faster, self.paths, self.attends_natively))
        if self._modules is modules:  # else the user has changed the model between two parts
            self._faster = faster
        return faster

    def fast_paths(self) -> list[FastPath]:
        """Which fast paths are used here and which are not, and why."""
        self.replacements()
        if self.recorder is not None and self.recorder.fault is not None:
            self.paths.leave_off(RECORDED, self.recorder.fault)
        return list(self.paths)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """A block in which drafters may call parts of the model (final norm, head, draft heads) in their fast version.

        The model's own layers are patched for each pass only, see `ModelPass`. The block lasts for one step, so that
        between two chunks of a stream the model is as the user made it.
        """
        with replaced(self.replacements().called):
            yield

    def read_features(self, layers: Sequence[int]) -> None:
        """Return the inputs of these layers with every pass, for an EAGLE-3 draft model; see `PassOutput.features`."""
        self._model_pass.read_features(layers)
        self.refresh_weights()

    @property
    def gives_features(self) -> bool:
        """Whether passes return features."""
        return bool(self._model_pass.feature_layers)

    def _run(
        self,
        module: nn.Module,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        texts: Sequence[TextInPass],
        observed: int,
    ) -> PassOutput:
        return self._model_pass.run(module, ids, cache, texts, observed, self.replacements())

    def _pass(
        self,
        module: nn.Module,
        tokens: Sequence[int] | torch.Tensor,
        positions: Sequence[int],
        cache: LayeredCache,
        mask: torch.Tensor | None = None,
        observed: int = 0,
    ) -> PassOutput:
        """`_run` for one text, padded as the `PassRule` demands, recorded and replayed if passes are."""
        rule, count = self._rule if cache.purpose == "text" else FREE, len(tokens)
        padding = rule.padding(count)
        if isinstance(tokens, torch.Tensor):
            ids = torch.stack((tokens, upload(positions, self.device)))
        else:
            ids = torch.tensor([list(tokens), list(positions)])
        if padding:
            # With the first token. No other token sees the padding, and its pairs are never committed.
            ids = torch.cat((ids, ids[:, :1].expand(-1, padding)), 1)
        width, observed = count + padding, observed and observed + padding
        text = self._text(width, positions, mask, cache)
        seen = text.mask if text.tails is None else text.tails
        kind = module is self.model, width, seen is None, text.tails is None, observed

        def run(ids: torch.Tensor, seen: torch.Tensor | None) -> PassOutput:
            own = text._replace(mask=seen) if text.tails is None else text._replace(tails=seen)
            return self._run(module, ids, cache, [own], observed)

        # Under autocast a graph would refer to copies of the weights that are freed when the user's block ends.
        if self.recorder is None or width > WIDEST_RECORDED or under_autocast() or not cache.recordable:
            output = run(upload(ids, self.device), None if seen is None else upload(seen, self.device))
        else:
            if kind not in cache.passes:
                cache.passes[kind] = FixedPass(self.recorder, self.device)
            output = cache.passes[kind](run, ids, seen)
        return output.first(count, padding) if padding else output

    def _text(self, count: int, positions: Sequence[int], mask: torch.Tensor | None, cache: LayeredCache) -> TextInPass:
        """Prepare a text's cache for ``count`` new tokens, and describe them to attention."""
        self._begin(cache, count)
        length = cache.get_seq_length()
        if self.most_nodes is not None and cache.purpose == "text":
            depths = [position - length for position in positions]
            return TextInPass(count, tails=tail_slots(length, depths, mask, count))
        natively = self.attends_natively and not under_autocast()
        return TextInPass(count, mask, cache.kv_length, native=length if natively else None)

    def _begin(self, cache: LayeredCache, count: int) -> None:
        cache.prepare(self.layers, None if self.recorder is None else self.pool)
        cache.begin(count)

    def beginning_with(self, cache: FullCache, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> Work[None]:
        """`FullCache.beginning_with` with pairs of ``dtype``, for a cache that no pass has prepared yet."""
        self._begin(cache, parts[0].shape[3])
        yield from cache.beginning_with(parts, self.attention_shape._replace(dtype=dtype), self.device)

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
        read: Callable[[torch.Tensor], None] | None = None,
    ) -> Mapping[int, torch.Tensor]:
        """Run ``tokens`` through the model chunk by chunk, and commit them behind what the cache holds.

        Args:
            observed: how many tokens' queries to return.
            read: called with the features of each chunk, `PassOutput.features`, if the model returns them.

        Returns:
            By layer, the queries [1, H, T, D] of the last ``observed`` tokens, or of all if there are fewer.
        """
        queries: Mapping[int, torch.Tensor] = {}
        for start, end in pairwise(self.prefill_borders(len(tokens))):
            positions, last = range(cache.length, cache.length + end - start), end == len(tokens)
            output = self._pass(self.decoder, tokens[start:end], positions, cache, observed=last and observed)
            cache.keep(range(end - start))
            queries = output.queries
            if read is not None and output.features is not None:
                read(output.features)
        # Copies, since the outputs of a recorded pass are overwritten by the next one.
        return {layer: query.clone() for layer, query in queries.items()}

    def width(self, nodes: int) -> int:
        """How many rows a verification of ``nodes`` nodes computes, which is more if the tree is padded."""
        if self.recorder is None or self.most_nodes is not None:
            return nodes + self._rule.padding(nodes)
        return padded_width(nodes)

    def slots(self, nodes: int) -> int:
        """How many cache slots a verification of ``nodes`` nodes may write."""
        return self.width(nodes)

    @property
    def most_nodes(self) -> int | None:
        """The largest number of nodes that a tree may have; None if there is no limit."""
        return self._rule.width

    @stage("verify")
    def forward(
        self, trees: Sequence[TokenTree], caches: Sequence[FullCache], observe: bool = False
    ) -> list[Verification]:
        """Verify: run every node of each text's tree over that text's full cache.

        The position of a node is the number of committed tokens plus its depth. The trees of several texts are verified
        in one flattened pass, with the nodes of all trees in a row; if the model cannot run that, in a pass each.

        Args:
            trees: a tree per text.
            caches: the full cache of each text. The nodes' pairs are written to it, and `FullCache.keep` commits some.
            observe: whether to return the queries of all nodes as well.
        """
        if len(trees) == 1:
            return [self._verify_one(trees[0], caches[0], observe)]
        if not self.flattens or self.most_nodes is not None:
            return [self._verify_one(*text, observe).detached() for text in zip(trees, caches, strict=True)]
        return self._verify(trees, caches, observe)

    def _verify_one(self, tree: TokenTree, cache: FullCache, observe: bool) -> Verification:
        nodes = len(tree)
        fixed = self.recorder is not None and self.most_nodes is None  # else `_pass` pads
        padding = self.width(nodes) - nodes if fixed else 0
        # Padding sees only itself, and no node sees it. Chains get a mask too, so that they share a pass with trees.
        mask = tree.ancestor_mask(nodes + padding if fixed and nodes + padding > 1 else None)
        positions = [cache.length + depth for depth in tree.depths] + [cache.length] * padding
        tokens = tree.tokens + [tree.tokens[0]] * padding
        observed = len(tokens) if observe else 0
        output = self._pass(self.model, tokens, positions, cache, mask, observed)
        return Verification.of(output.part(slice(0, nodes), output.queries))

    def _verify(self, trees: Sequence[TokenTree], caches: Sequence[FullCache], observe: bool) -> list[Verification]:
        """Verify all trees in one pass, which is never recorded, since its shape changes with every step."""
        counts = list(map(len, trees))
        texts, positions = [], []
        for tree, cache, count in zip(trees, caches, counts, strict=True):
            mask = tree.ancestor_mask()
            mask = None if mask is None else upload(mask, self.device)
            own = [cache.length + depth for depth in tree.depths]
            texts.append(self._text(count, own, mask, cache))
            positions += own
        tokens = [token for tree in trees for token in tree.tokens]
        ids = upload([tokens, positions], self.device)
        observed = len(tokens) if observe else 0
        cache = FlattenedCaches(caches, counts) if len(caches) > 1 else caches[0]
        output = self._run(self.model, ids, cache, texts, observed)
        verifications = []
        for start, end in pairwise(accumulate(counts, initial=0)):
            queries = {layer: query[:, :, start:end] for layer, query in output.queries.items()}
            verifications.append(Verification.of(output.part(slice(start, end), queries)))
        return verifications

    @stage("draft")
    def draft(self, tokens: Sequence[int] | torch.Tensor, position: int, cache: LayeredCache) -> torch.Tensor:
        """A draft pass: the hidden states h0 [T, d] before the final norm of T tokens in a row, without logits.

        The tokens attend to ``cache``, which usually holds a part of the text, and causally to each other. If passes
        are recorded, any other pass overwrites the result.

        Args:
            tokens: token ids, or a tensor of them, int64 [T] on the model's device, which the host need not have read.
            position: the position of the first one.
            cache: the cache to attend to and to write the tokens' pairs to.
        """
        return self._pass(self.decoder, tokens, range(position, position + len(tokens)), cache).hidden

    @stage("draft")
    def embed(self, tokens: int | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The input embedding [d] of a token, or those of several [n, d]; a tensor must be on the model's device."""
        ids = tokens if isinstance(tokens, torch.Tensor) else upload(tokens, self.device)
        return self.model.get_input_embeddings()(ids)

    def wait(self) -> None:
        """Wait until the device has finished all work, so that times can be measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @stage("draft")
    def head(self, normalised: torch.Tensor, rows: nn.Module | None = None) -> torch.Tensor:
        """Logits [..., V] of normalised hidden states [..., d], scaled as the model scales its own.

        If ``rows`` are given, they are used instead of the language-model head: a layer with some rows of it, whose
        logits are those of the corresponding tokens.
        """
        logits = (self.lm_head if rows is None else rows)(normalised)
        return logits if self.logit_scale == 1 else logits * self.logit_scale
