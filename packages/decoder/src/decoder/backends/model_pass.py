"""A forward pass of the user's model: with our attention, cache and faster layers, and hooks that read its states."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from decoder.backends import attention
from decoder.backends.attention import TextInPass
from decoder.backends.cuda.cublas import full_reductions
from decoder.backends.cuda.rotary import rotary_replaced
from decoder.backends.fast_layers import FastLayers
from decoder.backends.native.packed_linear import replaced, under_autocast
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches


class PassOutput(NamedTuple):
    """What a pass over T tokens returns.

    Attributes:
        hidden: the hidden states before the final norm, [T, d].
        logits: [T, V]; None of the decoder alone.
        queries: by layer, the queries [1, H, n, D] of the last n tokens; empty unless they were asked for.
        features: the inputs of the layers that an EAGLE-3 draft model reads, joined [T, layers x d]; None if it reads
            none.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None
    queries: Mapping[int, torch.Tensor]
    features: torch.Tensor | None

    def first(self, count: int, padding: int) -> "PassOutput":
        """The outputs of the first ``count`` tokens, where ``padding`` tokens follow them."""
        queries = {layer: query[:, :, : query.shape[2] - padding] for layer, query in self.queries.items()}
        return self.part(slice(0, count), queries)

    def part(self, rows: slice, queries: Mapping[int, torch.Tensor]) -> "PassOutput":
        """The outputs of some tokens, with the ``queries`` given."""
        logits, features = (None if one is None else one[rows] for one in (self.logits, self.features))
        return PassOutput(self.hidden[rows], logits, queries, features)


class ModelPass:
    """Runs a model, or only its decoder, and leaves it as the user made it.

    Args:
        model: the model.
        norm: its final norm.

    Attributes:
        modules: all modules of the model, which the owner brings up to date.
        feature_layers: the layers whose inputs are returned as features; the number of layers stands for the input of
            the final norm.
    """

    def __init__(self, model: PreTrainedModel, norm: nn.Module):
        self.model, self.norm = model, norm
        self._head: nn.Module = model.get_output_embeddings()
        self.modules: list[nn.Module] = []
        self.feature_layers: tuple[int, ...] = ()
        self._hidden: list[torch.Tensor] = []
        self._features: list[torch.Tensor] = []

    def read_features(self, layers: Sequence[int]) -> None:
        """Return the inputs of these ``layers`` from now on.

        Raises:
            ValueError: the model's layers are not found.
        """
        if not isinstance(getattr(self.model.get_decoder(), "layers", None), nn.ModuleList):
            raise ValueError(f"{self.model.config.model_type} has no list of layers whose inputs could be read")
        self.feature_layers = tuple(layers)

    def run(
        self,
        module: nn.Module,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        texts: Sequence[TextInPass],
        observed: int,
        faster: FastLayers,
    ) -> PassOutput:
        """Run ``module``, the model or its decoder, on ids [2, T]: tokens and positions of all ``texts`` in a row.

        Args:
            observed: of how many tokens, from the last one on, queries are returned.
            faster: the functions that replace the model's own ones.
        """
        # Autocast chooses other dtypes inside of the model's own modules.
        if faster.model is not None and not under_autocast():
            hidden, kept, seen = faster.model(ids, cache, texts, observed, self.feature_layers)
            logits = self._head(self.norm(hidden))[0] if module is self.model else None
            return PassOutput(hidden[0], logits, seen, torch.cat(kept, -1)[0] if kept else None)
        inputs = dict(input_ids=ids[:1], position_ids=ids[1:], past_key_values=cache, use_cache=True)
        queries: dict[int, torch.Tensor] = {}
        # Bits are promised where attention follows positions.
        with self._patched(faster), nullcontext() if texts[0].tails is None else full_reductions():
            output = module(**inputs, texts=texts, queries=queries if observed else None, observed=observed)
            logits = output.logits[0] if module is self.model else None
            features = torch.cat(self._features, -1)[0] if self._features else None
            return PassOutput(self._hidden[-1][0], logits, queries, features)

    @contextmanager
    def _patched(self, faster: FastLayers) -> Iterator[None]:
        """A block in which the model is in eval mode, with our attention, the faster layers and the hooks."""
        config, training = self.model.config, [module for module in self.modules if module.training]
        implementation = config._attn_implementation
        hooks = [self.norm.register_forward_pre_hook(self._catch_hidden)]
        if self.feature_layers:
            layers = [*self.model.get_decoder().layers, self.norm]
            read = (layers[layer] for layer in self.feature_layers)
            hooks += [layer.register_forward_pre_hook(self._catch_feature, with_kwargs=True) for layer in read]
        config._attn_implementation = attention.NAME
        for module in training:
            module.training = False
        try:
            with replaced(faster.layers), rotary_replaced(faster.rotary):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            config._attn_implementation = implementation
            for module in training:
                module.training = True
            self._hidden, self._features = [], []

    def _catch_hidden(self, norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._hidden.append(args[0])

    def _catch_feature(self, layer: nn.Module, args: tuple, named: dict) -> None:
        self._features.append(args[0] if args else named["hidden_states"])
