"""Books become chunks: from any source, once, in an order that can be gone on with."""

import gzip
import json
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_books import WORDS
from transformers import AutoTokenizer

from heads_train import chunks as chunks_module
from heads_train.data import BooksDataModule, EpochOrder
from heads_train.sources import LARGEST_TEXT, find_source


@pytest.fixture
def chunks_of(model, tmp_path):
    """The chunks of a split, by a data module with the given settings."""

    def read(source, split="train", **settings) -> np.ndarray:
        settings = {"chunk_tokens": 8, "cache_dir": str(tmp_path / "cache")} | settings
        module = BooksDataModule(str(source), str(model), **settings)
        strategy = SimpleNamespace(root_device="cpu", barrier=lambda name: None)
        stage = {"train": "fit", "validation": "validate", "test": "test"}[split]
        module.trainer = SimpleNamespace(world_size=1, global_rank=0, strategy=strategy)
        module._splits = lambda _: (split,)
        module.setup(stage)
        return module.chunks[split]

    return read


def write_books(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")


def words(count, begin=0):
    return " ".join(WORDS[(begin + i) % len(WORDS)] for i in range(count))


def test_first_chunk_of_each_book_or_as_many_as_asked(chunks_of, model, tmp_path, capsys):
    texts = [words(30), words(7), words(20, 5)]
    write_books(tmp_path / "train.jsonl", texts)
    ids = AutoTokenizer.from_pretrained(model)(texts)["input_ids"]
    first = chunks_of(tmp_path)
    assert first.tolist() == [ids[0][:8], ids[2][:8]]
    said = capsys.readouterr().out
    assert "1 of 3 texts" in said and "left out: shorter than 8 tokens" in said
    assert "train: 2 chunks of 8 tokens, train.jsonl" in said
    assert chunks_of(tmp_path, chunks_per_book=2).tolist() == [ids[0][:8], ids[0][8:16], ids[2][:8], ids[2][8:16]]
    assert len(chunks_of(tmp_path, chunks_per_book=None)) == 3 + 2


def test_only_the_needed_start_of_a_long_book_is_tokenised_and_agrees(chunks_of, model, tmp_path):
    # Words of 40 letters: the first reach of characters holds too few tokens, so the whole text is taken.
    long = " ".join(["x" * 40] * 400 + WORDS * 10)
    texts = [words(4000), long]
    write_books(tmp_path / "train.jsonl", texts)
    ids = AutoTokenizer.from_pretrained(model)(texts)["input_ids"]
    got = chunks_of(tmp_path, chunk_tokens=64, chunks_per_book=6)
    assert got.tolist() == [book[i * 64 : i * 64 + 64] for book in ids for i in range(6)]


def test_every_kind_of_file_gives_the_same_chunks(chunks_of, tmp_path):
    texts = [words(30), words(20, 5)]
    folders = {kind: tmp_path / kind for kind in ("jsonl", "parquet", "txt", "nested")}
    for folder in folders.values():
        folder.mkdir()
    write_books(folders["jsonl"] / "train.jsonl", texts)
    pq.write_table(pa.table({"text": texts}), folders["parquet"] / "train-00000-of-00001.parquet")
    (folders["nested"] / "train").mkdir()
    for i, text in enumerate(texts):
        (folders["txt"] / f"train-{i}.txt").write_text(text)
        (folders["nested"] / "train" / f"{i}.txt").write_text(text)
    expected = chunks_of(folders["jsonl"]).tolist()
    assert len(expected) == 2
    for folder in folders.values():
        assert chunks_of(folder).tolist() == expected


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that the real `datasets` library reads in place of the hub's ``someone/...``; returns the folder."""
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("load_dataset", "load_dataset_builder"):
        real = getattr(datasets, name)

        def local(path, *args, real=real, **kwargs):
            kwargs |= {"cache_dir": str(tmp_path / "datasets")}
            return real(path.replace("someone", str(folder)), *args, **kwargs)

        monkeypatch.setattr(datasets, name, local)
    # The library sleeps seconds at the end of every stream, against a bug at the interpreter's exit.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)
    return folder


def write_parquet(path, texts, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: texts, "title": ["A Book"] * len(texts)}), path)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_gives_the_chunks_of_its_text_column(chunks_of, hub, streaming):
    for split, begins in (("train", range(6)), ("validation", range(6, 8)), ("test", range(8, 10))):
        write_parquet(hub / "books" / f"{split}.parquet", [words(30, i) for i in begins], "body")
    settings = dict(text_column="body", streaming=streaming)
    read = {split: chunks_of("someone/books", split, **settings) for split in ("train", "validation", "test")}
    write_books(hub / "train.jsonl", [words(30, i) for i in range(6)])
    # A stream is shuffled by the reader, within a window.
    assert sorted(read["train"].tolist()) == sorted(chunks_of(hub).tolist())
    assert len(read["validation"]) == len(read["test"]) == 2
    with pytest.raises(ValueError, match=r"no text column 'text' but body, title; give --data.text_column"):
        chunks_of("someone/books", streaming=streaming)


