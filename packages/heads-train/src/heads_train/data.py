"""Books as token chunks: tokenised once, cached, shuffled in an order that depends on the seed and the step only."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from heads_train.backbone import load_tokenizer
from heads_train.sources import Source, find_source

BOOKS_AT_ONCE = 16
# A cut text's last tokens may differ from the whole text's.
CUT_TOKENS = 64


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
    """Chunks of books for training the heads (paper: the first 8,192 tokens of PG-19 books longer than that).

    Args:
        source: a folder with train/validation/test files (.jsonl.gz, .jsonl, .parquet, .txt), one such file (its
            last tenth is then for validation and test), or a Hugging Face data set id.
        tokenizer: folder or hub id of the model's tokenizer.
        text_column: name of the column that holds the text.
        chunk_tokens: tokens per chunk; shorter books are left out.
        chunks_per_book: chunks taken from the start of each book; None takes all.
        batch_size: chunks per step and device.
        seed: of the order.
        cache_dir: where tokenised books are kept; None is ~/.cache/heads-train.
    """

    def __init__(
        self,
        source: str,
        tokenizer: str,
        text_column: str = "text",
        chunk_tokens: int = 8192,
        chunks_per_book: int | None = 1,
        batch_size: int = 1,
        seed: int = 0,
        cache_dir: str | None = None,
    ):
        super().__init__()
        for name, value in (("chunk_tokens", chunk_tokens), ("chunks_per_book", chunks_per_book)):
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}")
        if batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1, got {batch_size}")
        self.source, self.tokenizer, self.text_column = source, tokenizer, text_column
        self.chunk_tokens, self.chunks_per_book, self.batch_size = chunk_tokens, chunks_per_book, batch_size
        self.seed = seed
        self.cache_dir = Path(cache_dir or Path.home() / ".cache" / "heads-train")
        self.chunks: dict[str, np.ndarray] = {}

    @staticmethod
    def _splits(stage: str) -> tuple[str, ...]:
        if stage == "fit":
            return "train", "validation"
        return ("validation",) if stage == "validate" else ("test",)

    def prepare_data(self) -> None:
        for split in self._splits(self.trainer.state.fn):
            self._cached(split)

    def setup(self, stage: str) -> None:
        for split in self._splits(stage):
            self.chunks[split] = self._cached(split)
        ranks = self.trainer.world_size
        if "train" in self.chunks and len(self.chunks["train"]) < self.batch_size * ranks:
            raise ValueError(
                f"{len(self.chunks['train'])} chunks do not fill one step of {ranks} x {self.batch_size}; "
                "lower --data.batch_size or --data.chunk_tokens"
            )

    def _cached(self, split: str) -> np.ndarray:
        """The chunks of a split [n, chunk_tokens] uint32, tokenised unless the cache has them."""
        source = find_source(self.source, split)
        tokenizer = load_tokenizer(self.tokenizer)
        settings = [source.key, _digest(tokenizer), self.text_column, self.chunk_tokens, self.chunks_per_book]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]
        path = self.cache_dir / f"{key}.npy"
        if not path.exists():
            chunks = self._tokenise(source, tokenizer)
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.cache_dir) as scratch:
                np.save(Path(scratch, path.name), chunks)
                os.replace(Path(scratch, path.name), path)
        chunks = np.load(path, mmap_mode="r")
        if not source.shared:
            return chunks
        held_out = max(1, len(chunks) // 10)
        return chunks[:-held_out] if split == "train" else chunks[-held_out:]

    def _tokenise(self, source: Source, tokenizer) -> np.ndarray:
        rows, books, short = [], 0, 0
        books_left = source.texts(self.text_column)
        while texts := list(islice(books_left, BOOKS_AT_ONCE)):
            for ids in self._token_ids(tokenizer, texts):
                count = min(len(ids) // self.chunk_tokens, self.chunks_per_book or len(ids))
                books, short = books + 1, short + (count == 0)
                tokens = np.array(ids[: count * self.chunk_tokens], dtype=np.uint32)
                rows.append(tokens.reshape(count, self.chunk_tokens))
        counted = f"{books} books in the {source.split} split of {source.name}"
        if books == short:
            raise ValueError(f"none of {counted} has {self.chunk_tokens} tokens; lower --data.chunk_tokens")
        chunks = np.concatenate(rows)
        print(f"{counted}: {len(chunks)} chunks of {self.chunk_tokens} tokens, {short} shorter books left out")
        return chunks

    def _token_ids(self, tokenizer, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, at least as far as they are needed: books are long, their starts often enough."""

        def encode(texts: list[str]) -> list[list[int]]:
            return tokenizer(texts, verbose=False)["input_ids"]

        if self.chunks_per_book is None:
            return encode(texts)
        needed = self.chunk_tokens * self.chunks_per_book
        reach = 8 * (needed + CUT_TOKENS)
        encoded = encode([text[:reach] for text in texts])
        for i, text in enumerate(texts):
            if len(text) > reach and len(encoded[i]) < needed + CUT_TOKENS:
                encoded[i] = encode([text])[0]
        return encoded

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        size = len(self.chunks["train"])
        # Every optimizer step takes `accumulate` batches but an epoch's last, which takes what is left.
        accumulate = trainer.accumulate_grad_batches
        batches = size // trainer.world_size // self.batch_size
        epoch, step = divmod(trainer.global_step, -(-batches // accumulate))
        order = EpochOrder(
            size, self.seed, trainer.global_rank, trainer.world_size, epoch, step * accumulate * self.batch_size
        )
        return DataLoader(Chunks(self.chunks["train"]), self.batch_size, sampler=order, drop_last=True)

    def _held_out(self, split: str) -> DataLoader:
        chunks = self.chunks[split]
        # Shuffled too, always alike: a limit on the batches then draws from all books.
        order = np.random.default_rng(0).permutation(len(chunks))
        mine = order[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(Subset(Chunks(chunks), mine.tolist()), self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return self._held_out("validation")

    def test_dataloader(self) -> DataLoader:
        return self._held_out("test")


def _digest(tokenizer) -> str:
    """Changes whenever a file of the tokenizer does."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
