"""Recurrent layers, token by token: each node of a pass from the state behind its parent, as plain decoding runs it.

Products of their inputs, and the last one, are computed for all tokens of a pass at once: no state takes part in them.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from decoder.backends.base import Forwards
from decoder.backends.forwards import replaced
from decoder.backends.native.quantised import QuantisedLinear
from decoder.cache.base import LayeredCache
from decoder.cache.flattened import FlattenedCaches
from decoder.cache.recurrent import MixerState, NodeStates, OneStateCache

# The methods by which a layer leaves its state in transformers' cache.
_LEAVING = frozenset(("update_conv_state", "update_recurrent_state", "set_linear_cache"))
# What passes hand to attention alone.
_OURS = frozenset(("asked", "kinds", "observed", "positions", "queries", "temperature", "sequences"))


def mixers_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The recurrent layers among modules: those that leave a state in transformers' cache."""
    leaving = {kind: leaves_state(kind) for kind in set(map(type, modules))}
    return [module for module in modules if leaving[type(module)]]


def leaves_state(kind: type) -> bool:
    """Whether modules of this class leave a state in transformers' cache."""
    classes = [one for one in kind.__mro__ if issubclass(one, nn.Module) and one is not nn.Module]
    functions = (inspect.unwrap(one) for own in classes for one in vars(own).values() if inspect.isfunction(one))
    return any(_LEAVING & set(function.__code__.co_names) for function in functions)


def token_by_token(
    mixers: Sequence[nn.Module], of: Callable[[nn.Module], Callable] = lambda mixer: mixer.forward
) -> Forwards:
    """The forwards of a model's recurrent layers for passes over our caches; ``of`` gives what runs one token."""
    return {mixer: _forward(mixer, of(mixer), index) for index, mixer in enumerate(mixers)}


def has_two_forms(mixer: nn.Module) -> bool:
    """Whether a layer computes one token in another way than many, and not only in another order.

    transformers' Mamba2 layers keep the time steps of many tokens within limits, and not that of one. There, as in
    ``generate``, a prompt's tokens are of the many, and all others are single ones.
    """
    low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
    return low > 0 or high < math.inf


def _forward(mixer: nn.Module, own: Callable, index: int) -> Callable:
    forward = partial(_run, mixer, own, index, has_two_forms(mixer))
    # A forward of the user's own is what is run for each token.
    forward.over = mixer.__dict__.get("forward")  # type: ignore[attr-defined]
    return forward


def _hooked(module: nn.Module) -> bool:
    """Whether something of the user's must see what a module is given for each token."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _Products:
    """The products of a mixer over hidden states [1, T, d], while it is called for each of the T tokens.

    Those that read a token's own row are computed for all rows when the first one asks for them. The one whose outputs
    the mixer returns is left to `finished`.
    """

    def __init__(self, mixer: nn.Module, hidden: torch.Tensor):
        linear = [one for one in mixer.modules() if isinstance(one, nn.Linear | QuantisedLinear) and not _hooked(one)]
        self._own: dict[nn.Module, Callable] = {one: one.forward for one in linear} if hidden.shape[1] > 1 else {}
        self._hidden, self._token, self._row = hidden, 0, hidden
        self._computed: dict[nn.Module, torch.Tensor] = {}
        self._called: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
        self._last: nn.Module | None = None
        self._behind: list[torch.Tensor] = []
        self._finish: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone

    def forwards(self) -> Forwards:
        """Those that stand in the place of the products' own."""
        found: dict[nn.Module, Callable] = {one: partial(self._forward, one) for one in self._own}
        for one, forward in found.items():
            forward.over = one.__dict__.get("forward")  # type: ignore[attr-defined]
        return found

    def begin(self, token: int, row: torch.Tensor) -> None:
        """A token's call is to come, with its row of the hidden states."""
        self._token, self._row, self._called = token, row, []

    def _forward(self, linear: Any, x: torch.Tensor) -> torch.Tensor:
        if x is self._row:
            if linear not in self._computed:
                self._computed[linear] = self._own[linear](self._hidden)
            return self._computed[linear][:, self._token : self._token + 1]
        deferred = linear is self._last and x.shape[:-1] == (1, 1)
        out = x.new_empty(1, 1, linear.out_features) if deferred else self._own[linear](x)
        self._called.append((linear, x, out))
        return out

    def returned(self, output: torch.Tensor) -> bool | None:
        """Whether what a call has returned is left to `finished`; None where the call must be made again."""
        linear, x, out = self._called[-1] if self._called else (None, None, None)
        deferred = self._last is not None and any(one is self._last for one, *_ in self._called)
        if not deferred:
            self._last = linear if out is output else None
            return False
        assert self._last is not None
        if out is not output or linear is not self._last or x is None:
            # What the mixer does with the outputs of its last product follows from the token.
            self._own, self._last = {}, None
            return None
        self._finish = self._own[self._last]
        self._behind.append(x)
        return True

    def finished(self, outputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """The outputs of all calls, of which those that were left are None."""
        rest: Iterator[torch.Tensor] = iter(())
        if self._behind:
            rest = iter(self._finish(torch.cat(self._behind, 1)).split(1, 1))
        return [next(rest) if one is None else one for one in outputs]


def _run(mixer: nn.Module, own_forward: Callable, index: int, two_forms: bool, *args: Any, **named: Any) -> Any:
    """What a forward gives for hidden states [1, T, d], called for each of the T tokens with its parent's state."""
    given = [*args, *named.values()]
    cache = next((one for one in given if isinstance(one, LayeredCache | FlattenedCaches)), None)
    if cache is None:
        return own_forward(*args, **named)
    named = {name: value for name, value in named.items() if name not in _OURS}
    hidden = next(one for one in given if isinstance(one, torch.Tensor))
    sequences = zip(cache.caches, cache.counts, strict=True) if isinstance(cache, FlattenedCaches) else [(cache, None)]
    products = _Products(mixer, hidden)
    outputs: list[torch.Tensor | None] = []
    beside: tuple | None = None

    def forward(token: int, rows: torch.Tensor, state: OneStateCache) -> torch.Tensor:
        nonlocal beside
        own = partial(_of_token, hidden.shape[1], token, ((cache, state), (hidden, rows)))
        output = own_forward(*map(own, args), **{name: own(one) for name, one in named.items()})
        beside = output[1:] if isinstance(output, tuple) else None
        return output[0] if isinstance(output, tuple) else output

    for sequence, count in sequences:
        states = sequence.recurrent
        assert isinstance(states, NodeStates)
        for node in range(hidden.shape[1] if count is None else count):
            token, before = len(outputs), states.before(index, node)
            row = hidden[:, token : token + 1]
            if two_forms and states.in_prompt(node):
                output, state = _as_one_of_many(partial(forward, token), row, before)
                outputs.append(output)
            else:
                left = None
                while left is None:
                    products.begin(token, row)
                    own_cache = OneStateCache(before)
                    with replaced(products.forwards()):
                        output, state = forward(token, row, own_cache), own_cache.state
                    left = products.returned(output)
                outputs.append(None if left else output)
            states.behind(index, node, state)
    joined = torch.cat(products.finished(outputs), 1)
    return joined if beside is None else (joined, *beside)


def _as_one_of_many(
    forward: Callable[..., torch.Tensor], row: torch.Tensor, before: MixerState | None
) -> tuple[torch.Tensor, MixerState]:
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
