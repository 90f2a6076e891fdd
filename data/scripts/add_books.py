"""Adds passages of books to a folder of a model's own text, so that its draft heads learn from both.

    python data/scripts/add_books.py --model data/smollm2 --books data/pg19 --files 30 --output OUT

Writes OUT/train-books-NNN.npy, [rows, tokens] uint32, beside what generate_own_text.py wrote there. Passages are whole
chunks of the train books in a shuffled order, none twice.
"""

import argparse
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from heads_train.chunks import book_chunks
from heads_train.sources import find_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/smollm2"))
    parser.add_argument("--books", default="data/pg19")
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    source = find_source(arguments.books, "train")
    chunks = book_chunks(source, tokenizer, "text", arguments.tokens, None, None, arguments.output / "tokenised")
    order = np.random.default_rng(arguments.seed).permutation(len(chunks))
    if len(order) < arguments.files * arguments.rows:
        parser.error(f"the books hold {len(order)} passages, fewer than {arguments.files} files of {arguments.rows}")
    passages = np.asarray(chunks)[order].reshape(-1, arguments.tokens)
    for number in range(arguments.files):
        rows = passages[number * arguments.rows :][: arguments.rows]
        np.save(arguments.output / f"train-books-{number:03}.npy", rows)


if __name__ == "__main__":
    main()
