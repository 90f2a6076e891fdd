"""The reference model with wider rows, as a GGUF file: what comparisons of formats run on is the model itself."""

import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

import decoder

sys.path.append(str(Path(__file__).parents[2] / "data" / "scripts"))
from reference_gguf import DATA, WIDTH, ggml, write, write_heads


def test_the_file_is_the_model_and_its_heads_draft_the_same(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(DATA / "reference-model", dtype=torch.float32)
    write(tmp_path / "F32.gguf", model, gguf.GGMLQuantizationType.F32, None)
    write_heads(tmp_path / "heads")
    narrow = decoder.load(DATA / "reference-model", DATA / "heads-independent", dtype="float32")
    wide = decoder.load(tmp_path / "F32.gguf", tmp_path / "heads", dtype="float32")
    assert wide.model.config.hidden_size == WIDTH and not WIDTH % 256
    text = "The keeper of the lighthouse had 3 lamps,\nand none of them burned."
    ids = narrow.tokenizer(text)["input_ids"]
    assert wide.tokenizer(text)["input_ids"] == ids
    torch.testing.assert_close(
        wide.model(torch.tensor([ids])).logits, narrow.model(torch.tensor([ids])).logits, rtol=0, atol=1e-4
    )
    options = decoder.TokenSwiftOptions(tree=(1, 2, 2), ngrams=0)
    greedy = decoder.SamplingParams(temperature=0)
    outs = [dec.generate(ids, 40, "medusa", greedy, options, ignore_eos=True) for dec in (narrow, wide)]
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[0].stats.accepted == outs[1].stats.accepted > 0


def test_without_ggml_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("reference_gguf.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="install llama-cpp-python"):
        ggml()
