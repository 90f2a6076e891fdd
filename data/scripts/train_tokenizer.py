"""Train the byte-level BPE tokenizer of the reference model on the train books.

python data/scripts/train_tokenizer.py --books BOOKS --output data/reference-model
"""

from pathlib import Path

import click
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from books import read_books

END_OF_TEXT = "<|endoftext|>"


@click.command()
@click.option("--books", type=click.Path(path_type=Path, exists=True), required=True, help="folder with train.jsonl.gz")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--vocab-size", default=4096, show_default=True)
@click.option("--max-length", default=131_072, show_default=True, help="positions the model allows")
def main(books: Path, output: Path, vocab_size: int, max_length: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((book["text"] for book in read_books(books / "train.jsonl.gz")), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(output)
    click.echo(f"{len(fast)} entries in {output}")


if __name__ == "__main__":
    main()
