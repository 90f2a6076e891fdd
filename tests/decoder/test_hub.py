"""Models and heads by hub id, from a folder laid out as the hub's client keeps what it has fetched."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import decoder
from decoder import SamplingParams

from ..tiny import byte_tokenizer
from .conftest import random_heads, tiny_llama

OLD, NEW = "a" * 40, "b" * 40
OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def keep(cache, name, commits, **references):
    """Lay out a repository in the hub's cache: of each commit a folder's files, and what branches and tags name."""
    root = cache / f"models--{name.replace('/', '--')}"
    for commit, folder in commits.items():
        snapshot = root / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in folder.iterdir():
            blob = root / "blobs" / f"{commit[:1]}-{file.name}"
            blob.parent.mkdir(exist_ok=True)
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(blob)
    (root / "refs").mkdir()
    for reference, commit in references.items():
        (root / "refs" / reference).write_text(commit)


def model_folder(folder, seed):
    tiny_llama(torch.float32, seed=seed, vocab_size=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def hub(tmp_path):
    """The arguments with which the hub's client looks into a cache, which has two commits of a model and of heads."""
    cache, model = tmp_path / "cache", tiny_llama(vocab_size=256)
    keep(
        cache,
        "someone/model",
        {OLD: model_folder(tmp_path / "old", 1), NEW: model_folder(tmp_path / "new", 2)},
        main=NEW,
        v1=OLD,
    )
    for seed in (1, 2):
        random_heads(model, seed=seed).save_pretrained(tmp_path / f"heads-{seed}")
    keep(cache, "someone/heads", {OLD: tmp_path / "heads-1", NEW: tmp_path / "heads-2"}, main=NEW)
    return dict(cache_dir=str(cache), local_files_only=True)


@pytest.fixture(autouse=True)
def no_question(monkeypatch):
    """What is to be found in the cache alone is not asked for."""

    def asked(*given, **named):
        raise AssertionError(f"the hub was asked: {given}")

    monkeypatch.setattr("huggingface_hub.utils._http.http_backoff", asked)


@pytest.mark.parametrize(("revision", "folder"), [(None, "new"), (OLD, "old"), ("v1", "old")])
def test_a_revision_pins_the_model(hub, tmp_path, revision, folder):
    pinned = {} if revision is None else dict(revision=revision)
    found = decoder.load("someone/model", "someone/heads", **hub, **pinned)
    given = decoder.load(tmp_path / folder, tmp_path / "heads-2")
    for ours, theirs in ((found.model, given.model), (found.heads["chained"], given.heads["chained"])):
        pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    asked = ("Call me", 20, "tokenswift", SamplingParams(seed=3))
    assert found.generate(*asked).text == given.generate(*asked).text


@pytest.mark.parametrize(("revision", "seed"), [(None, 2), (OLD, 1)])
def test_a_revision_pins_heads(hub, tmp_path, revision, seed):
    found = decoder.load_heads("someone/heads", revision=revision, **hub).state_dict()
    expected = load_file(tmp_path / f"heads-{seed}" / "heads.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_commit_that_is_not_there_is_told(hub):
    with pytest.raises(OSError, match="the model someone/model cannot be read"):
        decoder.load("someone/model", revision="c" * 40, **hub)
    with pytest.raises(OSError, match="no folder of heads at someone/heads, and it could not be read"):
        decoder.load_heads("someone/heads", revision="c" * 40, **hub)


def test_a_models_own_code_runs_only_where_the_user_says_so(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = model_folder(tmp_path / "own", 1)
    config = json.loads((folder / "config.json").read_text())
    config |= dict(model_type="own_llama", architectures=["OwnForCausalLM"])
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    keep(tmp_path / "cache", "someone/own", {OLD: folder}, main=OLD)
    # A command's input is no answer to a question that nobody has read.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(OSError, match=r"it has code of its own: .* trust_remote_code=True") as error:
        decoder.load("someone/own", **hub)
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("ran"))
    assert isinstance(decoder.load("someone/own", trust_remote_code=True, **hub).model, LlamaForCausalLM)
    assert list(tmp_path.rglob("ran"))


class RunsCode:
    def __reduce__(self):
        return pytest.fail, ("a pickle's code was run",)


def test_a_pickles_code_does_not_run(hub, tmp_path):
    folder = model_folder(tmp_path / "pickled", 1)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": RunsCode()}))
    keep(tmp_path / "cache", "someone/pickled", {OLD: folder}, main=OLD)
    with pytest.raises(OSError, match="the model someone/pickled cannot be read") as error:
        decoder.load("someone/pickled", **hub)
    assert "\n" not in str(error.value)
    for name in ("heads.safetensors", "config.json"):
        shutil.copy(tmp_path / "heads-1" / name, folder)
    (folder / "heads.safetensors").rename(folder / "pytorch_model.bin")
    keep(tmp_path / "cache", "someone/pickled-heads", {OLD: folder}, main=OLD)
    with pytest.raises(OSError, match=r"has no heads\.safetensors"):
        decoder.load_heads("someone/pickled-heads", **hub)
