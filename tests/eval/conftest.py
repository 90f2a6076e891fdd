"""A tiny random model with tokenizer, heads and prompts, laid out as data/ is."""

import functools
import gzip
import json
from pathlib import Path

import pytest
import torch
from tiny_reference import BOOKS, byte_tokenizer, save_model
from transformers import AutoConfig, BertConfig, BertModel

from decoder import DraftHeads, Eagle3DraftModel
from decoder.dflash.checkpoint import dflash_of
from decoder.eagle3.config import Eagle3Config
from decoder.heads_files import MODEL_WEIGHTS, write_checkpoint
from ts_eval.comparing import results, rounds


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A data folder: reference-model, heads-chained, heads-gated, heads-eagle3, heads-dflash, pg19/test.jsonl.gz."""
    folder = tmp_path_factory.mktemp("data")
    save_model(folder / "reference-model")
    DraftHeads(32).save_pretrained(folder / "heads-chained")
    DraftHeads(32, kind="gated").save_pretrained(folder / "heads-gated")
    config = AutoConfig.from_pretrained(folder / "reference-model")
    Eagle3DraftModel(Eagle3Config.for_model(config), own_head=True).save_pretrained(folder / "heads-eagle3")
    shape = config.to_dict() | {"architectures": ["DFlashDraftModel"], "block_size": 4}
    shape |= {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]}}
    write_checkpoint(folder / "heads-dflash", MODEL_WEIGHTS, dflash_of(shape).state_dict(), shape)
    (folder / "pg19").mkdir()
    with gzip.open(folder / "pg19/test.jsonl.gz", "wt", encoding="utf-8") as books:
        for title, text in BOOKS.items():
            books.write(json.dumps({"short_book_title": title, "text": text}) + "\n")
    return folder


@pytest.fixture(scope="session")
def embedding_model(tmp_path_factory) -> Path:
    """A tiny random encoder whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=64)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def short_warm_up():
    """A comparison's warm-up is for its times, and takes as long as the little texts of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "WARM_UP_NEW_TOKENS", 2)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_commit():
    """The decoder's source is the same in all tests; git and a digest look at it once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "_commit", functools.cache(results._commit))
        yield


@pytest.fixture
def prompt_file(tmp_path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(BOOKS["The Mill"], encoding="utf-8")
    return path
