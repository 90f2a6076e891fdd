"""Train the draft heads of a frozen Hugging Face model with Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heads_train.data import BooksDataModule
    from heads_train.loss import chunked_loss
    from heads_train.module import HeadsModule

__all__ = ["BooksDataModule", "HeadsModule", "chunked_loss"]

_PLACES = {"BooksDataModule": "data", "HeadsModule": "module", "chunked_loss": "loss"}


def __getattr__(name: str) -> Any:
    # Lightning and PyTorch take seconds to import, which `heads-train --help` is not to wait for.
    if name in _PLACES:
        return getattr(import_module(f"heads_train.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'heads_train' has no attribute {name!r}")
