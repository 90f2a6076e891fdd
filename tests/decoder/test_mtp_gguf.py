"""Built-in multi-token-prediction modules of GGUF files, written as llama.cpp's converter does."""

import argparse
import re

import gguf
import numpy as np
import pytest
import torch

import decoder
from decoder import SamplingParams, TokenSwiftOptions
from decoder.cli.flags import add_loading_flags, load_from_flags
from decoder.heads_beside import heads_beside

from .test_gguf_architectures import KINDS, gguf_name, of_experts, random_model, written
from .test_mtp import random_module

ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next", "glm4moe")
PARTS = {"fc": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head_norm"}


def module_in_file(model, tensors, architecture):
    """The module's tensors by llama.cpp's names: a layer behind the last one; norms of Qwen's are around one."""
    number, found = model.config.num_hidden_layers, {}
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, around = gguf.get_tensor_name_map(arch, number + 1), float(architecture != "glm4moe")
    for name, tensor in tensors.items():
        if not name.startswith("layer."):
            found[f"blk.{number}.nextn.{PARTS[name]}.weight"] = tensor + around * (name != "fc")
            continue
        name = f"model.layers.{number}.{name.removeprefix('layer.')}"
        if ".experts." in name:
            found |= of_experts(name, tensor, model.config.model_type)
            continue
        theirs = gguf_name(names, name)
        tensor = tensor[0] if theirs.endswith("ffn_gate_inp_shexp.weight") else tensor
        found[theirs] = tensor + around if "norm" in theirs else tensor
    return {name: np.ascontiguousarray(tensor.float().numpy()) for name, tensor in found.items()}


def file_with_module(path, architecture, change=lambda found: found, **kinds):
    """A model's file with a module inside; returns the module's tensors."""
    model_type, more, keys = KINDS[architecture]
    model = random_model(model_type, more | ({"decoder_sparse_step": 1} if architecture == "qwen3next" else {}))
    tensors = random_module(model)
    if "layer.mlp.gate.e_score_correction_bias" in tensors:
        tensors["layer.mlp.gate.e_score_correction_bias"] = tensors["layer.mlp.gate.e_score_correction_bias"].float()
    inside = change(module_in_file(model, tensors, architecture))
    counts = {"block_count": model.config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    written(path, model, architecture, keys | counts, inside, **kinds)
    return tensors


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_module_is_the_one_that_was_written_and_drafts(tmp_path, architecture):
    path = tmp_path / "a.gguf"
    tensors = file_with_module(path, architecture)
    module = decoder.load_heads(path)
    state = module.state_dict()
    named = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm", "fc": "fc"}
    for name, tensor in tensors.items():
        ours = f"{named[name]}.weight" if name in named else f"layers.0.{name.removeprefix('layer.')}"
        torch.testing.assert_close(state.pop(ours), tensor, rtol=0, atol=1e-6)
    assert not state and module.kind == "mtp" and str(path) == module.source
    assert heads_beside(path)["auto"] == str(path)
    dec = decoder.load(path, heads="mtp")
    options = TokenSwiftOptions(tree=(2, 2, 1), budget=24, sink=4)
    for sampling in (SamplingParams(temperature=0), SamplingParams(seed=1)):
        plain = dec.generate(list(range(30)), 24, "ar", sampling, ignore_eos=True)
        out = dec.generate(list(range(30)), 24, "medusa", sampling, options, ignore_eos=True)
        assert out.token_ids == plain.token_ids and out.stats.drafted > 0


def test_its_weights_may_be_quantised_and_commands_find_it(tmp_path):
    path = tmp_path / "a.gguf"
    file_with_module(path, "qwen35", kind=gguf.GGMLQuantizationType.Q8_0)
    parser = argparse.ArgumentParser()
    add_loading_flags(parser)
    dec = load_from_flags(parser.parse_args(["--model", str(path)]))
    assert list(dec.heads) == ["mtp"]
    assert dec.generate([5, 6, 7] * 5, 10, ignore_eos=True).token_ids == (
        dec.generate([5, 6, 7] * 5, 10, "ar", ignore_eos=True).token_ids
    )


FAULTS = {
    "lacking": (
        lambda found: {name: one for name, one in found.items() if "enorm" not in name},
        "lack tensors: pre_fc",
    ),
    "of another shape": (
        lambda found: found | {"blk.4.nextn.eh_proj.weight": np.ones((64, 64))},
        r"fc.weight .* has shape \[64, 64\], not \[64, 128\]",
    ),
    "strange": (
        lambda found: found | {"blk.4.nextn.strange.weight": np.ones(64)},
        "extra tensors: blk.4.nextn.strange",
    ),
    "no number": (
        lambda found: found | {"blk.4.nextn.hnorm.weight": np.full(64, np.nan)},
        "blk.4.nextn.hnorm.weight that are no numbers",
    ),
}


@pytest.mark.parametrize(("change", "words"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_read_is_told_and_decoded_without(tmp_path, caplog, change, words):
    path = tmp_path / "a.gguf"
    file_with_module(path, "qwen35", change)
    with pytest.raises(ValueError, match=words) as refusal:
        decoder.load(path, heads="mtp")
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    if "no numbers" in words:
        return  # which only reading them shows
    assert heads_beside(path) == {} and not decoder.load(path).heads
    [told] = [record.message for record in caplog.records if "built-in" in record.message]
    assert re.search(words, told) and str(path) in told


def test_a_file_without_one_says_so(tmp_path):
    model_type, more, keys = KINDS["qwen35"]
    written(tmp_path / "a.gguf", random_model(model_type, more), "qwen35", keys)
    assert heads_beside(tmp_path / "a.gguf") == {}
    for load in (decoder.load_heads, decoder.heads.load_built_in):
        with pytest.raises(ValueError, match=r"a\.gguf has no multi-token-prediction module"):
            load(tmp_path / "a.gguf")
