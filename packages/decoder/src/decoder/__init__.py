"""Lossless acceleration of ultra-long generation with Hugging Face causal language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decoder.collecting import uncollected

if TYPE_CHECKING:
    from decoder.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # PyTorch and transformers take seconds to import, which `decoder --help` is not to wait for.
    with uncollected():
        api = import_module("decoder.api")
    if name == "__all__":
        return api.__all__
    # Not yet all there while the package's own modules are imported.
    if name in getattr(api, "__all__", ()):
        return getattr(api, name)
    if name in globals():  # a module of the package, as it is imported by now
        return globals()[name]
    raise AttributeError(f"module 'decoder' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
