"""Passages of books beside a model's own text: whole chunks, none twice."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "data/reference-model"


@pytest.fixture
def run(tmp_path, monkeypatch):
    books = tmp_path / "books"
    books.mkdir()
    with gzip.open(books / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        for book in range(3):
            text = " ".join(f"The {place}th house of street {book} was empty." for place in range(40))
            file.write(json.dumps({"text": text}) + "\n")

    def script(*more):
        flags = ["--model", MODEL, "--books", books, "--rows", 2, "--tokens", 32, "--output", tmp_path / "out", *more]
        monkeypatch.setattr(sys, "argv", ["add_books.py", *map(str, flags)])
        runpy.run_path(str(REPOSITORY / "data/scripts/add_books.py"), run_name="__main__")
        return [np.load(path) for path in sorted((tmp_path / "out").glob("train-books-*.npy"))]

    return script


def test_passages_are_whole_and_none_comes_twice(run):
    files = run("--files", 3)
    assert [rows.shape for rows in files] == [(2, 32)] * 3 and files[0].dtype == np.uint32
    rows = np.concatenate(files)
    assert len({row.tobytes() for row in rows}) == 6
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert all("house of street" in tokenizer.decode(row) for row in rows)
    # The same passages again, and others with another seed.
    assert all(np.array_equal(*pair) for pair in zip(run("--files", 3), files, strict=True))
    assert not np.array_equal(run("--files", 3, "--seed", 1)[0], files[0])


def test_more_passages_than_the_books_have_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        run("--files", 1000)
    assert "fewer than 1000 files of 2" in capsys.readouterr().err
