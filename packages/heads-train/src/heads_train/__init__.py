"""Train the draft heads of a frozen Hugging Face model with Lightning."""

from heads_train.data import BooksDataModule
from heads_train.loss import chunked_loss
from heads_train.module import HeadsModule

__all__ = ["BooksDataModule", "HeadsModule", "chunked_loss"]
