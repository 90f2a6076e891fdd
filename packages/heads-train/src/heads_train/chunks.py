"""Books as rows of token ids: tokenised once, kept in a folder, read from there without filling the memory."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from heads_train.sources import Source

# A fast tokenizer shares the texts of one call among all cores.
BOOKS_AT_ONCE = 16
# A cut text's last tokens may differ from the whole text's.
CUT_TOKENS = 64


def book_chunks(
    source: Source,
    tokenizer,
    text_column: str,
    chunk_tokens: int,
    chunks_per_book: int | None,
    max_chunks: int | None,
    cache_dir: Path,
) -> np.ndarray:
    """The chunks of a split [n, chunk_tokens] uint32, from ``cache_dir`` if they are there, else tokenised into it.

    Of every book the first ``chunks_per_book`` whole chunks (None: all); shorter books are left out and counted.
    Reading stops at ``max_chunks``. Raises ValueError when no book is long enough, and what the source raises.
    """
    limits = (text_column, chunk_tokens, chunks_per_book, max_chunks)
    key = hashlib.sha256(json.dumps([source.key(), tokenizer_digest(tokenizer), *limits]).encode()).hexdigest()[:24]
    path = cache_dir / f"{key}.uint32"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=cache_dir) as scratch:
            part = Path(scratch, path.name)
            with open(part, "wb") as file:
                for rows in _tokenised(source, tokenizer, *limits):
                    file.write(rows.tobytes())
            os.replace(part, path)
    return np.memmap(path, np.uint32, "r").reshape(-1, chunk_tokens)


def _tokenised(
    source: Source,
    tokenizer,
    text_column: str,
    chunk_tokens: int,
    chunks_per_book: int | None,
    max_chunks: int | None,
) -> Iterator[np.ndarray]:
    """The chunks of each book in order [count, chunk_tokens]; says at the end how many there were."""
    needed = None if chunks_per_book is None else chunk_tokens * chunks_per_book
    books = short = chunks = longest = 0
    left = max_chunks
    texts = iter(source.texts(text_column))
    with tqdm(unit=" books", desc=f"tokenising {source.name} ({source.split})", disable=None, leave=False) as progress:
        while left != 0 and (batch := list(islice(texts, BOOKS_AT_ONCE))):
            for ids in _token_ids(tokenizer, batch, needed):
                if left == 0:
                    break
                count = min(n for n in (len(ids) // chunk_tokens, chunks_per_book, left) if n is not None)
                books, short, chunks = books + 1, short + (count == 0), chunks + count
                longest = max(longest, len(ids))
                left = None if left is None else left - count
                yield np.array(ids[: count * chunk_tokens], dtype=np.uint32).reshape(count, chunk_tokens)
            progress.update(len(batch))
    split = f"the {source.split} split of {source.name} ({source.described()})"
    if not longest:
        raise ValueError(f"all text in {split} is empty: give some")
    if not chunks:
        raise ValueError(
            f"no text in {split} has {chunk_tokens} tokens, the longest has {longest}; lower --data.chunk_tokens"
        )
    if short:
        print(f"{short} of {books} texts in {split} left out: shorter than {chunk_tokens} tokens", flush=True)


def _token_ids(tokenizer, texts: list, needed: int | None) -> list:
    """Token ids of each text, at least the first ``needed``: books are long, their starts often enough.

    What is token ids already, an array, is taken as it is.
    """
    ready = [text if isinstance(text, np.ndarray) else None for text in texts]
    texts = [text for text in texts if isinstance(text, str)]
    encoded = iter(_encoded(tokenizer, texts, needed) if texts else ())
    return [next(encoded) if ids is None else ids for ids in ready]


def _encoded(tokenizer, texts: list[str], needed: int | None) -> list[list[int]]:

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, verbose=False)["input_ids"]

    if needed is None:
        return encode(texts)
    reach = 8 * (needed + CUT_TOKENS)
    encoded = encode([text[:reach] for text in texts])
    for i, text in enumerate(texts):
        if len(text) > reach and len(encoded[i]) < needed + CUT_TOKENS:
            encoded[i] = encode([text])[0]
    return encoded


def tokenizer_digest(tokenizer) -> str:
    """Changes whenever a file of the tokenizer does."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
