"""The target: a Hugging Face model, reached through its documented extension points."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from decoder import attention
from decoder.full_cache import FullCache
from decoder.linear import few_rows
from decoder.token_tree import TokenTree

_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
OBSERVED = 32
"""Queries at the end of the prompt that prefill hands on; the observation window of SnapKV (arXiv 2404.14469)."""

_PREFILL_CHUNK = 512


def refuse_unsupported(config) -> None:
    """Raise ValueError, with the reason, for an architecture that could not be decoded exactly."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; only decoder-only causal models can be accelerated")
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, field, None):
            raise ValueError(f"{name} caps logits ({field}); this attention does not, so the text would differ")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    # Mistral has no layer types: a window there binds every layer. Qwen2 has a switch beside it.
    if window and getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None):
        kinds.add("sliding_attention")
    if "sliding_attention" in kinds and window and window >= config.max_position_embeddings:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        kind = sorted(kinds - {"full_attention"})[0].replace("_", " ")
        raise ValueError(f"{name} has layers with {kind}; only full attention over the whole text can be accelerated")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(f"{name} uses {rope['rope_type']} rotary scaling, under which cached keys go stale")


@dataclass
class Verification:
    """What one forward pass over a tree gives, per node.

    Attributes:
        hidden: the last decoder layer's output before the final norm, [T, d].
        logits: [T, V].
        queries: per layer [B, H, T, D].
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    queries: dict[int, torch.Tensor]


class Target:
    """Runs the user's model over a cache, inside a `borrowed` block, and leaves the model as it was.

    Raises:
        ValueError: an architecture that could not be decoded exactly.
    """

    def __init__(self, model: PreTrainedModel):
        refuse_unsupported(model.config)
        self.model = model
        self.decoder = model.get_decoder()
        self.lm_head = model.get_output_embeddings()
        norm = next((getattr(self.decoder, n) for n in _NORM_NAMES if hasattr(self.decoder, n)), None)
        if norm is None or self.lm_head is None:
            raise ValueError(f"{model.config.model_type} has no final norm or output embedding where one is expected")
        self.norm: nn.Module = norm
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.hidden_size: int = self.lm_head.weight.shape[1]
        plain = self.device.type == "cpu" and self.lm_head.weight.dtype in (torch.float32, torch.float64)
        self._linears = [m for m in model.modules() if type(m) is nn.Linear] if plain else []

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """The model in eval mode, with our attention and linear layers, its final norm's input recorded.

        Borrowed for one step at a time, so that between two chunks of a stream the model is the user's own.
        """
        config, training = self.model.config, self.model.training
        implementation = config._attn_implementation
        hook = self.norm.register_forward_pre_hook(self._record)
        config._attn_implementation = attention.NAME
        if training:
            self.model.eval()
        try:
            with few_rows(self._linears):
                yield
        finally:
            hook.remove()
            config._attn_implementation = implementation
            if training:
                self.model.train()

    def _record(self, norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._hidden = args[0]

    def _inputs(self, tokens: Sequence[int], positions: Sequence[int], cache: Cache) -> dict:
        ids = torch.tensor([list(tokens), list(positions)], device=self.device)
        return dict(input_ids=ids[:1], position_ids=ids[1:], past_key_values=cache, use_cache=True)

    def prefill(self, tokens: Sequence[int], cache: FullCache) -> dict[int, torch.Tensor]:
        """Commit ``tokens`` to an empty cache, chunk by chunk; the last `OBSERVED` queries per layer, [B, H, T, D]."""
        queries: dict[int, torch.Tensor] = {}
        # The odd chunk comes first, so that the last one is long enough to observe.
        starts = [0, *range(len(tokens) % _PREFILL_CHUNK or _PREFILL_CHUNK, len(tokens), _PREFILL_CHUNK)]
        for start, end in pairwise([*starts, len(tokens)] if tokens else []):
            chunk = tokens[start:end]
            positions = range(start, start + len(chunk))
            self.decoder(**self._inputs(chunk, positions, cache), queries=queries)
            cache.keep(range(len(chunk)))
        return {layer: query[:, :, -OBSERVED:].clone() for layer, query in queries.items()}

    def forward(self, tree: TokenTree, cache: FullCache) -> Verification:
        """Verify: every node of ``tree`` over the full cache, at position committed tokens + depth."""
        queries: dict[int, torch.Tensor] = {}
        positions = [cache.length + depth for depth in tree.depths]
        mask = tree.ancestor_mask(self.device)
        output = self.model(**self._inputs(tree.tokens, positions, cache), tree_mask=mask, queries=queries)
        return Verification(self._hidden[0], output.logits[0], queries)

    def draft(self, tokens: Sequence[int], position: int, cache: Cache) -> torch.Tensor:
        """Hidden states h0 [T, d] before the final norm of a run of tokens, the first at ``position``.

        They attend to ``cache``, usually one that holds a part of the text, and to each other causally.
        """
        self.decoder(**self._inputs(tokens, range(position, position + len(tokens)), cache))
        return self._hidden[0]

    def embed(self, token: int) -> torch.Tensor:
        """Input embedding [d] of a token."""
        return self.model.get_input_embeddings()(torch.tensor(token, device=self.device))

    def head(self, normalised: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of normalised hidden states [..., d]."""
        return self.lm_head(normalised)