def test_a_hub_data_set_of_one_split_holds_out_its_last_tenth(chunks_of, hub):
    write_parquet(hub / "plain" / "train.parquet", [words(30, i) for i in range(20)])
    assert len(chunks_of("someone/plain")) == 18
    assert len(chunks_of("someone/plain", "validation")) == 2
    write_parquet(hub / "plain" / "test.parquet", [words(30)])
    with pytest.raises(FileNotFoundError, match="has no validation split but train, test"):
        chunks_of("someone/plain", "validation")


def test_a_stream_is_read_no_further_than_asked(chunks_of, hub, monkeypatch):
    for i in range(4):
        write_parquet(hub / "large" / f"train-{i:05}-of-00004.parquet", [words(30, i)] * 300)
    rows = []
    encode = chunks_module._token_ids
    monkeypatch.setattr(chunks_module, "_token_ids", lambda t, texts, n: rows.extend(texts) or encode(t, texts, n))
    first = chunks_of("someone/large", streaming=True, max_chunks=20)
    # All splits share the set, so two of the twenty are held out.
    assert first.shape == (18, 8)
    assert len(rows) < 40
    assert np.array_equal(first, chunks_of("someone/large", streaming=True, max_chunks=20, cache_dir=str(hub / "c")))


def test_a_stream_that_breaks_off_says_so(chunks_of, hub):
    write_parquet(hub / "broken" / "train-0.parquet", [words(30)] * 2)
    (hub / "broken" / "train-1.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(OSError, match="the data set someone/broken could not be read from the Hugging Face hub"):
        chunks_of("someone/broken", streaming=True)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("train.jsonl.gz", lambda data: data[:40] + bytes(len(data) - 40), "train.jsonl.gz is damaged"),
        ("train.jsonl.gz", lambda data: data[: len(data) // 2], "train.jsonl.gz is cut short"),
        ("train.jsonl.gz", lambda data: data[:-8] + bytes(8), "train.jsonl.gz is damaged"),
        ("train.jsonl.gz", gzip.decompress, "train.jsonl.gz is damaged or no gzip file"),
        ("train.jsonl", lambda data: data, "train.jsonl is not UTF-8 text"),
    ],
)
def test_damaged_books_are_named(chunks_of, tmp_path, name, damage, reason):
    whole = "".join(json.dumps({"text": words(30, i)}) + "\n" for i in range(20)).encode()
    (tmp_path / name).write_bytes(damage(gzip.compress(whole)))
    with pytest.raises((OSError, ValueError), match=reason):
        chunks_of(tmp_path)


def test_reading_stops_at_max_chunks(chunks_of, tmp_path):
    write_books(tmp_path / "train.jsonl", [words(30, i) for i in range(5)])
    whole = chunks_of(tmp_path, chunks_per_book=None)
    assert chunks_of(tmp_path, chunks_per_book=None, max_chunks=4).tolist() == whole[:4].tolist()


def test_a_single_file_holds_out_its_last_tenth(chunks_of, tmp_path):
    (tmp_path / "book.txt").write_text(words(160))
    train, held_out = (chunks_of(tmp_path / "book.txt", split, chunks_per_book=None) for split in ("train", "test"))
    assert (len(train), len(held_out)) == (18, 2)
    assert not {tuple(chunk) for chunk in train.tolist()[-2:]} & {tuple(chunk) for chunk in held_out.tolist()}


def test_a_folder_of_text_files_holds_out_every_tenth_book(tmp_path):
    names = [f"{place:02}-of-twelve.txt" for place in range(11)] + ["training-day.txt"]
    for name in names:
        (tmp_path / name).write_text(words(20))

    def found(split):
        return [file.name for file in find_source(str(tmp_path), split).files]

    assert found("validation") == found("test") == [names[0], names[10]]
    assert found("train") == [*names[1:10], names[11]]
    # Folders of the splits come before that.
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"{split}-book.txt").write_text(words(20))
    assert (found("train"), found("validation")) == (["train-book.txt"], ["validation-book.txt"])
    with pytest.raises(FileNotFoundError, match="has no test file"):
        find_source(str(tmp_path), "test")


