"""How a model of transformers calls the cache that it takes: `past_key_values`, from version 5.24 on `cache`."""

import inspect
from collections.abc import Callable
from functools import cache as remembered
from typing import Any

from torch import nn

CACHE_NAMES = ("cache", "past_key_values")


def cache_named(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The cache as an argument of the module's forward, by the name that causes no warning there."""
    return {_name(type(module).forward) or _usual_name(): cache}


def _usual_name() -> str:
    """For what takes any arguments and hands them on, such as a model with adapters."""
    # Slow to import, and needed here alone.
    from transformers import LlamaModel

    return _name(LlamaModel.forward) or CACHE_NAMES[-1]


@remembered
def _name(forward: Callable) -> str | None:
    return next((name for name in CACHE_NAMES if name in inspect.signature(forward).parameters), None)
