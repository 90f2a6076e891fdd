"""The target: a Hugging Face model, reached through its documented extension points.

What has none, norms and rotary embeddings, is replaced while a pass runs, where a trial finds another function equal.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.full import FullCache
from decoder.cache.pool import BufferPool
from decoder.kernels import attention
from decoder.kernels.attention import TextInPass
from decoder.kernels.bitwise_attention import SPARE, BitwiseText
from decoder.kernels.cuda_graphs import WIDEST_RECORDED, FixedPass, Recorder, padded_width
from decoder.kernels.fast_paths import FLATTENED, RECORDED, ROTARY, FastPath, FastPaths
from decoder.kernels.packed_linear import replaced, under_autocast
from decoder.kernels.rotary import rotary_replaced
from decoder.kernels.self_test import AttentionShape
from decoder.kernels.transfers import upload
from decoder.model.architectures import refuse_devices, refuse_unsupported
from decoder.model.bitwise import Bitwise, BitwiseSetting, PassRule
from decoder.model.fast_layers import FastLayers, tested_norms, tested_products, tested_rotary
from decoder.model.probe import probe, runs_flattened
from decoder.model.recorded_state import RecordedState
from decoder.model.recording_test import tested_recorder
from decoder.model.verification import Verification
from decoder.sampling.token_tree import TokenTree

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
_PREFILL_CHUNK = 512
_PREFILL_CHUNK_ON_CUDA = 2048


class Target:
    """Runs the user's model over a cache, inside a `patched` block, and leaves the model as it was.

    Making one runs the model on a tree of three tokens, to see that every layer takes this attention and what the
    model does to the output of its language-model head, and on two texts at once, to see whether it can.

    Raises:
        ValueError: an architecture that could not be decoded exactly, or a model on another device than one CPU or
            CUDA device.
    """

    def __init__(self, model: PreTrainedModel):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"a transformers model (PreTrainedModel) is needed, not {type(model).__name__}")
        refuse_unsupported(model.config, type(model))
        self.model = model
        self.name: str = model.config.model_type
        self.decoder = model.get_decoder()
        self.lm_head = model.get_output_embeddings()
        norms = (getattr(self.decoder, name, None) for name in _NORM_NAMES)
        norm = next((norm for norm in norms if norm is not None), None)
        if norm is None or self.lm_head is None:
            raise ValueError(f"{self.name} has no final norm or language-model head where draft heads could attach")
        self.norm: nn.Module = norm
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.hidden_size: int = self.lm_head.weight.shape[1]
        refuse_devices(model, self.device)
        self._helpers: list[nn.Module] = []
        self.draft_vocabularies: dict[nn.Module, object] = {}
        """By draft heads, what `drafters.draft_vocabulary` keeps for them: generations come and go."""
        self._hidden: torch.Tensor | None = None
        self.paths = FastPaths(self.device)
        """What is faster here than the model's own functions, and why not."""
        self.pool = BufferPool(self.device)
        """Buffers of texts that have ended, where passes are recorded."""
        self.bitwise = Bitwise(self)
        # Where attention reads the length of the text from device memory, passes are recorded.
        self.recorder: Recorder | None = None
        self.refresh_weights()
        probed = probe(self)
        self.attention_shape: AttentionShape = probed.attention_shape
        self.kv_bytes: int = probed.kv_bytes
        """Bytes of a token's keys and values in all layers."""
        self._logit_scale = probed.logit_scale
        self.flattens = runs_flattened(self)
        if self.flattens:
            self.paths.use(FLATTENED, "several texts are verified together")
        else:
            self.paths.leave_off(FLATTENED, "the model gives something else then, or cannot run them")
        self.set_recorder(tested_recorder(self, self.attention_shape))

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record passes with ``recorder``, or none."""
        self.recorder = recorder
        self.refresh_weights()

    def speed_up(self, module: nn.Module) -> None:
        """Let the layers of ``module`` run as fast as the model's own while the model is patched."""
        self._helpers.append(module)
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Take in what the user has changed in the model: weights, added layers, another dtype.

        Raises:
            ValueError: another vocabulary.
        """
        if self.lm_head.weight.shape[0] != self.vocab_size or self.model.get_output_embeddings() is not self.lm_head:
            raise ValueError("the model's vocabulary has changed: make a new Decoder")
        self._modules = list(self.model.modules())
        self.layers: int = self.model.config.num_hidden_layers
        self._faster: FastLayers | None = None
        if self.recorder is not None:
            self.pool.renew(RecordedState(self.model, self._modules, self.recorder))
        self.bitwise.refresh()

    def make_bitwise(self, wanted: BitwiseSetting) -> None:
        """Let logits depend on nothing that shares their pass, as far as the tests of `model.bitwise` allow.

        Raises:
            ValueError: ``wanted`` is True and cannot be had, or is none of True, False and "auto".
        """
        self.bitwise = Bitwise(self, wanted)
        self.bitwise.refresh()

    @property
    def _rule(self) -> PassRule | None:
        return self.bitwise.rule

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def draws_whole_trees(self) -> bool:
        """Whether the tokens of all nodes are drawn at once, as the host is slow to hear from the device."""
        return self.device.type == "cuda"

    def replacements(self) -> FastLayers:
        """What takes the place of the model's own functions while a pass runs."""
        if self._faster is None:
            of_helpers = [module for helper in self._helpers for module in helper.modules()]
            modules = [*self._modules, *of_helpers]
            found = tested_norms(modules, self.paths) | tested_products(modules, self.paths)
            called = {self.norm, self.lm_head, *of_helpers}
            if self.recorder is None:
                self.paths.leave_off(ROTARY, f"needs {RECORDED}")
            self._faster = FastLayers(
                layers=found,
                called={module: forward for module, forward in found.items() if module in called},
                # Passes are recorded where Triton works.
                rotary={} if self.recorder is None else tested_rotary(self._modules, self.attention_shape, self.paths),
            )
        return self._faster

    def fast_paths(self) -> list[FastPath]:
        """What is faster here than the model's own functions, and what is not, and why."""
        self.replacements()
        if self.recorder is not None and self.recorder.fault is not None:
            self.paths.leave_off(RECORDED, self.recorder.fault)
        return list(self.paths)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """What drafters call of the model, and the helpers, with faster layers; the model itself is patched per pass.

        Patched for one step at a time, so that between two chunks of a stream the model is the user's own.
        """
        with replaced(self.replacements().called):
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model in eval mode, with our attention and faster functions, its final norm's input recorded.

        Around each pass that runs and not around the step: a pass that is replayed needs none of it.
        """
        config, training = self.model.config, [module for module in self._modules if module.training]
        faster = self.replacements()
        implementation = config._attn_implementation
        hook = self.norm.register_forward_pre_hook(self._record)
        config._attn_implementation = attention.NAME
        for module in training:
            module.training = False
        try:
            with replaced(faster.layers), rotary_replaced(faster.rotary):
                yield
        finally:
            hook.remove()
            config._attn_implementation = implementation
            for module in training:
                module.training = True
            self._hidden = None

    def _record(self, norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._hidden = args[0]

    def _run(
        self,
        module: nn.Module,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        texts: Sequence[TextInPass],
        observed: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[int, torch.Tensor]]:
        """Run the model or its decoder on ids [2, T], tokens and positions, of all ``texts`` behind each other.

        Returns:
            Hidden states before the final norm [T, d], logits [T, V] unless ``module`` is the decoder, and the last
            ``observed`` queries of each layer.
        """
        queries: dict[int, torch.Tensor] = {}
        inputs = dict(input_ids=ids[:1], position_ids=ids[1:], past_key_values=cache, use_cache=True)
        with self._running():
            output = module(**inputs, texts=texts, queries=queries if observed else None, observed=observed)
            logits = output.logits[0] if module is self.model else None
            return self._hidden[0], logits, queries

    def _pass(
        self,
        module: nn.Module,
        tokens: Sequence[int] | torch.Tensor,
        positions: Sequence[int],
        cache: LayeredCache,
        mask: torch.Tensor | None = None,
        observed: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[int, torch.Tensor]]:
        """`_run` for one text; recorded where passes are, and replayed."""
        if isinstance(tokens, torch.Tensor):
            ids = torch.stack((tokens, upload(positions, self.device)))
        else:
            ids = torch.tensor([list(tokens), list(positions)])
        if self._rule is not None and cache.purpose == "text":
            return self._bitwise_pass(module, ids, cache, mask, observed)
        count = len(tokens)

        def run(ids: torch.Tensor, mask: torch.Tensor | None):
            return self._run(module, ids, cache, [TextInPass(count, mask, cache.kv_length)], observed)

        self._begin(cache, count)
        # Under autocast a graph would know copies of the weights that go when the user's block ends.
        if self.recorder is None or count > WIDEST_RECORDED or under_autocast():
            return run(upload(ids, self.device), None if mask is None else upload(mask, self.device))
        kind = (module is self.model, count, mask is None, observed)
        if kind not in cache.passes:
            cache.passes[kind] = FixedPass(self.recorder, self.device)
        return cache.passes[kind](run, ids, mask)

    def _bitwise_pass(
        self, module: nn.Module, ids: torch.Tensor, cache: LayeredCache, mask: torch.Tensor | None, observed: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[int, torch.Tensor]]:
        """`_run` for one text on ids [2, T] that stand in host memory, as `PassRule` wants it."""
        count = ids.shape[1]
        padding = max(0, self._rule.least - count)
        text = self._text(count + padding, ids[1].tolist(), mask, cache)
        if not padding:
            return self._run(module, ids, cache, [text], observed)
        # The first token once more: nothing looks at it, and no one keeps it.
        ids = torch.cat((ids, ids[:, :1].expand(-1, padding)), 1)
        hidden, logits, queries = self._run(module, ids, cache, [text], observed and observed + padding)
        queries = {layer: query[:, :, : query.shape[2] - padding] for layer, query in queries.items()}
        return hidden[:count], None if logits is None else logits[:count], queries

    def _text(self, count: int, positions: Sequence[int], mask: torch.Tensor | None, cache: LayeredCache) -> TextInPass:
        """A text's share of a pass of ``count`` tokens, for which its cache is made ready."""
        self._begin(cache, count)
        if self._rule is None or cache.purpose != "text":
            return TextInPass(count, mask, cache.kv_length)
        length = cache.get_seq_length()
        depths = [position - length for position in positions]
        return TextInPass(count, bitwise=BitwiseText(cache, length, depths, mask, self._rule.attention))

    def _begin(self, cache: LayeredCache, count: int) -> None:
        spare = SPARE if self._rule is not None and cache.purpose == "text" else 0
        cache.prepare(self.layers, None if self.recorder is None else self.pool, spare)
        cache.begin(count)

    def prefill(self, tokens: Sequence[int], cache: FullCache, observed: int = 0) -> dict[int, torch.Tensor]:
        """Commit ``tokens`` to an empty cache, chunk by chunk.

        Returns:
            The last ``observed`` queries per layer [1, H, T, D], fewer of a shorter prompt.
        """
        queries: dict[int, torch.Tensor] = {}
        # The odd chunk comes first, so that the last one is long enough to observe.
        size = _PREFILL_CHUNK_ON_CUDA if self.device.type == "cuda" else _PREFILL_CHUNK
        if self._rule is not None and self._rule.most is not None:
            size = self._rule.most
        starts = [0, *range(len(tokens) % size or size, len(tokens), size)]
        for start, end in pairwise([*starts, len(tokens)] if tokens else []):
            last = observed if end == len(tokens) else 0
            _, _, queries = self._pass(self.decoder, tokens[start:end], range(start, end), cache, observed=last)
            cache.keep(range(end - start))
        # Where the pass is recorded, the next one writes over its outputs.
        return {layer: query.clone() for layer, query in queries.items()}

    def width(self, nodes: int) -> int:
        """Positions that a verification of ``nodes`` nodes writes: more than that where passes have fixed widths."""
        if self._rule is not None:
            return max(nodes, self._rule.least)
        return nodes if self.recorder is None else padded_width(nodes)

    @property
    def most_nodes(self) -> int | None:
        """Of a tree; None without bound."""
        return None if self._rule is None else self._rule.most

    def forward(
        self, trees: Sequence[TokenTree], caches: Sequence[FullCache], observe: bool = False
    ) -> list[Verification]:
        """Verify: every node of each text's tree over its full cache, at position committed tokens + depth.

        The trees of several texts are verified in one flattened pass, their nodes behind each other; of a model that
        cannot run like that in a pass each.

        Args:
            observe: keep the queries of all nodes.
        """
        if len(trees) == 1:
            return [self._verify_one(trees[0], caches[0], observe)]
        if not self.flattens or self.most_nodes is not None:
            return [self._verify_one(*text, observe).detached() for text in zip(trees, caches, strict=True)]
        return self._verify(trees, caches, observe)

    def _verify_one(self, tree: TokenTree, cache: FullCache, observe: bool) -> Verification:
        nodes = len(tree)
        padding = 0 if self.recorder is None else self.width(nodes) - nodes
        # Padding sees itself alone, and nothing sees it. One kind of pass serves chains and trees.
        fixed = self.recorder is not None and nodes + padding > 1
        mask = tree.ancestor_mask(nodes + padding if fixed else None)
        positions = [cache.length + depth for depth in tree.depths] + [cache.length] * padding
        tokens = tree.tokens + [tree.tokens[0]] * padding
        observed = len(tokens) if observe else 0
        hidden, logits, queries = self._pass(self.model, tokens, positions, cache, mask, observed)
        return Verification(hidden[:nodes], logits[:nodes], queries)

    def _verify(self, trees: Sequence[TokenTree], caches: Sequence[FullCache], observe: bool) -> list[Verification]:
        """All trees in one pass, which is run as it is and not recorded: its shape changes with every step."""
        counts = [len(tree) for tree in trees]
        texts, positions = [], []
        for tree, cache in zip(trees, caches, strict=True):
            mask = tree.ancestor_mask()
            mask = None if mask is None else upload(mask, self.device)
            own = [cache.length + depth for depth in tree.depths]
            texts.append(self._text(len(tree), own, mask, cache))
            positions += own
        tokens = [token for tree in trees for token in tree.tokens]
        ids = upload([tokens, positions], self.device)
        observed = len(tokens) if observe else 0
        cache = FlattenedCaches(caches, counts) if len(caches) > 1 else caches[0]
        hidden, logits, queries = self._run(self.model, ids, cache, texts, observed)
        borders = pairwise(accumulate(counts, initial=0))
        return [
            Verification(
                hidden[start:end],
                logits[start:end],
                {layer: query[:, :, start:end] for layer, query in queries.items()},
            )
            for start, end in borders
        ]

    def draft(self, tokens: Sequence[int] | torch.Tensor, position: int, cache: LayeredCache) -> torch.Tensor:
        """Hidden states h0 [T, d] before the final norm of a run of tokens, the first at ``position``.

        A tensor of tokens, int64 [T], is on the model's device, and the host need not know what is in it.
        They attend to ``cache``, usually one that holds a part of the text, and to each other causally. Where passes
        are recorded, any other pass writes over them.
        """
        return self._pass(self.decoder, tokens, range(position, position + len(tokens)), cache)[0]

    def embed(self, tokens: int | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Input embeddings [d] of a token, or [n, d] of several; a tensor of them is on the model's device."""
        ids = tokens if isinstance(tokens, torch.Tensor) else upload(tokens, self.device)
        return self.model.get_input_embeddings()(ids)

    def wait(self) -> None:
        """Return once the device has done all it was asked for, so that clocks mean something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def head(self, normalised: torch.Tensor, rows: nn.Module | None = None) -> torch.Tensor:
        """Logits [..., V] of normalised hidden states [..., d], scaled as the model scales its own.

        ``rows`` stands in the place of the language-model head: some of its rows, for some of the tokens.
        """
        logits = (self.lm_head if rows is None else rows)(normalised)
        return logits if self._logit_scale == 1 else logits * self._logit_scale
