"""Models stretched with YaRN are those that transformers makes of a configuration that says so."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import decoder
from decoder import SamplingParams

from .conftest import random_heads, tiny_llama
from .test_gguf import hf_model, published_tokenizer, write_gguf  # noqa: F401

TRAINED, FACTOR = 64, 4.0


def stretched(model):
    """As its makers would have published it."""
    config = copy.deepcopy(model.config)
    rotary = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": TRAINED}
    config.rope_parameters |= rotary
    config.max_position_embeddings = int(TRAINED * FACTOR)
    other = AutoModelForCausalLM.from_config(config).to(model.dtype).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture(scope="module", params=["folder", "gguf"])
def saved(request, hf_model, tmp_path_factory):  # noqa: F811
    """A model, and where it is."""
    model = copy.deepcopy(hf_model)
    model.config.max_position_embeddings = TRAINED
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gguf":
        write_gguf(folder / "tiny.gguf", model)
        return model, folder / "tiny.gguf"
    model.save_pretrained(folder)
    published_tokenizer().save_pretrained(folder)
    return model, folder


def test_a_stretched_model_is_that_of_transformers_behind_its_trained_length(saved):
    model, source = saved
    published = stretched(model)
    ids = torch.randint(3, 200, (1, 200), generator=torch.Generator().manual_seed(0))
    dec = decoder.load(source, dtype="float32", yarn=FACTOR)
    with torch.no_grad():
        expected, short = published(ids).logits, model(ids).logits
        torch.testing.assert_close(dec.model(ids).logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, short, atol=1e-2)
    assert dec.model.config.max_position_embeddings == TRAINED * FACTOR
    theirs = published.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=-1)[0, 200:]
    own = dec.generate(ids[0].tolist(), 30, "ar", SamplingParams(temperature=0), ignore_eos=True)
    assert own.token_ids == theirs.tolist()


def test_drafts_change_nothing_behind_the_trained_length(saved):
    model, source = saved
    dec = decoder.load(source, random_heads(model), dtype="float32", yarn=FACTOR, draft_model=source)
    prompt = [*range(5, 60), *range(5, 60)]
    for sampling in (SamplingParams(temperature=0), SamplingParams(seed=3)):
        expected = dec.generate(prompt, 100, "ar", sampling, ignore_eos=True).token_ids
        for method in ("auto", "tokenswift", "draft-model"):
            assert dec.generate(prompt, 100, method, sampling, ignore_eos=True).token_ids == expected, method


@pytest.mark.parametrize("factor", [1, 0.5, float("nan"), float("inf"), "4", True])
def test_a_factor_that_stretches_nothing_is_refused(saved, factor):
    with pytest.raises(ValueError, match="yarn must be a number above 1, not"):
        decoder.load(saved[1], yarn=factor)


def test_a_model_that_cannot_be_stretched_is_refused_before_its_weights_are_read(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "scaled")
    file = tmp_path / "scaled" / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    file.write_text(json.dumps(config))
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "learnt")
    for name, reason in (("scaled", "are scaled already .linear.: leave out yarn"), ("learnt", "one kind of rotary")):
        for weights in (tmp_path / name).glob("*.safetensors"):
            weights.unlink()
        with pytest.raises(ValueError, match=reason):
            decoder.load(tmp_path / name, yarn=2)