def test_a_single_book_in_a_folder_holds_out_its_end(chunks_of, tmp_path):
    (tmp_path / "book.txt").write_text(words(160))
    train, held_out = (chunks_of(tmp_path, split, chunks_per_book=None) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (18, 2)
    (tmp_path / "notes.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no train file .* and is no folder of \.txt files only"):
        find_source(str(tmp_path), "train")


def test_books_are_tokenised_once_until_they_change(chunks_of, tmp_path, monkeypatch):
    write_books(tmp_path / "train.jsonl", [words(30)])
    calls = []
    tokenise = chunks_module._tokenised
    monkeypatch.setattr(chunks_module, "_tokenised", lambda *args: calls.append(1) or tokenise(*args))
    chunks_of(tmp_path)
    chunks_of(tmp_path)
    assert len(calls) == 1
    chunks_of(tmp_path, chunk_tokens=16)
    write_books(tmp_path / "train.jsonl", [words(30), words(30)])
    assert len(chunks_of(tmp_path)) == 2
    assert len(calls) == 3


def test_order_changes_with_the_epoch_and_goes_on_where_it_was_cut():
    whole = EpochOrder(10, seed=1)
    first = list(whole)
    whole.set_epoch(1)
    second = list(whole)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    cut = EpochOrder(10, seed=1, first_epoch=1, skip=4)
    assert list(cut) == second[4:]
    assert len(cut) == 10


def test_ranks_share_an_epoch_without_overlap():
    shares = [list(EpochOrder(11, 0, rank, 2)) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 5
    assert not set(shares[0]) & set(shares[1])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train.jsonl", '{"body": "a"}\n', "no text column 'text' but body"),
        ("train.jsonl", "no json\n", "line 1 of .* is not JSON"),
        ("train.parquet", "no parquet", "is not a parquet file"),
        ("train.jsonl", "[1]\n", "line 1 of .* is no JSON object"),
        ("train.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n', "text in line 2 of .* is there twice"),
        ("train.jsonl", '{"text": null}\n', "column 'text' of .* holds NoneType, no text; give --data.text_column"),
        (
            "train.jsonl",
            '{"text": "a"}\n\n{"text": null}\n',
            "'text' of line 3 of .*train.jsonl holds NoneType, no text",
        ),
        (
            "train.jsonl",
            '{"text": "a"}\n{"text": 7}\n{"text": "b"}',
            "'text' of line 2 of .*train.jsonl holds int, no text",
        ),
        ("train.jsonl", '{"text": "a"}\n{"body": "a"}\n', "line 2 of .* has no text column 'text' but body"),
        (
            "train.jsonl",
            '{"text": "a"}\n{"text": "\\udc00"}\n',
            "'text' of line 2 of .* is not valid Unicode: character 1",
        ),
        (
            "train.jsonl",
            '{"text": "a"}\n{"n": ' + "1" * 5000 + "}",
            "line 2 of .* is not JSON: an integer has too many digits",
        ),
        ("train.jsonl", '{"text": "a"}\n' + "[" * 99_999, "line 2 of .* too deep"),
        ("train.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("train.txt", words(9).encode("utf-16-le"), "is not UTF-8 text .*as in UTF-16"),
        (
            "train.jsonl",
            '{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"),
            "line 2 of .* text .byte 11 is",
        ),
        ("train.txt", "the sea", "no text in .* has 8 tokens, the longest has 2; lower"),
        ("train.txt", "", r"all text in the train split of .* \(train.txt\) is empty: give some"),
        ("only.txt", words(20), "a single chunk of 8 tokens, .* --data.chunks_per_book is 1, null takes all"),
    ],
)
def test_unusable_books_are_refused_with_the_reason(chunks_of, tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=reason):
        chunks_of(tmp_path)


def test_a_text_too_large_to_be_tokenised_whole_is_told_before_it_is_read(tmp_path):
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(LARGEST_TEXT + 1)  # a hole: it takes no room
    with pytest.raises(ValueError, match=r"large.txt is one text of 0.3 GB.* cut it, as by split -C 256m"):
        find_source(str(tmp_path), "train")


def test_held_out_files_are_named_and_too_many_of_them_told(model, tmp_path, capsys):
    for split, count in (("train", 1), ("validation", 5)):
        for i in range(count):
            (tmp_path / f"{split}-{i}.txt").write_text(words(9, i))
    module = BooksDataModule(str(tmp_path), str(model), chunk_tokens=8, cache_dir=str(tmp_path / "cache"))
    module.trainer = SimpleNamespace(world_size=1, state=SimpleNamespace(fn="fit"))
    module.prepare_data()
    module.setup("fit")
    said = capsys.readouterr()
    held_out = "validation: 5 chunks of 8 tokens, validation-0.txt, validation-1.txt, validation-2.txt and 2 more"
    assert held_out in said.out
    assert "there is more text for validation than for training" in said.err


def test_damaged_parquet_files_are_named_with_the_row(chunks_of, tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"text": [words(9)]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 30 + whole[34:])
    with pytest.raises(OSError, match=r"train.parquet is damaged behind row 0; fetch it anew"):
        chunks_of(tmp_path)
    # What says that it is text and is none, as some writers leave it.
    bad = pa.Array.from_buffers(pa.utf8(), 1, pa.array([b"caf\xe9"]).buffers())
    pq.write_table(pa.table({"text": pa.concat_arrays([pa.array([words(9)] * 20), bad])}), path)
    with pytest.raises(ValueError, match=r"column 'text' of row 21 of .*train.parquet is not UTF-8 text"):
        chunks_of(tmp_path)


@pytest.mark.parametrize("number", [-1, 2**31, 2**62])
def test_numbers_that_are_no_token_ids_are_told_with_their_row(chunks_of, tmp_path, number):
    rows = np.ones((3, 9), np.int64)
    rows[1, 4] = number
    np.save(tmp_path / "train.npy", rows)
    with pytest.raises(ValueError, match=f"row 2 of .*train.npy holds {number}, which is no token id"):
        chunks_of(tmp_path)


def test_a_null_text_of_a_parquet_file_is_told_with_its_row(chunks_of, tmp_path):
    pq.write_table(pa.table({"text": [words(9)] * 30 + [None, words(9)]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"column 'text' of row 31 of .*train.parquet holds NoneType, no text"):
        chunks_of(tmp_path)


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl", "train.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_a_book(chunks_of, model, tmp_path, name):
    content = words(20) if name == "train.txt" else json.dumps({"text": words(20)}) + "\n\n"
    (tmp_path / "marked").mkdir()
    for folder, text in ((tmp_path, content), (tmp_path / "marked", "\ufeff" + content)):
        data = text.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert chunks_of(tmp_path / "marked").tolist() == chunks_of(tmp_path).tolist() != []


def test_missing_sources_are_refused_with_the_name(tmp_path, monkeypatch):
    (tmp_path / "notes.pdf").write_text("")
    with pytest.raises(FileNotFoundError, match="has no validation file"):
        find_source(str(tmp_path), "validation")
    with pytest.raises(ValueError, match="of no known kind"):
        find_source(str(tmp_path / "notes.pdf"), "train")
    with pytest.raises(FileNotFoundError, match="no file or folder of books at /nowhere/at/all"):
        find_source("/nowhere/at/all", "train")

    def unreachable(*_):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(OSError, match=r"data set some/books could not be read .*no route.*give --data.source a local"):
        find_source("some/books", "train")


def test_every_rank_measures_on_as_many_chunks(model, tmp_path):
    """Sharded models run in step, so a rank with a chunk more would wait for ever."""
    write_books(tmp_path / "validation.jsonl", [words(30, i) for i in range(5)])
    shares = []
    for rank in range(2):
        module = BooksDataModule(str(tmp_path), str(model), chunk_tokens=8, cache_dir=str(tmp_path / "cache"))
        module.trainer = SimpleNamespace(world_size=2, global_rank=rank)
        module.setup("validate")
        shares.append([chunk.tolist() for batch in module.val_dataloader() for chunk in batch])
    assert len(shares[0]) == len(shares[1]) == 2
    assert not any(chunk in shares[1] for chunk in shares[0])
