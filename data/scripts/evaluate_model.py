"""Bits per character of a model on the validation books, whole and by position in the book.

python data/scripts/evaluate_model.py --model data/reference-model --books BOOKS
"""

import math
from pathlib import Path

import click
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from books import read_books

POSITIONS = ((0, 2048), (2048, 4096), (4096, 8192), (8192, 16_384))


@torch.inference_mode()
def bits(model, ids: list[int]) -> torch.Tensor:
    """Bits of each token of ``ids`` [n] given those before it, [n - 1]."""
    device = model.device
    tokens = torch.tensor(ids, device=device)
    hidden = model.get_decoder()(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
    parts = [
        F.cross_entropy(model.get_output_embeddings()(h).float(), t, reduction="none")
        for h, t in zip(hidden.split(1024), tokens[1:].split(1024), strict=True)
    ]
    return torch.cat(parts).cpu() / math.log(2)


@click.command()
@click.option("--model", "path", required=True)
@click.option("--books", type=click.Path(path_type=Path, exists=True), required=True, help="folder with *.jsonl.gz")
@click.option("--split", default="validation", show_default=True)
@click.option("--window", default=2048, show_default=True, help="tokens per window of the whole-book figure")
def main(path: str, books: Path, split: str, window: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    start = [tokenizer.eos_token_id]
    total_bits = total_characters = 0.0
    by_position = {span: [0.0, 0] for span in POSITIONS}
    for book in read_books(books / f"{split}.jsonl.gz"):
        ids = tokenizer(book["text"], verbose=False)["input_ids"]
        here = sum(bits(model, start + ids[at : at + window]).sum().item() for at in range(0, len(ids), window))
        click.echo(f"{here / len(book['text']):.3f}  {book['short_book_title']}")
        total_bits += here
        total_characters += len(book["text"])
        opening = ids[: POSITIONS[-1][1]]
        each = bits(model, start + opening)
        for (first, last), sums in by_position.items():
            sums[0] += each[first:last].sum().item()
            sums[1] += len(tokenizer.decode(opening[first:last]))
    click.echo(f"{total_bits / total_characters:.3f} bits per character over all, windows of {window} tokens")
    for (first, last), (sum_bits, characters) in by_position.items():
        click.echo(f"{sum_bits / characters:.3f} bits per character at tokens {first}-{last} of a book")


if __name__ == "__main__":
    main()
