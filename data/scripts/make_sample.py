"""Choose the PG-19 sample that the repository carries: every validation and test book, and some train books.

python data/scripts/make_sample.py --books BOOKS --output data/pg19
"""

from pathlib import Path

import click

from books import read_books, write_books

# Short and varied: enough text to train draft heads from, in about 5 MB compressed.
TRAIN_BOOKS = (36, 77, 84, 98, 120, 155, 174, 284, 345, 507, 768, 1342, 1661, 1895, 2166, 2226, 2701, 4276)
KEPT = {"validation": None, "test": None, "train": TRAIN_BOOKS}


@click.command()
@click.option("--books", type=click.Path(path_type=Path, exists=True), required=True, help="folder with *.jsonl.gz")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(books: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for split, wanted in KEPT.items():
        chosen = [
            book
            for book in read_books(books / f"{split}.jsonl.gz")
            if wanted is None or int(book["url"].rsplit("/", 1)[-1]) in wanted
        ]
        path = output / f"{split}.jsonl.gz"
        write_books(path, chosen)
        characters = sum(len(book["text"]) for book in chosen)
        click.echo(f"{split}: {len(chosen)} books, {characters:,} characters, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
