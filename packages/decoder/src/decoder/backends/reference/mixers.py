"""Recurrent layers, token by token: each node of a pass from the state behind its parent, as plain decoding runs it."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from decoder.backends.base import Forwards
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.recurrent import MixerState, NodeStates, OneStateCache

# The methods by which a layer leaves its state in transformers' cache.
_LEAVING = frozenset(("update_conv_state", "update_recurrent_state", "set_linear_cache"))
# What passes hand to attention alone.
_OURS = frozenset(("asked", "kinds", "observed", "positions", "queries", "temperature", "texts"))


def mixers_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The recurrent layers among modules: those that leave a state in transformers' cache."""
    leaving = {kind: leaves_state(kind) for kind in set(map(type, modules))}
    return [module for module in modules if leaving[type(module)]]


def leaves_state(kind: type) -> bool:
    """Whether modules of this class leave a state in transformers' cache."""
    classes = [one for one in kind.__mro__ if issubclass(one, nn.Module) and one is not nn.Module]
    functions = (inspect.unwrap(one) for own in classes for one in vars(own).values() if inspect.isfunction(one))
    return any(_LEAVING & set(function.__code__.co_names) for function in functions)


def token_by_token(mixers: Sequence[nn.Module]) -> Forwards:
    """The forwards of a model's recurrent layers for passes over our caches."""
    return {mixer: _forward(mixer, index) for index, mixer in enumerate(mixers)}


def has_two_forms(mixer: nn.Module) -> bool:
    """Whether a layer computes one token in another way than many, and not only in another order.

    transformers' Mamba2 layers keep the time steps of many tokens within limits, and not that of one. There, as in
    ``generate``, a prompt's tokens are of the many, and all others are single ones.
    """
    low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
    return low > 0 or high < math.inf


def _forward(mixer: nn.Module, index: int) -> Callable:
    forward = partial(_run, mixer.forward, index, has_two_forms(mixer))
    # A forward of the user's own is what is run for each token.
    forward.over = mixer.__dict__.get("forward")  # type: ignore[attr-defined]
    return forward


def _run(own_forward: Callable, index: int, two_forms: bool, *args: Any, **named: Any) -> Any:
    """What a forward gives for hidden states [1, T, d], called for each of the T tokens with its parent's state."""
    given = [*args, *named.values()]
    cache = next((one for one in given if isinstance(one, LayeredCache | FlattenedCaches)), None)
    if cache is None:
        return own_forward(*args, **named)
    named = {name: value for name, value in named.items() if name not in _OURS}
    hidden = next(one for one in given if isinstance(one, torch.Tensor))
    texts = zip(cache.caches, cache.counts, strict=True) if isinstance(cache, FlattenedCaches) else [(cache, None)]
    outputs: list[Any] = []

    def forward(token: int, rows: torch.Tensor, state: OneStateCache) -> Any:
        own = partial(_of_token, hidden.shape[1], token, ((cache, state), (hidden, rows)))
        return own_forward(*map(own, args), **{name: own(one) for name, one in named.items()})

    for text, count in texts:
        states = text.recurrent
        assert isinstance(states, NodeStates)
        for node in range(hidden.shape[1] if count is None else count):
            token, before = len(outputs), states.before(index, node)
            row = hidden[:, token : token + 1]
            if two_forms and states.in_prompt(node):
                output, state = _as_one_of_many(partial(forward, token), row, before)
            else:
                own_cache = OneStateCache(before)
                output, state = forward(token, row, own_cache), own_cache.state
            outputs.append(output)
            states.behind(index, node, state)
    if isinstance(outputs[0], tuple):
        return torch.cat([output[0] for output in outputs], 1), *outputs[-1][1:]
    return torch.cat(outputs, 1)


def _as_one_of_many(forward: Callable, row: torch.Tensor, before: MixerState | None) -> tuple[torch.Tensor, MixerState]:
    """The output and state of a prompt's token, computed with the token before it as the many are.

    So it does not depend on how a prompt is cut. The state remembers the token, and what it began from.
    """
    cache, rows = OneStateCache(None), row
    if before is not None:
        assert before.row is not None
        cache, rows = OneStateCache(before.begun_from), torch.cat((before.row, row), 1)
    output = forward(rows, cache)[:, -1:]
    cache.state.begun_from, cache.state.row = None if before is None else before.alone(), row
    return output, cache.state


def _of_token(count: int, token: int, others: Sequence[tuple[Any, Any]], value: Any) -> Any:
    """What a token of ``count`` is given of an argument: another value in place of some, of the rest its own row."""
    for one, other in others:
        if value is one:
            return other
    if isinstance(value, tuple):
        return tuple(_of_token(count, token, others, one) for one in value)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == count:
        return value[:, token : token + 1]
    return value
