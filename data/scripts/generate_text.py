"""Text of the reference model's own, to train draft heads on what they will have to predict (self-distillation).

    python data/scripts/generate_text.py --model data/reference-model --books data/pg19 --output runs/generated

Batched sampling with transformers from beginnings cut out of the train books; the folder then holds train and
validation files that ``heads-train --data.source`` reads.
"""

from pathlib import Path

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from books import read_books, write_books


@click.command()
@click.option("--model", "path", required=True)
@click.option("--books", type=click.Path(path_type=Path, exists=True), required=True, help="folder with train.jsonl.gz")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--texts", default=1024, show_default=True)
@click.option("--prompt-tokens", default=64, show_default=True)
@click.option("--new-tokens", default=512, show_default=True)
@click.option("--batch-size", default=64, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(path, books, output, texts, prompt_tokens, new_tokens, batch_size, seed):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokens = np.concatenate(
        [tokenizer(book["text"], verbose=False)["input_ids"] for book in read_books(books / "train.jsonl.gz")]
    )
    made = []
    while len(made) < texts:
        starts = rng.integers(len(tokens) - prompt_tokens, size=batch_size)
        prompts = torch.from_numpy(np.stack([tokens[at : at + prompt_tokens] for at in starts]))
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            min_p=0.1,
            repetition_penalty=1.2,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=tokenizer.eos_token_id,
        )
        for number, text in enumerate(tokenizer.batch_decode(out, skip_special_tokens=True), start=len(made)):
            made.append(
                {
                    "short_book_title": f"Generated {number}",
                    "publication_date": 2026,
                    "url": f"generated/{number}",
                    "text": text,
                }
            )
        click.echo(f"{len(made)} of {texts} texts")
    held_out = max(1, len(made) // 16)
    output.mkdir(parents=True, exist_ok=True)
    write_books(output / "validation.jsonl.gz", made[:held_out])
    write_books(output / "train.jsonl.gz", made[held_out:])


if __name__ == "__main__":
    main()
