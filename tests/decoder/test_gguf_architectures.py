"""Models of each architecture come back from files that are written with the names of the gguf package's own table."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoder.model.gguf.architectures import read_config
from decoder.model.gguf.file import open_gguf
from decoder.model.gguf.weights import check_shapes, state_dict
from tests.decoder.test_gguf import MERGES, SPECIAL, permuted, vocabulary

SIZES = dict(
    vocab_size=len(vocabulary()),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
# By llama.cpp's names: transformers' name, further sizes, and llama.cpp's keys for them.
KINDS = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", dict(head_dim=16), {"attention.key_length": 16}),
    "qwen2moe": (
        "qwen2_moe",
        EXPERTS | dict(shared_expert_intermediate_size=48),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "qwen3moe": (
        "qwen3_moe",
        EXPERTS | dict(head_dim=16, norm_topk_prob=True),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.key_length": 16},
    ),
    "phi3": ("phi3", dict(pad_token_id=None), {"rope.dimension_count": 16}),
    "starcoder2": ("starcoder2", dict(use_bias=True), {}),
    "nemotron": ("nemotron", dict(partial_rotary_factor=0.5), {"rope.dimension_count": 8}),
    "gpt2": ("gpt2", {}, {}),
    "mixtral": ("mixtral", dict(num_local_experts=4), {"expert_count": 4, "expert_used_count": 2}),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=16, tie_word_embeddings=True, query_pre_attn_scalar=16, sliding_window=16, num_hidden_layers=7),
        {"attention.key_length": 16, "attention.sliding_window": 16},
    ),
}


def gguf_name(names, name):
    """llama.cpp's name of a parameter, by the package gguf's own table."""
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        stem, leaf = name, "weight"
    found = names.get_name(stem)
    assert found is not None, name
    return f"{found}.{leaf}"


def stored(model, architecture):
    """By llama.cpp's names, a model's weights as its converter stores them."""
    config = model.config
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", None)}
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half
            continue
        theirs = gguf_name(names, name)
        kind = theirs.split(".")[-2]
        if theirs == "output.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and kind in heads:
            weight = permuted(weight, heads[kind])
        if architecture in ("nemotron", "gemma3") and "norm" in kind and name.endswith("weight"):
            weight = weight + 1
        if architecture == "gpt2" and weight.ndim == 2 and kind in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
            weight = weight.T
        if kind == "ffn_gate_inp_shexp":
            weight = weight[0]
        yield theirs, weight


def written(path, model, architecture, keys, more=None):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(1)
    for name, numbers in (more or {}).items():
        writer.add_tensor(name, numbers.astype(np.float32))
    for name, weight in stored(model, architecture):
        writer.add_tensor(name, np.ascontiguousarray(weight.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_model(model_type, more):
    torch.manual_seed(3)
    sizes = SIZES | more
    if model_type == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
        sizes.pop("num_key_value_heads")
    config = AutoConfig.for_model(model_type, **sizes)
    rotary = getattr(config, "rope_parameters", None) or {}
    rotary.get("full_attention", rotary)["rope_theta"] = 50000.0
    config.rope_parameters = rotary
    for name in ("rms_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"):
        if hasattr(config, name):
            setattr(config, name, 1e-5)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.mark.parametrize("architecture", KINDS)
def test_logits_are_those_of_the_model_that_was_written(tmp_path, architecture):
    model_type, more, keys = KINDS[architecture]
    model = random_model(model_type, more)
    # A mixture of experts in Llama's shape is a Llama with experts there.
    written(tmp_path / "a.gguf", model, "llama" if architecture == "mixtral" else architecture, keys)
    file = open_gguf(tmp_path / "a.gguf")
    config = read_config(file)
    assert config.model_type == model_type
    read = AutoModelForCausalLM.from_config(config).eval()
    check_shapes(file, read)
    found = read.load_state_dict(state_dict(file, config, torch.float32), strict=False)
    assert found.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert not found.unexpected_keys
    ids = torch.randint(len(vocabulary()), (1, 40))
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    # Weights that stay of other models would show.
    assert read(ids).logits.std() > 0.01


def test_llama_3s_rotary_factors_are_its_scaling_and_others_are_refused(tmp_path):
    scaling = dict(
        rope_type="llama3",
        rope_theta=50000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    model = random_model("llama", {})
    with torch.no_grad():
        config = type(model.config).from_dict(model.config.to_dict() | {"rope_parameters": scaling})
        scaled = type(model)(config).eval()
        scaled.load_state_dict(model.state_dict())
    plain = 50000.0 ** -(np.arange(0, 16, 2) / 16)
    # As transformers stretches the frequencies, factor by factor.
    factors = (plain / scaled.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == pytest.approx(8.0)
    ids = torch.randint(len(vocabulary()), (1, 100))
    for change, path in ((1.0, tmp_path / "a.gguf"), (1.1, tmp_path / "b.gguf")):
        written(path, model, "llama", {}, {"rope_freqs.weight": factors * np.float32(change) ** np.arange(8)})
        file = open_gguf(path)
        if change != 1.0:
            with pytest.raises(ValueError, match=r"rope_freqs.weight"):
                read_config(file)
            continue
        read = AutoModelForCausalLM.from_config(read_config(file)).eval()
        read.load_state_dict(state_dict(file, read.config, torch.float32))
        torch.testing.assert_close(read(ids).logits, scaled(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(read(ids).logits, model(ids).logits, atol=1e-2)
