"""The paper's models, by their config.json alone: sizes of the heads."""

import shutil

import pytest
import torch
from tiny_books import ARCHITECTURES, short_run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import decoder
from decoder import DraftHeads
from heads_train import HeadsModule
from heads_train.backbone import FrozenStates, final_norm, norm_eps, norm_weight
from heads_train.cli import main


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama31", 50.3),
        ("llama2-yarn", 50.3),
        ("qwen25-1.5b", 7.1),
        ("qwen25-7b", 38.5),
        ("qwen25-14b", 78.6),
        ("r1-qwen-32b", 78.6),
        ("qwq-32b", 78.6),
    ],
)
def test_trainable_parameters_are_those_of_the_paper(name, millions, tmp_path):
    """The paper counts the linear layers; each head also has two norms."""
    shutil.copy(ARCHITECTURES / f"{name}.json", tmp_path / "config.json")
    with torch.device("meta"):
        module = HeadsModule(str(tmp_path))
    hidden = module.config.hidden_size
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert all(parameter.is_meta for parameter in trainable)
    assert round(sum(p.numel() for p in trainable if p.ndim == 2) / 1e6, 1) == millions
    assert sum(p.numel() for p in trainable if p.ndim == 1) == 3 * 2 * hidden
    assert module.heads.norm_eps == module.config.rms_norm_eps


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("qwen3_5_text", dict(layer_types=["linear_attention", "full_attention"], head_dim=8)),
        ("lfm2", dict(layer_types=["conv", "full_attention"])),
        ("gemma", dict(head_dim=8)),
    ],
)
def test_heads_start_from_the_norm_of_models_that_keep_it_as_a_difference_or_name_it_otherwise(model_type, own):
    shape = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model(model_type, **shape, num_key_value_heads=2, pad_token_id=None, **own)
    model = AutoModelForCausalLM.from_config(config).eval()
    norm = final_norm(model)
    torch.nn.init.normal_(norm.weight, std=0.5)
    heads = DraftHeads(32, 1, norm_eps(config))
    heads.init_from_norm(norm_weight(norm))
    hidden = torch.randn(3, 32)
    for own_norm in (head.output_norm for head in heads.heads):
        torch.testing.assert_close(own_norm(hidden), norm(hidden))
    assert FrozenStates(model)(torch.arange(7)[None]).shape == (1, 7, 32)


def test_heads_are_trained_on_a_model_with_recurrent_layers_and_draft_for_it(model, books, tmp_path):
    folder, tokenizer = tmp_path / "qwen3_5", AutoTokenizer.from_pretrained(model)
    layers = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], head_dim=8)
    delta = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
    shape = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, max_position_embeddings=256)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, eos_token_id=0, bos_token_id=None, pad_token_id=None)
    config = AutoConfig.for_model("qwen3_5_text", **layers, **delta, **shape, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert main(["fit", *short_run(folder, books, tmp_path), "--trainer.max_steps=2"]) == 0
    dec = decoder.load(folder, heads=tmp_path / "out" / "last", dtype="float32")
    given = dict(max_new_tokens=20, sampling=decoder.SamplingParams(seed=1), ignore_eos=True)
    texts = [dec.generate([1, 2, 3], method=method, **given).token_ids for method in ("ar", "tokenswift")]
    assert texts[0] == texts[1]
