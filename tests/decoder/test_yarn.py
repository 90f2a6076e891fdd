"""Models stretched with YaRN are those that transformers makes of a configuration that says so.

Those with LongRoPE's two sets of factors are transformers' for texts that need one of them from their first token on.
"""

import copy
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import decoder
from decoder import SamplingParams
from decoder.backends.native import library as native
from decoder.backends.native.angles import AngleTable

from .conftest import random_heads, tiny_llama
from .test_gguf import hf_model, published_tokenizer, write_gguf  # noqa: F401
from .test_gguf_architectures import random_model, written

TRAINED, FACTOR = 64, 4.0
SHORT, LONG = [1.0 + 0.1 * n for n in range(8)], [1.0 + 0.5 * n for n in range(8)]


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


@pytest.fixture(scope="module", params=["folder", "gguf"])
def two_sets(request, tmp_path_factory):
    """A model of transformers with two sets of factors, and where it is."""
    rotary = dict(rope_type="longrope", rope_theta=50000.0, short_factor=SHORT, long_factor=LONG)
    model = random_model(
        "phi3",
        dict(
            pad_token_id=None,
            sliding_window=None,
            max_position_embeddings=int(TRAINED * FACTOR),
            original_max_position_embeddings=TRAINED,
            rope_parameters=rotary | {"original_max_position_embeddings": TRAINED},
        ),
    )
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "gguf":
        scaling = math.sqrt(1 + math.log(FACTOR) / math.log(TRAINED))
        keys = {"rope.dimension_count": 16, "rope.scaling.attn_factor": scaling}
        keys |= {"rope.scaling.original_context_length": TRAINED}
        factors = {f"rope_factors_{name}.weight": np.array(given) for name, given in (("short", SHORT), ("long", LONG))}
        written(folder / "tiny.gguf", model, "phi3", keys, factors)
        return model, folder / "tiny.gguf"
    model.save_pretrained(folder)
    published_tokenizer().save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("factor", [None, FACTOR])
def test_a_model_with_factors_for_short_and_for_long_texts_takes_one_set(two_sets, factor):
    model, source = two_sets
    tokens = TRAINED if factor is None else 200  # transformers takes the long ones behind the trained length
    ids = torch.randint(3, 40, (1, tokens), generator=torch.Generator().manual_seed(0))
    dec = decoder.load(source, random_heads(model), dtype="float32", yarn=factor, draft_model=source)
    assert dec.model.config.max_position_embeddings == TRAINED * (factor or 1)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(dec.model(ids).logits, expected, rtol=0, atol=1e-5)
        some = ids[:, : TRAINED // 2]
        assert torch.allclose(dec.model(some).logits, model(some).logits, atol=1e-5) == (factor is None)
    prompt = ids[0, : tokens - 40].tolist()
    for sampling in (SamplingParams(temperature=0), SamplingParams(seed=3)):
        plain = dec.generate(prompt, 40, "ar", sampling, ignore_eos=True).token_ids
        for method in ("auto", "tokenswift", "draft-model"):
            assert dec.generate(prompt, 40, method, sampling, ignore_eos=True).token_ids == plain, method
    greedy = dec.generate(prompt, 40, "ar", SamplingParams(temperature=0), ignore_eos=True).token_ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=-1)
    assert greedy == theirs[0, len(prompt) :].tolist()


def test_texts_that_are_too_long_for_the_first_set_are_told_how_to_have_the_other(two_sets):
    dec = decoder.load(two_sets[1])
    with pytest.raises(ValueError, match=r"beyond the 64 positions .* \(--yarn\) of up to 4 for 256 positions$"):
        dec.generate(list(range(3, 40)), 100)
    with pytest.raises(ValueError, match=r"yarn must be at most 4, not 4\.5: beyond it the model has no factors"):
        decoder.load(two_sets[1], yarn=4.5)
    dec = decoder.load(two_sets[1], yarn=FACTOR)
    with pytest.raises(ValueError, match=r"beyond the 256 positions of the model: shorten one of them$"):
        dec.generate(list(range(3, 40)), 250)


def test_a_model_whose_sets_are_one_cannot_be_stretched(two_sets, tmp_path):
    model = copy.deepcopy(two_sets[0])
    model.config.rope_parameters = model.config.rope_parameters | {"short_factor": LONG}
    model.save_pretrained(tmp_path)
    published_tokenizer().save_pretrained(tmp_path)
    assert decoder.load(tmp_path).model.config.max_position_embeddings == TRAINED * FACTOR
    with pytest.raises(ValueError, match=r"are scaled already .longrope.: leave out yarn"):
        decoder.load(tmp_path, yarn=2)


def test_a_model_object_with_two_sets_is_refused_with_what_to_do(two_sets):
    with pytest.raises(ValueError, match=r"longrope rotary scaling, .*: load it by decoder\.load, which takes one set"):
        decoder.Decoder(two_sets[0])


@pytest.mark.skipif(not native.available(), reason="there is no C compiler here")
def test_angles_are_computed_once_though_the_module_writes_its_frequencies(two_sets, monkeypatch):
    computed, once = [], AngleTable._computed
    monkeypatch.setattr(AngleTable, "_computed", lambda table, at: computed.append(len(at)) or once(table, at))
    table = AngleTable(decoder.load(two_sets[1], dtype="float32").model.model.rotary_emb, (), 1, 16, torch.float32)
    first = table.at(torch.tensor([0, 5]))
    assert torch.equal(table.at(torch.tensor([0, 5]))[0].sines, first[0].sines) and len(computed) == 1
