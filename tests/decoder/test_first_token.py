"""What `decoder run` does before its first token, and what it leaves out."""

import json
import subprocess
import sys

import gguf
import pytest

import decoder
from decoder.model import loading

from .test_gguf import hf_model, write_gguf  # noqa: F401 (a fixture)

# Slow to import, and needed by other commands, other models or other programs.
ELSEWHERE = (
    *("transformers.models.gemma3.modeling_gemma3", "transformers.models.qwen2.modeling_qwen2"),
    *("decoder.hf", "decoder.serve.app", "decoder.backends.cuda", "uvicorn", "starlette", "llguidance"),
    *("datasets", "lightning", "matplotlib", "pandas", "peft", "pyarrow", "scipy", "sklearn", "torchmetrics"),
)


@pytest.fixture
def file(hf_model, tmp_path):  # noqa: F811
    path = tmp_path / "a.gguf"
    write_gguf(path, hf_model, gguf.GGMLQuantizationType.Q8_0)
    return str(path)


def test_nothing_is_imported_that_the_model_does_not_need_and_no_cycles_are_looked_for(file):
    code = f"""
import gc, json, sys
from decoder.__main__ import main
status = main(["run", "--model", {file!r}, "--chat", "he", "--max-new-tokens", "1"])
told = dict(status=status, imported=[name for name in {ELSEWHERE} if name in sys.modules])
print(json.dumps(told | dict(searches=gc.get_stats()[2]["collections"])), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = json.loads(done.stderr.splitlines()[-1])
    assert (told["status"], told["imported"]) == (0, []), done.stderr
    # Of all objects. While PyTorch and transformers are imported there would be half a dozen.
    assert told["searches"] <= 2


def test_the_tokenizer_is_read_once(file, monkeypatch, capsys):
    from decoder.__main__ import main

    read, own = [], loading.gguf_tokenizer
    monkeypatch.setattr(loading, "gguf_tokenizer", lambda opened: read.append(opened.path) or own(opened))
    assert main(["run", "--model", file, "--chat", "he", "--max-new-tokens", "1"]) == 0, capsys.readouterr().err
    assert len(read) == 1


def test_a_tokenizer_that_was_read_before_is_the_decoders(file):
    tokenizer = loading.read_tokenizer(file)
    assert decoder.load(file, tokenizer=tokenizer).tokenizer is tokenizer
    with pytest.raises(ValueError, match="the tokenizer must be one of transformers"):
        decoder.load(file, tokenizer="a")
