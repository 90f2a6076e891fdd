"""Train the draft heads of a frozen Hugging Face model with Lightning."""

from heads_train.data import BooksDataModule
from heads_train.loss import chunked_cross_entropy
from heads_train.module import HeadsModule

__all__ = ["BooksDataModule", "HeadsModule", "chunked_cross_entropy"]
