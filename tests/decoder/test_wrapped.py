"""Models with vision around them: their language model is read by itself, and is the whole model's on text."""

import logging

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from decoder.model import wrapped
from decoder.model.architectures import refuse_unsupported
from decoder.model.loading import read_config, read_model

from .test_families import EXPERTS, SHAPE

TEXT = dict(SHAPE, head_dim=8, sliding_window=512, pad_token_id=0)
ONE_EXPERT = dict(EXPERTS, num_experts_per_tok=1)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
# model type, what differs from TEXT, the vision part, and what the model around decides
WRAPPED = {
    "gemma3": ({}, VISION, {}),
    "gemma4": (
        dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=48, global_head_dim=16)
        | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
        dict(VISION, num_key_value_heads=2, head_dim=8),
        {},
    ),
    "qwen3_5": (DELTA, QWEN_VISION, {}),
    "qwen3_5_moe": ({**DELTA, **ONE_EXPERT}, QWEN_VISION, dict(tie_word_embeddings=True)),
    "llama4": (
        dict(ONE_EXPERT, intermediate_size_mlp=48, attention_chunk_size=512),
        dict(VISION, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16),
        {},
    ),
    "mistral3": (
        dict(model_type="mistral", sliding_window=None),
        dict(VISION, model_type="pixtral", head_dim=8),
        dict(tie_word_embeddings=False),
    ),
    "mistral3, tied": (
        dict(model_type="mistral", sliding_window=None),
        dict(VISION, model_type="pixtral", head_dim=8),
        {},
    ),
    "llava": (dict(model_type="llama"), dict(VISION, model_type="clip_vision_model"), {}),
}


def saved(name, folder):
    text, vision, around = WRAPPED[name]
    model_type = name.split(",")[0]
    config = AutoConfig.for_model(model_type, text_config={**TEXT, **text}, vision_config=vision, **around)
    torch.manual_seed(0)
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", WRAPPED)
def test_the_language_model_inside_is_the_whole_model_on_text(name, tmp_path, caplog):
    whole, ids = saved(name, tmp_path), torch.arange(1, 20)[None]
    with caplog.at_level(logging.WARNING):
        alone = read_model(tmp_path, torch.device("cpu"), dtype=torch.float32)
        read_model(tmp_path, torch.device("cpu"), dtype=torch.float32)
    told = [record.getMessage() for record in caplog.records if record.name == wrapped.__name__]
    assert len(told) == 1 and "text only" in told[0]
    with torch.inference_mode():
        torch.testing.assert_close(alone(ids).logits, whole(input_ids=ids).logits, rtol=0, atol=1e-6)
    assert not any("vision" in name for name, _ in alone.named_parameters())
    assert sum(p.numel() for p in alone.parameters()) < sum(p.numel() for p in whole.parameters())


def test_a_missing_tensor_of_the_language_model_is_still_an_error(tmp_path):
    saved("mistral3", tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    (lost,) = [name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight") and "vision" not in name]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path, metadata)
    with pytest.raises(ValueError, match=r"lacks tensors .*: model\.layers\.1\.mlp\.up_proj\.weight$"):
        read_model(tmp_path, torch.device("cpu"), dtype=torch.float32)


def test_what_is_refused_is_the_language_model_and_by_its_name(tmp_path):
    AutoConfig.for_model("llava", text_config=dict(TEXT, model_type="t5")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder-decoder|wraps a language model"):
        read_config(tmp_path)
    AutoConfig.for_model("llava", text_config=dict(model_type="bloom")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bloom does not use transformers' attention interface"):
        read_config(tmp_path)


def test_a_whole_model_that_was_loaded_by_the_user_is_refused():
    with pytest.raises(ValueError, match="gemma3 wraps a language model with other parts; give the language model"):
        refuse_unsupported(AutoConfig.for_model("gemma3"))
