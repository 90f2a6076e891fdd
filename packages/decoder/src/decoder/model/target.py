"""The target: a Hugging Face model, reached through its documented extension points.

What has none, norms and rotary embeddings, is replaced while a pass runs, where a trial finds another function equal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.cache.base import LayeredCache
from decoder.cache.full import FullCache
from decoder.kernels import attention, split_kv
from decoder.kernels.cuda_graphs import CudaGraphs, FixedPass, Recorder, padded_width
from decoder.kernels.norms import fused_norms
from decoder.kernels.packed_linear import packed_layers, replaced, under_autocast
from decoder.kernels.rotary import FusedRotary, fused_rotary, rotary_replaced
from decoder.kernels.transfers import upload
from decoder.model.architectures import refuse_unsupported
from decoder.sampling.token_tree import TokenTree

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
OBSERVED = 32
"""Queries at the end of the prompt that prefill hands on; the observation window of SnapKV (arXiv 2404.14469)."""

_PREFILL_CHUNK = 512
_PREFILL_CHUNK_ON_CUDA = 2048
_WIDEST_RECORDED = 256  # tokens of a pass; the chunks of a prompt are longer, and too few to record

# More than half precision leaves in logits as relative error, less than another function of them would.
_LOGITS_TOLERANCE = 0.02


@dataclass
class Verification:
    """What one forward pass over a tree gives, per node.

    Where passes are recorded these are their outputs themselves, which any other pass writes over.

    Attributes:
        hidden: the last decoder layer's output before the final norm, [T, d].
        logits: [T, V].
        queries: per layer [B, H, T or more, D].
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    queries: dict[int, torch.Tensor]


class _Faster(NamedTuple):
    """What takes the place of the model's own functions while it runs, as it suits the device.

    Forwards of its layers and the helpers', those among them that drafters call themselves, and rotary embeddings.
    """

    layers: dict[nn.Module, Callable]
    called: dict[nn.Module, Callable]
    rotary: dict[ModuleType, FusedRotary]


