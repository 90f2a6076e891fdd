"""Chunks of text for the heads, shuffled in an order that depends on the seed and the step only."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from heads_train.backbone import load_tokenizer
from heads_train.chunks import book_chunks
from heads_train.generated import FASTER, GeneratedChunks, GeneratedText
from heads_train.sources import Source, find_source

GENERATED = "generated"


class Chunks(Dataset):
    """``chunks`` [n, chunk_tokens] as items of int64 token ids [chunk_tokens]."""

    def __init__(self, chunks: np.ndarray):
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.chunks[index].astype(np.int64))


class EpochOrder(Sampler[int]):
    """One rank's share of ``size`` items in an order that is a pure function of (seed, epoch).

    In epoch ``first_epoch`` the first ``skip`` items are left out: they were seen before the run was cut.
    """

    def __init__(self, size: int, seed: int, rank: int = 0, ranks: int = 1, first_epoch: int = 0, skip: int = 0):
        self.size, self.seed, self.rank, self.ranks = size, seed, rank, ranks
        self.first_epoch, self.skip = first_epoch, skip
        self.epoch = first_epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size // self.ranks

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
        mine = order[self.rank :: self.ranks][: len(self)]
        yield from mine[self.skip if self.epoch == self.first_epoch else 0 :].tolist()


class BooksDataModule(L.LightningDataModule):
    """Chunks of text for training the heads (paper: the first 8,192 tokens of PG-19 books longer than that).

    Args:
        source: a folder with train/validation/test files (.jsonl.gz, .jsonl, .parquet, .txt, or .npy with rows of token
            ids) or with a .txt file per book (every tenth is then for validation and test), one such file (its last
            tenth is, as with a data set of one split), a Hugging Face data set id, or ``generated`` for text of the
            model's own.
        tokenizer: folder or hub id of the model.
        subset: configuration of a Hugging Face data set that has several.
        text_column: name of the column that holds the text.
        streaming: read a Hugging Face data set without keeping it on the disk; only its chunks are kept.
        chunk_tokens: tokens per chunk; shorter books are left out.
        chunks_per_book: chunks taken from the start of each book; None takes all.
        max_chunks: chunks after which reading a split stops; None reads it whole.
        batch_size: chunks per step and device.
        seed: of the order, and of generated text.
        cache_dir: where tokenised books and generated texts are kept; None is ~/.cache/heads-train.
        generated: how to generate, with source ``generated``.
    """

    def __init__(
        self,
        source: str,
        tokenizer: str,
        subset: str | None = None,
        text_column: str = "text",
        streaming: bool = False,
        chunk_tokens: int = 8192,
        chunks_per_book: int | None = 1,
        max_chunks: int | None = None,
        batch_size: int = 1,
        seed: int = 0,
        cache_dir: str | None = None,
        generated: GeneratedText | None = None,
    ):
        super().__init__()
        numbers = dict(
            chunk_tokens=chunk_tokens, chunks_per_book=chunks_per_book, max_chunks=max_chunks, batch_size=batch_size
        )
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}")
        if (source == GENERATED) != (generated is not None):
            raise ValueError("data.source generated and --data.generated.prompts (books or a data set) go together")
        self.source, self.tokenizer, self.subset, self.text_column = source, tokenizer, subset, text_column
        self.streaming, self.chunk_tokens, self.chunks_per_book = streaming, chunk_tokens, chunks_per_book
        self.max_chunks, self.batch_size, self.seed, self.generated = max_chunks, batch_size, seed, generated
        self.cache_dir = Path(cache_dir or Path.home() / ".cache" / "heads-train")
        self.chunks: dict[str, np.ndarray] = {}

    def describe(self) -> dict:
        """What the training chunks and their order follow from, by setting."""
        generated = asdict(self.generated) if self.generated else {}
        written = {name: value for name, value in generated.items() if name not in FASTER}
        return {
            "data.source": self.source,
            "data.subset": self.subset,
            "data.text_column": self.text_column,
            "data.chunk_tokens": self.chunk_tokens,
            "data.chunks_per_book": self.chunks_per_book,
            "data.max_chunks": self.max_chunks,
            "data.seed": self.seed,
            "data.generated": written,
            "training chunks": len(self.chunks["train"]),
        }

    @staticmethod
    def _splits(stage: str) -> tuple[str, ...]:
        if stage == "fit":
            return "train", "validation"
        return ("validation",) if stage == "validate" else ("test",)

    def prepare_data(self) -> None:
        splits = self._splits(self.trainer.state.fn)
        for split in splits:
            self._source(split)  # what is not there is told before anything is read
        # The smaller split first, so that what is wrong with it is told soon.
        for split in reversed(splits):
            self._books(split)

    def setup(self, stage: str) -> None:
        for split in self._splits(stage):
            self.chunks[split] = self._generated(split) if self.generated else self._books(split)
        self._tell()
        ranks = self.trainer.world_size
        if "train" in self.chunks and len(self.chunks["train"]) < self.batch_size * ranks:
            raise ValueError(
                f"{len(self.chunks['train'])} chunks do not fill one step of {ranks} x {self.batch_size}; "
                "lower --data.batch_size or --data.chunk_tokens"
            )

    @rank_zero_only
    def _tell(self) -> None:
        """Say what is trained on and what is held out, which is not always what a user thinks."""
        train = self.chunks.get("train")
        for split, chunks in self.chunks.items():
            source = self._source(split)
            where = source.described()
            if source.shared:
                where = f"the {'first' if split == 'train' else 'last'} ones of {where}"
            if self.generated:
                where = f"written by the model behind prompts from {where}"
            print(f"{split}: {len(chunks)} chunks of {self.chunk_tokens} tokens, {where}", flush=True)
            if train is not None and len(chunks) > len(train):
                print(
                    f"heads-train: there is more text for {split} than for training; unless that is meant, move files, "
                    "or bound a validation with --trainer.limit_val_batches",
                    file=sys.stderr,
                )

    def _source(self, split: str) -> Source:
        name = self.generated.prompts if self.generated else self.source
        return find_source(name, split, self.subset, self.streaming)

    def _books(self, split: str) -> np.ndarray:
        """The chunks of a split [n, chunk_tokens], or the prompts [n, prompt_tokens] of generated text."""
        tokens = self.generated.prompt_tokens if self.generated else self.chunk_tokens
        source = self._source(split)
        chunks = book_chunks(
            source,
            load_tokenizer(self.tokenizer),
            self.text_column,
            tokens,
            self.chunks_per_book,
            self.max_chunks,
            self.cache_dir,
        )
        if not source.shared:
            return chunks
        if len(chunks) < 2:
            more = "lower --data.chunk_tokens or add text"
            if self.chunks_per_book is not None:
                more = f"--data.chunks_per_book is {self.chunks_per_book}, null takes all of a text"
            raise ValueError(
                f"{source.name} gives a single chunk of {tokens} tokens, and validation needs one of its own: {more}"
            )
        held_out = max(1, len(chunks) // 10)
        return chunks[:-held_out] if split == "train" else chunks[-held_out:]

    def _generated(self, split: str) -> np.ndarray:
        texts = self.generated.texts if split == "train" else max(1, self.generated.texts // 16)
        chunks = GeneratedChunks(
            self.tokenizer,
            self.generated,
            self._books(split),
            texts,
            self.chunk_tokens,
            self.seed,
            self.cache_dir,
        )
        trainer = self.trainer
        chunks.make(trainer.global_rank, trainer.world_size, str(trainer.strategy.root_device))
        trainer.strategy.barrier("generated")
        return chunks.load()

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        if trainer.overfit_batches and trainer.ckpt_path:
            # Lightning puts its own sampler in the place of ours, which knows where to go on.
            raise ValueError("a run with --trainer.overfit_batches does not go on; give another --output")
        size = len(self.chunks["train"])
        # Every optimizer step takes `accumulate` batches but an epoch's last, which takes what is left.
        accumulate = trainer.accumulate_grad_batches
        batches = size // trainer.world_size // self.batch_size
        limit = trainer.limit_train_batches
        # A share that is less than one batch is for Lightning to refuse.
        batches = max(1, min(batches, limit) if isinstance(limit, int) else int(batches * limit))
        epoch, step = divmod(trainer.global_step, -(-batches // accumulate))
        order = EpochOrder(
            size, self.seed, trainer.global_rank, trainer.world_size, epoch, step * accumulate * self.batch_size
        )
        return DataLoader(Chunks(self.chunks["train"]), self.batch_size, sampler=order, drop_last=True)

    def _held_out(self, split: str) -> DataLoader:
        chunks, ranks = self.chunks[split], self.trainer.world_size
        # Shuffled too, always alike: a limit on the batches then draws from all books.
        order = np.random.default_rng(0).permutation(len(chunks))
        # Every rank takes as many, since sharded models run in step.
        order = np.resize(order, max(1, len(chunks) // ranks) * ranks)
        return DataLoader(Subset(Chunks(chunks), order[self.trainer.global_rank :: ranks].tolist()), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return self._held_out("validation")

    def test_dataloader(self) -> DataLoader:
        return self._held_out("test")
