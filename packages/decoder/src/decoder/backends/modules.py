"""A pass through the user's model by transformers' own modules: with our attention and cache, and other forwards.

The model is reached through transformers' documented extension points. Norms, linear layers and rotary embeddings have
none; they are replaced while a pass runs.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decoder.backends import attention
from decoder.backends.attention import Attending, Scores, Temperature
from decoder.backends.base import Forwards, PassBackend, PassBatch, PassOutput
from decoder.backends.forwards import replaced
from decoder.backends.transfers import upload
from decoder.cache.argument import cache_named
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches

if TYPE_CHECKING:
    from decoder.model.target import Target

Around = AbstractContextManager[None]


class ModulePass:
    """Runs a model, or only its decoder, and leaves it as the user made it."""

    def __init__(self, target: "Target"):
        self._target = target
        self._hidden: list[torch.Tensor] = []
        self._features: list[torch.Tensor] = []
        self.asked: dict[int, Scores] | None = None
        """What layers ask their attention for is left here by layer, unless it is None."""
        self.compares_masks = False
        """Whether the masks that the model makes are compared with what is known of its layers."""

    def run(
        self, batch: PassBatch, new: Sequence[Attending], forwards: Forwards, around: Around | None = None
    ) -> PassOutput:
        """Run the tokens of a batch, of which ``new`` describes each sequence's to attention; see `run_ids`."""
        ids = ids_of(batch, self._target.device)
        return self.run_ids(batch.logits, ids, cache_of(batch), new, batch.observed, forwards, around)

    def run_ids(
        self,
        logits: bool,
        ids: torch.Tensor,
        cache: LayeredCache | FlattenedCaches,
        new: Sequence[Attending],
        observed: int,
        forwards: Forwards,
        around: Around | None = None,
    ) -> PassOutput:
        """The same for ids [2, T]: tokens and positions of all sequences in a row.

        Args:
            logits, observed: as in `PassBatch`.
            around: a block to run the model in.
        """
        target = self._target
        module = target.model if logits else target.decoder
        # MiniMax makes a cache of a class of its own, and takes another one only where it need make none.
        use_cache = not target.mixers
        inputs = dict(input_ids=ids[:1], position_ids=ids[1:], use_cache=use_cache) | cache_named(module, cache)
        queries: dict[int, torch.Tensor] = {}
        kinds, asked = target.layout.kinds, self.asked
        attending = dict(sequences=new, kinds=kinds, positions=ids[1], asked=asked, observed=observed)
        with self._patched(forwards), around or nullcontext():
            output = module(**inputs, **attending, queries=queries if observed else None)
            features = torch.cat(self._features, -1)[0] if self._features else None
            hidden = self._hidden[-1][0]
            return PassOutput(hidden, output.logits[0] if logits else hidden.new_empty(0, 0), queries, features)

    @contextmanager
    def _patched(self, forwards: Forwards) -> Iterator[None]:
        """A block in which the model is in eval mode, with our attention, the other forwards and the hooks."""
        target = self._target
        config, training = target.model.config, [module for module in target.modules if module.training]
        implementation = config._attn_implementation
        hooks = [target.norm.register_forward_pre_hook(self._catch_hidden)]
        if target.feature_layers:
            layers = [*target.decoder.layers, target.norm]
            read = (layers[layer] for layer in target.feature_layers)
            hooks += [layer.register_forward_pre_hook(self._catch_feature, with_kwargs=True) for layer in read]
        config._attn_implementation = attention.ASKING if self.compares_masks else attention.NAME
        for module in training:
            module.training = False
        try:
            with replaced({**target.tempered, **target.standing_for, **forwards}):
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


def standing_for(modules: Sequence[nn.Module]) -> Forwards:
    """Forwards of attention layers that several layers share, and that are told in each call for which one they stand.

    What they then hand to attention knows its number.
    """
    shared = [one for one in modules if getattr(one, "is_causal", False) and getattr(one, "layer_idx", 0) in (None, -1)]
    told = [one for one in shared if "layer_idx" in inspect.signature(type(one).forward).parameters]
    return {one: partial(_run_as, one) for one in told}


def _run_as(layer: Any, *args: Any, **named: Any) -> Any:
    own = layer.layer_idx
    layer.layer_idx = inspect.signature(type(layer).forward).bind(layer, *args, **named).arguments["layer_idx"]
    try:
        return type(layer).forward(layer, *args, **named)
    finally:
        layer.layer_idx = own


def tempered(modules: Sequence[nn.Module]) -> Forwards:
    """Forwards of attention layers that raise the temperature of a query by where it stands.

    They count the tokens of a pass from the cache's length on, as if these stood in a row. So it is left to attention,
    which knows the positions.
    """
    return {one: partial(_run_tempered, one) for one in modules if getattr(one, "attn_temperature_tuning", False)}


def _run_tempered(layer: Any, *args: Any, **named: Any) -> Any:
    temperature = None if layer.use_rope else Temperature(layer.floor_scale, layer.attn_scale)
    tuning, layer.attn_temperature_tuning = layer.attn_temperature_tuning, False
    try:
        return type(layer).forward(layer, *args, **named, temperature=temperature)
    finally:
        layer.attn_temperature_tuning = tuning


def ids_of(batch: PassBatch, device: torch.device) -> torch.Tensor:
    """Tokens and positions of all sequences of a batch in a row, int64 [2, T]."""
    first = batch.sequences[0]
    if isinstance(first.tokens, torch.Tensor):
        return torch.stack((first.tokens, upload(first.positions, device)))
    tokens = [token for sequence in batch.sequences for token in sequence.tokens]
    return upload([tokens, [position for sequence in batch.sequences for position in sequence.positions]], device)


def cache_of(batch: PassBatch) -> LayeredCache | FlattenedCaches:
    """The cache that a pass over a batch is given."""
    if len(batch.sequences) == 1:
        return batch.sequences[0].cache
    return FlattenedCaches([one.cache for one in batch.sequences], [len(one.tokens) for one in batch.sequences])


def one_sequence_at_a_time(backend: PassBackend, batch: PassBatch) -> PassOutput:
    """`PassBackend.run`, with a pass for each sequence."""
    ends = list(accumulate(len(sequence.tokens) for sequence in batch.sequences))
    first = ends[-1] - batch.observed  # of the tokens whose queries are wanted
    outputs = []
    for sequence, (start, end) in zip(batch.sequences, pairwise([0, *ends]), strict=True):
        observed = end - max(start, min(first, end)) if batch.observed else 0
        own = backend.run(PassBatch([sequence], batch.logits, observed))
        outputs.append(PassOutput.joined([own]) if len(batch.sequences) > 1 else own)
    return PassOutput.joined(outputs)