class _ProbedCache(FullCache):
    """Tells which layers use it."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.written: set[int] = set()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.written.add(layer_idx)
        return super().update(key_states, value_states, layer_idx)


class Target:
    """Runs the user's model over a cache, inside a `borrowed` block, and leaves the model as it was.

    Making one runs the model on a tree of three tokens, to see that every layer takes this attention and what the
    model does to the output of its language-model head.

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
        self._refuse_devices()
        self._helpers: list[nn.Module] = []
        self.look_again()
        self._hidden: torch.Tensor | None = None
        # Where attention reads the length of the text from device memory, passes are recorded.
        self.recorder: Recorder | None = CudaGraphs(self.device) if split_kv.available(self.device) else None
        self._logit_scale = self._probe()

    def speed_up(self, module: nn.Module) -> None:
        """Let the layers of ``module`` run as fast as the model's own while the model is borrowed."""
        self._helpers.append(module)
        self.look_again()

    def look_again(self) -> None:
        """Take in what the user has changed in the model: weights, added layers, another dtype.

        Raises:
            ValueError: another vocabulary.
        """
        if self.lm_head.weight.shape[0] != self.vocab_size or self.model.get_output_embeddings() is not self.lm_head:
            raise ValueError("the model's vocabulary has changed: make a new Decoder")
        self._modules = list(self.model.modules())
        self._layers: int = self.model.config.num_hidden_layers
        self._faster: _Faster | None = None

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def _refuse_devices(self) -> None:
        devices = sorted({str(parameter.device) for parameter in self.model.parameters()})
        if len(devices) > 1:
            raise ValueError(f"the model is spread over {', '.join(devices)}; load it on one device")
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the model is on device {devices[0]}; only cpu and cuda are supported")

    @torch.inference_mode()
    def _probe(self) -> float:
        """Refuse what the configuration does not tell; the factor from the LM head's output to the model's logits."""
        experts = getattr(self.model.config, "_experts_implementation", None)
        if self.lm_head.weight.dtype == torch.float64 and experts == "grouped_mm":
            raise ValueError(f"{self.name} runs in float64 only with experts_implementation='eager': load it with that")
        tree = TokenTree(0)
        for token in (0, 1 % self.vocab_size):
            tree.add(0, token, "probe")
        cache = _ProbedCache(self.width(len(tree)))
        self._replacements()
        try:
            with self.borrowed():
                seen = self.forward(tree, cache)
                raw, logits = self.lm_head(self.norm(seen.hidden)).double(), seen.logits.double()
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{self.name} cannot be run with another attention and cache: {reason}") from error
        if not len(seen.queries) == len(cache.written) == self._layers:
            raise ValueError(
                f"{self.name} does not use transformers' attention interface and cache in all {self._layers} layers"
            )
        scale = float((raw * logits).sum() / raw.square().sum()) if raw.any() else 1.0
        if (raw * scale - logits).norm() > _LOGITS_TOLERANCE * logits.norm():
            raise ValueError(
                f"{self.name} changes its logits behind its language-model head; that cannot be drafted for"
            )
        return scale if abs(scale - 1) > _LOGITS_TOLERANCE else 1.0

    def _replacements(self) -> _Faster:
        if self._faster is None:
            of_helpers = [module for helper in self._helpers for module in helper.modules()]
            modules = [*self._modules, *of_helpers]
            found = fused_norms(modules)
            if self.device.type == "cpu":
                found |= packed_layers(modules)
            called = {self.norm, self.lm_head, *of_helpers}
            self._faster = _Faster(
                layers=found,
                called={module: forward for module, forward in found.items() if module in called},
                # Passes are recorded where Triton works.
                rotary=fused_rotary(self._modules, self.device) if self.recorder is not None else {},
            )
        return self._faster

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """What drafters call of the model, and the helpers, with faster layers; the model itself is taken pass by pass.

        Borrowed for one step at a time, so that between two chunks of a stream the model is the user's own.
        """
        with replaced(self._replacements().called):
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model in eval mode, with our attention and faster functions, its final norm's input recorded.

        Around each pass that runs and not around the step: a pass that is replayed needs none of it.
        """
        config, training = self.model.config, [module for module in self._modules if module.training]
        faster = self._replacements()
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

    def _pass(
        self,
        module: nn.Module,
        tokens: Sequence[int] | torch.Tensor,
        positions: Sequence[int],
        cache: LayeredCache,
        mask: torch.Tensor | None = None,
        observe: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[int, torch.Tensor] | None]:
        """Run the model or its decoder: hidden states before the final norm [T, d], logits [T, V], and queries."""

        def run(ids: torch.Tensor, mask: torch.Tensor | None):
            queries = {} if observe else None
            inputs = dict(input_ids=ids[:1], position_ids=ids[1:], past_key_values=cache, use_cache=True)
            with self._running():
                output = module(**inputs, tree_mask=mask, queries=queries, standing=cache.standing)
                logits = output.logits[0] if module is self.model else None
                return self._hidden[0], logits, queries

        fixed = None if self.recorder is None else self.device
        cache.prepare(self._layers, fixed)
        cache.begin(len(tokens))
        if isinstance(tokens, torch.Tensor):
            ids = torch.stack((tokens, upload(positions, self.device)))
        else:
            ids = torch.tensor([list(tokens), list(positions)])
        # Under autocast a graph would know copies of the weights that go when the user's block ends.
        if fixed is None or len(tokens) > _WIDEST_RECORDED or under_autocast():
            return run(upload(ids, self.device), None if mask is None else upload(mask, self.device))
        kind = (module is self.model, len(tokens), mask is None, observe)
        if kind not in cache.passes:
            cache.passes[kind] = FixedPass(self.recorder, self.device)
        return cache.passes[kind](run, ids, mask)

    def prefill(self, tokens: Sequence[int], cache: FullCache) -> dict[int, torch.Tensor]:
        """Commit ``tokens`` to an empty cache, chunk by chunk; the last `OBSERVED` queries per layer, [B, H, T, D]."""
        queries: dict[int, torch.Tensor] = {}
        # The odd chunk comes first, so that the last one is long enough to observe.
        size = _PREFILL_CHUNK_ON_CUDA if self.device.type == "cuda" else _PREFILL_CHUNK
        starts = [0, *range(len(tokens) % size or size, len(tokens), size)]
        for start, end in pairwise([*starts, len(tokens)] if tokens else []):
            chunk = tokens[start:end]
            positions = range(start, start + len(chunk))
            _, _, queries = self._pass(self.decoder, chunk, positions, cache, observe=True)
            cache.keep(range(len(chunk)))
        return {layer: query[:, :, -OBSERVED:].clone() for layer, query in queries.items()}

    def width(self, nodes: int) -> int:
        """Positions that a verification of ``nodes`` nodes writes: more than that where passes have fixed widths."""
        return nodes if self.recorder is None else padded_width(nodes)

    def forward(self, tree: TokenTree, cache: FullCache) -> Verification:
        """Verify: every node of ``tree`` over the full cache, at position committed tokens + depth."""
        nodes = len(tree)
        padding = self.width(nodes) - nodes
        # Padding sees itself alone, and nothing sees it. One kind of pass serves chains and trees.
        fixed = self.recorder is not None and nodes + padding > 1
        mask = tree.ancestor_mask(nodes + padding if fixed else None)
        positions = [cache.length + depth for depth in tree.depths] + [cache.length] * padding
        tokens = tree.tokens + [tree.tokens[0]] * padding
        hidden, logits, queries = self._pass(self.model, tokens, positions, cache, mask, observe=True)
        return Verification(hidden[:nodes], logits[:nodes], queries)

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

    def head(self, normalised: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of normalised hidden states [..., d], scaled as the model scales its own."""
        logits = self.lm_head(normalised)
        return logits if self._logit_scale == 1 else logits * self._logit_scale
