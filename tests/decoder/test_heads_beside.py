"""Without --heads a model is taken with the heads in folders beside its own, by every command alike."""

import argparse
from pathlib import Path

import pytest

from decoder import DraftHeads, Eagle3DraftModel
from decoder.cli.flags import add_loading_flags, heads_of
from decoder.drafters import METHODS
from decoder.eagle3.config import Eagle3Config
from decoder.heads_beside import heads_beside

from .conftest import tiny_llama

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny").mkdir()
    return tmp_path


def names(found: dict[str, str]) -> dict[str, str]:
    return {method: Path(path).name for method, path in found.items()}


def test_heads_that_are_called_after_the_model_come_first(folder):
    DraftHeads(8, kind="gated").save_pretrained(folder / "heads-tiny")
    DraftHeads(8, kind="chained").save_pretrained(folder / "heads-tiny-paper")
    DraftHeads(8, kind="gated").save_pretrained(folder / "heads-tiny-later")
    DraftHeads(8, kind="conditioned").save_pretrained(folder / "heads-tinyer")
    DraftHeads(8, kind="independent").save_pretrained(folder / "heads-a", base_model="tiny")
    found = names(heads_beside(folder / "tiny"))
    assert found == dict.fromkeys(("tokenswift", "tokenswift-fused", "auto"), "heads-tiny") | {
        "medusa": "heads-tiny-paper"
    }


@pytest.mark.parametrize("base", ["tiny", "models/tiny", "models/tiny/", "owner/tiny"])
def test_heads_that_were_trained_on_a_model_of_that_name_are_its_own(folder, base):
    for kind in ("gated", "chained", "independent"):
        DraftHeads(8, kind=kind).save_pretrained(folder / f"heads-{kind}", base_model=base)
    other = {"kind": "conditioned"}
    DraftHeads(8, **other).save_pretrained(folder / "heads-conditioned", base_model="tiny/other")
    DraftHeads(8, **other).save_pretrained(folder / "heads-nobody")
    assert names(heads_beside(folder / "tiny")) == {
        "tokenswift": "heads-chained",
        "medusa": "heads-independent",
        "tokenswift-fused": "heads-gated",
        "auto": "heads-gated",
    }


def test_a_files_heads_may_lie_beside_its_folder(folder):
    """As `make qwen` leaves the files, beside whose folders the heads that are shipped for them lie."""
    (folder / "tiny" / "tiny-q4.gguf").touch()
    DraftHeads(8, kind="gated").save_pretrained(folder / "heads-tiny", base_model="data/tiny/tiny-q4.gguf")
    DraftHeads(8, kind="gated").save_pretrained(folder / "heads-other", base_model="data/tiny/tiny-q8.gguf")
    found = names(heads_beside(folder / "tiny" / "tiny-q4.gguf"))
    assert found == dict.fromkeys(("tokenswift", "medusa", "tokenswift-fused", "auto"), "heads-tiny")
    DraftHeads(8, kind="gated").save_pretrained(folder / "tiny" / "heads-nearer", base_model="tiny-q4.gguf")
    assert set(names(heads_beside(folder / "tiny" / "tiny-q4.gguf")).values()) == {"heads-nearer"}


def test_a_draft_model_of_eagle3_tells_its_model_too(folder):
    config = Eagle3Config.for_model(tiny_llama().config)
    Eagle3DraftModel(config, own_head=True).save_pretrained(folder / "heads-one", base_model="owner/tiny")
    assert names(heads_beside(folder / "tiny")) == {"eagle3": "heads-one", "auto": "heads-one"}


def test_the_model_may_be_written_in_any_way(folder, monkeypatch):
    DraftHeads(8, kind="gated").save_pretrained(folder / "heads-tiny")
    monkeypatch.chdir(folder / "tiny")
    written = [".", "../tiny", "../tiny/", "./../tiny/.", folder / "tiny", f"{folder}/tiny/"]
    assert [names(heads_beside(model)).get("auto") for model in written] == ["heads-tiny"] * len(written)
    assert heads_beside("owner/tiny") == {}, "a hub id has no folder beside it"


@pytest.mark.parametrize("content", ["{", "[]", '{"speculators_config": 3}', '{"kind": "gated", "base_model": 3}'])
def test_a_folder_that_tells_nothing_is_passed_over(folder, content):
    (folder / "heads-broken").mkdir()
    (folder / "heads-broken/config.json").write_text(content)
    assert heads_beside(folder / "tiny") == {}


@pytest.mark.parametrize("model", ["reference-model", "smollm2"])
def test_the_shipped_models_have_their_heads(model, tmp_path):
    """smollm2 is fetched; its heads are there before."""
    (tmp_path / model).mkdir()
    for folder in DATA.glob("heads-*"):
        (tmp_path / folder.name).symlink_to(folder)
    by_kind = {"tokenswift": "chained", "medusa": "independent", "tokenswift-fused": "gated", "auto": "gated"}
    expected = {method: f"heads-{kind}" for method, kind in by_kind.items()}
    if model == "smollm2":
        expected = dict.fromkeys(by_kind, "heads-smollm2") | {"medusa": "heads-smollm2-chained"}
    assert names(heads_beside(tmp_path / model)) == expected


def test_flags_take_the_heads_of_the_method(folder):
    for kind in ("gated", "chained"):
        DraftHeads(8, kind=kind).save_pretrained(folder / f"heads-{kind}", base_model="tiny")
    parser = argparse.ArgumentParser()
    add_loading_flags(parser)
    args = parser.parse_args(["--model", str(folder / "tiny")])
    assert heads_of(args) == str(folder / "heads-gated"), "the method is auto"
    for method in METHODS:
        args.method = method
        assert heads_of(args) == heads_beside(folder / "tiny").get(method)
    args.heads = "given"
    assert heads_of(args) == "given"
