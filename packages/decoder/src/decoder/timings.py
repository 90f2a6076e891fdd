"""Where a generation's time goes: stages of the decoder tell a listener when they begin and when they end.

Nothing is measured here and no clock is read; without a listener a stage costs one call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STAGES = {
    "prefill": "a part of a prompt is run through the model",
    "step": "the texts that are decoded get their next tokens; in it are all of the following",
    "propose": "drafters make their trees",
    "verify": "a pass of the model over trees and full caches",
    "accept": "the tree's nodes get their tokens, and a path is found",
    "commit": "the path enters text, cache and drafter",
    "draft": "other passes: over a draft cache, of heads, of embeddings, of the language-model head (also in verify)",
    "scoring": "penalty, filters and noise on drafts",
    "sampling": "the same on verified nodes, and the choice of their tokens",
}
"""What the stages are. One may begin within another, and within one of its own name."""


class Listener(Protocol):
    """Is told of each stage, in the thread that decodes; on CUDA the device may lag behind what it is told."""

    def begin(self, stage: str) -> None:
        """A stage of `STAGES` begins."""

    def end(self, stage: str, result: object) -> None:
        """It has ended. ``result`` is None after an exception, and of a step the new token ids by sequence."""


_listener: Listener | None = None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of the stages in this block. Raises RuntimeError where there is one already."""
    global _listener
    if _listener is not None:
        raise RuntimeError("another listener is told of the stages: there can be one at a time")
    _listener = listener
    try:
        yield
    finally:
        _listener = None


def stage(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: the function is the stage of that name."""
    if name not in STAGES:
        raise ValueError(f"there is no stage {name!r}: use one of {', '.join(STAGES)}")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def staged(*args: P.args, **kwargs: P.kwargs) -> T:
            listener, result = _listener, None
            if listener is None:
                return function(*args, **kwargs)
            listener.begin(name)
            try:
                result = function(*args, **kwargs)
                return result
            finally:
                listener.end(name, result)

        return staged

    return decorate
