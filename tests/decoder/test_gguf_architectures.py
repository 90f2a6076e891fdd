"""Models of each architecture come back from files that are written with the names of the gguf package's own table."""

import re

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import decoder
from decoder.backends.native import library as native
from decoder.backends.native.quantised import QuantisedLinear
from decoder.backends.native.quantised_experts import QuantisedExperts
from decoder.model.gguf.config import read_config
from decoder.model.gguf.file import open_gguf
from decoder.model.gguf.weights import check_shapes, state_dict
from tests.decoder.recurrent_models import DELTA as RECURRENT_DELTA
from tests.decoder.test_gguf import SIZES as OF_LLAMA
from tests.decoder.test_gguf import add_tokenizer, finish, permuted, vocabulary

SIZES = dict(OF_LLAMA, max_position_embeddings=128, tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
# Two heads of values share a head of keys.
DELTA = {
    **RECURRENT_DELTA,
    "head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
OF_DELTA = {
    "attention.key_length": 16,
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64
)
GEMMA4 = dict(
    num_hidden_layers=4,
    head_dim=16,
    global_head_dim=32,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention"] * 2,
    vocab_size_per_layer_input=len(vocabulary()),
    tie_word_embeddings=True,
    final_logit_softcapping=3.0,
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
OF_GEMMA4 = {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": [True, False] * 2,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "final_logit_softcapping": 3.0,
}
GEMMA3N = dict(
    head_dim=16,
    num_hidden_layers=4,
    tie_word_embeddings=True,
    sliding_window=16,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    laurel_rank=4,
    intermediate_size=[96, 96, 64, 64],
    activation_sparsity_pattern=[0.95, 0.9, 0.0, 0.0],
    final_logit_softcapping=3.0,
)
NEMOTRON = dict(head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=16)
OF_NEMOTRON = {
    "attention.key_length": 16,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
OF_GEMMA3 = {
    "full_attention": dict(rope_type="linear", factor=8.0),
    "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
}
OF_OLMO = {
    "full_attention": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
}
OF_MINISTRAL = dict(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
COMPRESSED = EXPERTS | dict(
    num_key_value_heads=4,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_group=1,
    topk_group=1,
)
OF_COMPRESSED = OF_EXPERTS | {
    "attention.head_count_kv": 4,
    "attention.key_length": 24,
    "attention.value_length": 12,
    "attention.kv_lora_rank": 16,
    "rope.dimension_count": 8,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}
OF_DEEPSEEK3 = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0)
# By llama.cpp's names: transformers' name, further sizes, and llama.cpp's keys for them.
KINDS = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", dict(head_dim=16), {"attention.key_length": 16}),
    "qwen2moe": (
        "qwen2_moe",
        EXPERTS | dict(shared_expert_intermediate_size=48),
        OF_EXPERTS,
    ),
    "qwen3moe": (
        "qwen3_moe",
        EXPERTS | dict(head_dim=16, norm_topk_prob=True),
        OF_EXPERTS | {"attention.key_length": 16},
    ),
    "phi3": ("phi3", dict(pad_token_id=None), {"rope.dimension_count": 16}),
    "starcoder2": ("starcoder2", dict(use_bias=True), {}),
    "nemotron": ("nemotron", dict(partial_rotary_factor=0.5), {"rope.dimension_count": 8}),
    "gpt2": ("gpt2", {}, {}),
    "mixtral": ("mixtral", dict(num_local_experts=4), {"expert_count": 4, "expert_used_count": 2}),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=16, tie_word_embeddings=True, query_pre_attn_scalar=16, sliding_window=16, num_hidden_layers=7)
        | dict(final_logit_softcapping=2.0),
        {"attention.key_length": 16, "attention.sliding_window": 16, "final_logit_softcapping": 2.0},
    ),
    "gemma3 of 4B": (
        "gemma3_text",
        dict(head_dim=16, tie_word_embeddings=True, query_pre_attn_scalar=16, sliding_window=16, num_hidden_layers=7)
        | dict(rope_parameters=OF_GEMMA3),
        {
            "attention.key_length": 16,
            "attention.sliding_window": 16,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "qwen35": (
        "qwen3_5_text",
        DELTA,
        OF_DELTA | {"attention.recurrent_layers": [True, True, True, False], "rope.dimension_sections": [1, 1, 0, 0]},
    ),
    "qwen35moe": (
        "qwen3_5_moe_text",
        EXPERTS | DELTA | dict(shared_expert_intermediate_size=48),
        OF_EXPERTS | OF_DELTA | {"rope.dimension_sections": [1, 1, 0, 0]},
    ),
    "qwen3next": ("qwen3_next", EXPERTS | DELTA | dict(shared_expert_intermediate_size=48), OF_EXPERTS | OF_DELTA),
    "glm4moe": (
        "glm4_moe",
        dict(EXPERTS, head_dim=16, n_routed_experts=4, n_shared_experts=2, routed_scaling_factor=1.5, use_qk_norm=True)
        | dict(first_k_dense_replace=1),
        {
            **OF_EXPERTS,
            "attention.key_length": 16,
            "rope.dimension_count": 8,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
    "deepseek2": ("deepseek_v2", COMPRESSED | dict(q_lora_rank=None), OF_COMPRESSED),
    "deepseek3": (
        "deepseek_v3",
        COMPRESSED
        | dict(n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5)
        | dict(rope_parameters=OF_DEEPSEEK3),
        OF_COMPRESSED
        | {
            "attention.head_count_kv": 1,
            "attention.key_length": 24,
            "attention.value_length": 16,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 12,
            "attention.q_lora_rank": 20,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_gating_func": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, rope_parameters=YARN),
        {
            **OF_EXPERTS,
            "expert_feed_forward_length": 96,
            "attention.key_length": 16,
            "attention.sliding_window": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "lfm2": (
        "lfm2",
        dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    ),
    "granitehybrid": (
        "granitemoehybrid",
        dict(layer_types=["mamba", "attention"], num_local_experts=4, num_experts_per_tok=2, mamba_d_state=8)
        | dict(mamba_n_heads=8, mamba_d_head=16, mamba_expand=2, mamba_n_groups=2, shared_intermediate_size=48)
        | dict(position_embedding_type=None, embedding_multiplier=3.0, residual_multiplier=0.5)
        | dict(attention_multiplier=0.3, logits_scaling=2.0),
        {
            "attention.head_count_kv": [0, 2],
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
            "rope.scaling.finetuned": False,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_shared_feed_forward_length": 48,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 128,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 8,
            "ssm.group_count": 2,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        dict(head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_expand=1)
        | dict(mamba_n_groups=2, mamba_rms_norm=True),
        {
            "attention.key_length": 16,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 64,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
            "ssm.group_count": 2,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        NEMOTRON | dict(layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"]),
        OF_NEMOTRON | {"attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 96, 0]},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        NEMOTRON
        | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, routed_scaling_factor=2.5)
        | dict(moe_shared_expert_intermediate_size=48, moe_latent_size=32)
        | dict(layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention"]),
        OF_NEMOTRON
        | OF_EXPERTS
        | {"attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 32, 0, 0], "moe_latent_size": 32}
        | {"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5},
    ),
    "lfm2moe": (
        "lfm2_moe",
        EXPERTS
        | dict(tie_word_embeddings=True, num_dense_layers=1)
        | dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
        OF_EXPERTS | {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "leading_dense_block_count": 1},
    ),
    "gemma": ("gemma", dict(head_dim=16, tie_word_embeddings=True), {"attention.key_length": 16}),
    "gemma2": (
        "gemma2",
        dict(head_dim=16, tie_word_embeddings=True, query_pre_attn_scalar=16, sliding_window=16)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        {"attention.key_length": 16, "attention.sliding_window": 16}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3n": (
        "gemma3n_text",
        GEMMA3N,
        {
            "attention.key_length": 16,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": [True, False] * 2,
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8,
            "feed_forward_length": [96, 96, 64, 64],
            "activation_sparsity_scale": [1.6448535919189453, 1.281551480293274, -np.inf, -np.inf],
            "altup.num_inputs": 4,
            "altup.active_idx": 0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": (
        "gemma4_text",
        GEMMA4 | dict(num_kv_shared_layers=2, hidden_size_per_layer_input=8, use_double_wide_mlp=True),
        OF_GEMMA4
        | {"attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 8}
        | {"feed_forward_length": [96, 96, 192, 192]},
    ),
    "gemma4 with experts": (
        "gemma4_text",
        GEMMA4
        | EXPERTS
        | dict(top_k_experts=2, enable_moe_block=True, attention_k_eq_v=True, num_global_key_value_heads=1)
        | dict(hidden_size_per_layer_input=0),
        OF_GEMMA4 | OF_EXPERTS | {"attention.head_count_kv": [2, 1, 2, 1]},
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=5, pad_token_id=None), {}),
    "qwen2vl": ("qwen2", {}, {"rope.dimension_sections": [4, 2, 2, 0]}),
    "qwen3vl": (
        "qwen3",
        dict(head_dim=16),
        {"attention.key_length": 16, "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": (
        "qwen3_moe",
        EXPERTS | dict(head_dim=16, norm_topk_prob=True),
        OF_EXPERTS | {"attention.key_length": 16, "n_deepstack_layers": 3},
    ),
    "arcee": ("arcee", {}, {}),
    "olmoe": ("olmoe", dict(num_experts=4, num_experts_per_tok=2), OF_EXPERTS),
    "granitemoe": (
        "granitemoe",
        dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0)
        | dict(num_local_experts=4, num_experts_per_tok=2),
        {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0} | OF_EXPERTS,
    ),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        dict(num_hidden_layers=3, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2)
        | dict(moe_layer_start_index=1),
        OF_EXPERTS
        | {"expert_shared_count": 2, "expert_shared_feed_forward_length": 48}
        | {"interleave_moe_layer_step": 1, "leading_dense_block_count": 1},
    ),
    "command-r": (
        "cohere",
        dict(logit_scale=0.5, tie_word_embeddings=True),
        {"logit_scale": 0.5, "rope.scaling.type": "none"},
    ),
    "granite": (
        "granite",
        dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0),
        {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0},
    ),
    "mistral3": ("mistral", dict(head_dim=16, sliding_window=None), {"attention.key_length": 16}),
    "ministral3": (
        "ministral3",
        dict(head_dim=16, rope_parameters=OF_MINISTRAL),
        {
            "attention.key_length": 16,
            "attention.temperature_scale": 0.1,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "ernie4_5": ("ernie4_5", dict(head_dim=16), {"attention.key_length": 16}),
    "hunyuan-dense": ("hunyuan_v1_dense", dict(head_dim=16), {"attention.key_length": 16}),
    "seed_oss": ("seed_oss", dict(head_dim=16), {"attention.key_length": 16}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": (
        "olmo3",
        dict(num_hidden_layers=5, sliding_window=16, rope_parameters=OF_OLMO),
        {
            "attention.sliding_window": 16,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "exaone4": (
        "exaone4",
        dict(num_hidden_layers=4, sliding_window=16, sliding_window_pattern=4),
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4 without windows": (
        "exaone4",
        dict(sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 2),
        {},
    ),
    "glm4": (
        "glm4",
        dict(head_dim=16, partial_rotary_factor=0.5, pad_token_id=None),
        {"attention.key_length": 16, "rope.dimension_count": 8},
    ),
    "cohere2": (
        "cohere2",
        dict(num_hidden_layers=5, sliding_window=16, logit_scale=0.5, tie_word_embeddings=True),
        {"attention.sliding_window": 16, "logit_scale": 0.5, "rope.scaling.type": "none"},
    ),
}
# Those that have another name in llama.cpp.
THEIRS = {
    "mixtral": "llama",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "deepseek3": "deepseek2",
    "gemma3 of 4B": "gemma3",
    "gemma4 with experts": "gemma4",
    "exaone4 without windows": "exaone4",
}


def gguf_name(names, name):
    """llama.cpp's name of a parameter, by the package gguf's own table."""
    name = name.replace("moe.router.weight", "moe.router.layer.weight").replace("gate.moe_statics", "moe_statics")
    name = re.sub(r"(correction|expert)_bias$", r"\1.bias", name).replace("expert.bias", "expert_bias.bias")
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        stem, leaf = name, "weight"
    found = names.get_name(stem)
    # The table has some names as a whole.
    whole = names.get_name(name) if found is None else None
    assert found or whole, name
    return whole or f"{found}.{leaf}"


def by_value_head(weight, config, size, axis=0, first=0):
    """As llama.cpp's converter puts heads of values: the first of each head of keys, then the second of each."""
    kept, moved = weight.movedim(axis, 0).tensor_split([first])
    shape = config.linear_num_key_heads, -1, size, *moved.shape[1:]
    moved = moved.reshape(shape).transpose(0, 1).reshape(moved.shape)
    return torch.cat((kept, moved)).movedim(0, axis)


def of_delta_rule(name, weight, config, mixed):
    """llama.cpp's names and numbers of a parameter of a gated delta rule."""
    layer, part = name.split(".")[2], name.partition("linear_attn.")[2]
    keys, size = config.linear_key_head_dim * config.linear_num_key_heads, config.linear_value_head_dim
    if part == "in_proj_qkvz.weight":
        each = config.linear_num_value_heads // config.linear_num_key_heads * size
        heads = weight.unflatten(0, (config.linear_num_key_heads, -1))
        parts = heads.split([config.linear_key_head_dim] * 2 + [each] * 2, dim=1)
        *qkv, z = (part.flatten(0, 1) for part in parts)
        return {f"blk.{layer}.attn_qkv.weight": torch.cat(qkv), f"blk.{layer}.attn_gate.weight": z}
    theirs = {
        "in_proj_qkv.weight": ("attn_qkv.weight", dict(size=size, first=2 * keys)),
        "in_proj_z.weight": ("attn_gate.weight", dict(size=size)),
        "in_proj_a.weight": ("ssm_alpha.weight", dict(size=1)),
        "in_proj_b.weight": ("ssm_beta.weight", dict(size=1)),
        "in_proj_ba.weight": ("ssm_ba.weight", None),
        "A_log": ("ssm_a", dict(size=1)),
        "dt_bias": ("ssm_dt.bias", dict(size=1)),
        "conv1d.weight": ("ssm_conv1d.weight", dict(size=size, first=2 * keys)),
        "norm.weight": ("ssm_norm.weight", None),
        "out_proj.weight": ("ssm_out.weight", dict(size=size, axis=1)),
    }
    new, order = theirs[part]
    weight = -weight.exp() if part == "A_log" else weight.squeeze(1) if part == "conv1d.weight" else weight
    weight = weight if mixed or order is None else by_value_head(weight, config, **order)
    return {f"blk.{layer}.{new}": weight}


def of_mamba(name, weight, config):
    """llama.cpp's name and numbers of a parameter of a Mamba2 mixer."""
    layer, part = name.split(".")[2], name.partition("mamba.")[2]
    theirs = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight"}
    new = theirs.get(part) or f"ssm_{part.replace('_proj', '')}"
    if part in ("A_log", "D"):
        weight = (-weight.exp() if part == "A_log" else weight)[:, None]
    elif part == "norm.weight":
        weight = weight.view(config.mamba_n_groups, -1)
    return f"blk.{layer}.{new}", weight.squeeze(1) if part == "conv1d.weight" else weight


def of_nemotron(name, weight, config):
    """llama.cpp's name and numbers of a parameter of Nemotron-H, whose layers are one mixer each."""
    outside = {"model.embeddings": "token_embd", "model.norm_f": "output_norm", "lm_head": "output"}
    stem, _, leaf = name.rpartition(".")
    if stem in outside:
        return f"{outside[stem]}.{leaf}", weight
    layer, part = name.split(".")[2], name.partition("mixer.")[2]
    stem = part.rpartition(".")[0]
    theirs = {
        "": "attn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "gate": "exp_probs_b" if leaf == "e_score_correction_bias" else "ffn_gate_inp",
        "fc1_latent_proj": "ffn_latent_down",
        "fc2_latent_proj": "ffn_latent_up",
        "shared_experts.up_proj": "ffn_up_shexp",
        "shared_experts.down_proj": "ffn_down_shexp",
    }
    if part.startswith("experts."):
        return f"blk.{layer}.ffn_{part.removeprefix('experts.').removesuffix('_proj')}_exps.weight", weight
    if (part and stem not in theirs) or part in ("A_log", "D", "dt_bias"):
        config.mamba_n_groups = config.n_groups
        return of_mamba(name.replace("mixer.", "mamba."), weight, config)
    return f"blk.{layer}.{theirs[stem]}.{'bias' if leaf.endswith('bias') else 'weight'}", weight


def of_experts(name, weight, model_type):
    """llama.cpp's names of stacks of experts, by which gates and what they gate are apart."""
    layer, bias = name.split(".")[2], name.endswith("_bias")
    leaf = "bias" if bias else "weight"
    if model_type == "gpt_oss":
        weight = weight if bias else weight.mT
        parts = weight.unflatten(1, (-1, 2)).unbind(2)
    else:
        parts = weight.chunk(2, dim=1)
    if "down" in name:
        return {f"blk.{layer}.ffn_down_exps.{leaf}": weight}
    return {f"blk.{layer}.ffn_{part}_exps.{leaf}": own for part, own in zip(("gate", "up"), parts, strict=True)}


OF_GEMMA4_ROUTER = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def stored(model, architecture):
    """By llama.cpp's names, a model's weights as its converter stores them."""
    config = model.config
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    turned = architecture in ("llama", "smollm3", "granite", "granitehybrid", "granitemoe", "mistral3", "arcee")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if turned else {}
    for name, weight in model.state_dict().items():
        if config.model_type == "nemotron_h":
            yield of_nemotron(name, weight, config)
            continue
        if architecture == "gemma4" and ".experts." in name:
            yield gguf_name(names, name), weight
            continue
        if ".experts." in name:
            yield from of_experts(name, weight, config.model_type).items()
            continue
        if config.model_type == "deepseek_v3" and name.endswith("kv_b_proj.weight"):
            # As converters write it now; before, as for V2 here, it was one matrix.
            each = weight.unflatten(0, (config.num_attention_heads, -1))
            keys, values = each.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            layer = name.split(".")[2]
            yield f"blk.{layer}.attn_k_b.weight", keys.mT
            yield f"blk.{layer}.attn_v_b.weight", values
            continue
        if ".shared_mlp." in name:
            layer, parts = name.split(".")[2], ("gate", "up") if "input" in name else ("down",)
            for part, own in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"blk.{layer}.ffn_{part}_shexp.weight", own
            continue
        if ".mamba." in name:
            yield of_mamba(name, weight, config)
            continue
        if name.endswith(tuple(OF_GEMMA4_ROUTER)):
            layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
            yield f"blk.{layer}.{OF_GEMMA4_ROUTER[part]}", weight
            continue
        if ".linear_attn." in name:
            yield from of_delta_rule(name, weight, config, architecture == "qwen3next").items()
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "projections." in name:
            # Several matrices are one tensor.
            if name.endswith(".0.weight"):
                both = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
                own = name.split(".")[1]
                matrices = [each.weight.detach() for each in getattr(model.model, own)]
                yield f"{both[own]}.weight", torch.stack(matrices)
            continue
        theirs = gguf_name(names, name)
        kind = theirs.split(".")[-2]
        if kind in heads:
            weight = permuted(weight, heads[kind])
        around_one = ("nemotron", "gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
        if architecture in around_one and "norm" in kind and name.endswith("weight"):
            weight = weight + 1
        if architecture == "gpt2" and weight.ndim == 2 and kind in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
            weight = weight.T
        if kind == "ffn_gate_inp_shexp" and model.config.model_type != "qwen2_moe":
            weight = weight[0]  # which converters have stored in both ways
        yield theirs, weight.squeeze(1) if theirs.endswith("shortconv.conv.weight") else weight


def written(path, model, architecture, keys, more=None, kind=gguf.GGMLQuantizationType.F32):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    if "block_count" not in keys:
        writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if "feed_forward_length" not in keys:
        writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in keys:
        writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    for key, value in keys.items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](f"{architecture}.{key}", value)
    add_tokenizer(writer, "gpt-2")
    writer.add_eos_token_id(1)
    if architecture == "gemma4":
        more = {**(more or {}), "rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12)}
    for name, numbers in (more or {}).items():
        writer.add_tensor(name, numbers.astype(np.float32))
    # In this order gates stand before what they are joined to.
    for name, weight in sorted(stored(model, architecture), key=lambda one: one[0]):
        numbers, own = (
            np.ascontiguousarray(weight.float().numpy()),
            kind if weight.shape[-1] % 32 == 0 and weight.ndim > 1 else kind.F32,
        )
        writer.add_tensor(name, gguf.quants.quantize(numbers, own), raw_dtype=own)
    finish(writer)


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
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer += 0.1 * torch.randn(buffer.shape)
    return model


@pytest.mark.parametrize("architecture", KINDS)
def test_logits_are_those_of_the_model_that_was_written(tmp_path, architecture):
    model_type, more, keys = KINDS[architecture]
    model = random_model(model_type, more)
    written(tmp_path / "a.gguf", model, THEIRS.get(architecture, architecture), keys)
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


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("qwen3moe", "expert_count"),
        ("qwen35", "ssm.group_count"),
        ("gpt-oss", "attention.sliding_window"),
        ("gemma3", "attention.sliding_window"),
        ("gpt-oss", "rope.scaling.original_context_length"),
        ("lfm2", "shortconv.l_cache"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_named(tmp_path, architecture, key):
    model_type, more, keys = KINDS[architecture]
    model = random_model(model_type, more)
    for change, words in (({}, f"has no {architecture}.{key}"), ({key: 0}, f"says that its {architecture}.{key} is 0")):
        others = {name: value for name, value in keys.items() if name != key}
        written(tmp_path / "a.gguf", model, architecture, others | change)
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            read_config(open_gguf(tmp_path / "a.gguf"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35", "glm4moe", "nemotron"])
def test_heads_are_turned_as_far_as_the_file_says_and_else_whole(tmp_path, architecture):
    """Configurations of these families turn a part where they are not told."""
    model_type, more, keys = KINDS[architecture]
    model = random_model(model_type, more)
    others = {name: value for name, value in keys.items() if name != "rope.dimension_count"}
    for given, part in (({"rope.dimension_count": 16}, 1), ({}, 1), ({"rope.dimension_count": 2}, 1 / 8)):
        written(tmp_path / "a.gguf", model, architecture, others | given)
        assert read_config(open_gguf(tmp_path / "a.gguf")).rope_parameters["partial_rotary_factor"] == part


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "logit_scale", 0.5),
        ("llama", "attention.sliding_window", 16),
        ("llama", "attention.temperature_scale", 0.1),
        ("qwen2", "final_logit_softcapping", 5.0),
        ("qwen3", "attention.value_length", 8),
        ("qwen3", "rope.freq_base_swa", 10000.0),
        ("qwen2moe", "expert_weights_norm", True),
        ("qwen3moe", "expert_gating_func", 2),
        ("mixtral", "expert_group_count", 2),
        ("gpt-oss", "attention.sliding_window_pattern", [True, False]),
        ("gemma3", "attn_logit_softcapping", 5.0),
        ("gemma4", "attention.value_length", 8),
        ("lfm2", "anything.else", 1),
    ],
)
def test_a_key_that_nobody_looks_at_is_refused_if_it_may_change_texts(tmp_path, architecture, key, value):
    model_type, more, keys = KINDS[architecture]
    name = "llama" if architecture == "mixtral" else architecture
    written(tmp_path / "a.gguf", random_model(model_type, more), name, keys | {key: value})
    with pytest.raises(ValueError, match=rf"a\.gguf has a key that is not read \({name}\.{re.escape(key)} "):
        read_config(open_gguf(tmp_path / "a.gguf"))


def test_keys_that_say_what_is_so_anyway_are_taken(tmp_path):
    model_type, more, keys = KINDS["qwen3moe"]
    idle = {"vocab_size": 48, "attention.value_length": 16, "attention.causal": True, "logit_scale": 1.0}
    idle |= {"expert_gating_func": 1, "expert_weights_norm": True, "expert_shared_feed_forward_length": 32}
    written(tmp_path / "a.gguf", random_model(model_type, more), "qwen3moe", keys | idle)
    assert read_config(open_gguf(tmp_path / "a.gguf")).norm_topk_prob


@pytest.mark.parametrize("architecture", ["llama", "starcoder2"])
def test_a_file_tells_what_its_norms_add(tmp_path, architecture, monkeypatch):
    for name in ("add_layer_norm_rms_eps", "add_layer_norm_eps"):
        monkeypatch.setattr(gguf.GGUFWriter, name, lambda writer, eps: None)
    model_type, more, keys = KINDS[architecture]
    written(tmp_path / "a.gguf", random_model(model_type, more), architecture, keys)
    with pytest.raises(ValueError, match=rf"has no {architecture}\.attention\.layer_norm_(rms_)?epsilon"):
        read_config(open_gguf(tmp_path / "a.gguf"))


def test_a_file_without_a_window_has_none(tmp_path):
    """As a configuration of transformers' would have where it says nothing."""
    model_type, more, keys = KINDS["mistral3"]
    written(tmp_path / "a.gguf", random_model(model_type, more), "mistral3", keys)
    assert read_config(open_gguf(tmp_path / "a.gguf")).sliding_window is None


@pytest.mark.parametrize(
    ("architecture", "name", "both"),
    [
        ("deepseek3", "blk.1.attn_v_b.weight", "'blk.1.attn_k_b.weight' and 'blk.1.attn_v_b.weight'"),
        ("qwen3moe", "blk.1.ffn_up_exps.weight", "'blk.1.ffn_gate_exps.weight' and 'blk.1.ffn_up_exps.weight'"),
        ("granitehybrid", "blk.1.ffn_up_shexp.weight", "'blk.1.ffn_gate_shexp.weight' and 'blk.1.ffn_up_shexp.weight'"),
    ],
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_tensors_that_do_not_go_together_are_named(tmp_path, monkeypatch, architecture, name, both, kind):
    model_type, more, keys = KINDS[architecture]
    whole = stored

    def cut(model, theirs):
        for own, weight in whole(model, theirs):
            yield own, weight[..., : weight.shape[-1] // 2] if own == name else weight

    monkeypatch.setitem(globals(), "stored", cut)
    model, own = random_model(model_type, more), gguf.GGMLQuantizationType[kind]
    written(tmp_path / "a.gguf", model, THEIRS.get(architecture, architecture), keys, kind=own)
    with pytest.raises(ValueError, match=re.escape(f"a.gguf has sizes of {both} that do not go together")):
        decoder.load(tmp_path / "a.gguf")


@pytest.mark.parametrize("missing", ["k", "v"])
def test_one_of_two_that_are_joined_is_missing(tmp_path, monkeypatch, missing):
    model_type, more, keys = KINDS["deepseek3"]
    whole = stored
    monkeypatch.setitem(
        globals(), "stored", lambda *given: ((n, w) for n, w in whole(*given) if n != f"blk.1.attn_{missing}_b.weight")
    )
    written(tmp_path / "a.gguf", random_model(model_type, more), "deepseek2", keys)
    with pytest.raises(ValueError, match=r"a\.gguf has sizes of 'blk\.1\.attn_._b\.weight' that do not go together"):
        decoder.load(tmp_path / "a.gguf")


def test_a_tensor_that_the_model_does_not_use_is_refused(tmp_path):
    written(
        tmp_path / "a.gguf",
        random_model("ernie4_5", dict(head_dim=16, use_bias=True)),
        "ernie4_5",
        KINDS["ernie4_5"][2],
    )
    file = open_gguf(tmp_path / "a.gguf")
    with pytest.raises(
        ValueError, match=r"has a tensor 'blk\.0\.attn_k\.bias', which models of type ernie4_5 do not use"
    ):
        check_shapes(file, AutoModelForCausalLM.from_config(read_config(file)))


def test_shared_layers_may_have_keys_of_their_own_in_the_file_and_matrices_of_a_list_stay_in_their_format(tmp_path):
    """As the published models of Gemma 3n have them, unused."""
    model_type, more, keys = KINDS["gemma3n"]
    model = random_model(model_type, more | dict(num_hidden_layers=4))
    further = {f"blk.{layer}.attn_{part}.weight": np.ones((32, 64)) for layer in (2, 3) for part in "kv"}
    further |= {f"blk.{layer}.attn_k_norm.weight": np.ones(16) for layer in (2, 3)}
    written(tmp_path / "a.gguf", model, "gemma3n", keys, further, gguf.GGMLQuantizationType.Q8_0)
    plain = decoder.load(tmp_path / "a.gguf", dtype="float32").model
    given = dict(model.named_parameters())
    assert max((weight - given[name]).abs().max() for name, weight in plain.named_parameters()) < 0.01
    if native.available():
        kept = decoder.load(tmp_path / "a.gguf")
        for name in ("altup_projections.1", "altup_unembed_projections.2", "layers.0.self_attn.q_proj"):
            module = kept.model.get_submodule(f"model.{name}")
            assert isinstance(module, QuantisedLinear)
            expected = plain.get_submodule(f"model.{name}").weight
            assert torch.equal(module.rows(torch.arange(module.out_features)), expected)
        prompt = list(range(5, 45))
        options = dict(max_new_tokens=30, sampling=decoder.SamplingParams(seed=2), ignore_eos=True)
        out = kept.generate(prompt, method="prompt-lookup", **options)
        assert out.token_ids == kept.generate(prompt, method="ar", **options).token_ids


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"activation_sparsity_scale": [1.5] * 3}, r"activation_sparsity_scale that is no list of 4 numbers"),
        ({"activation_sparsity_scale": [1.5, np.inf, 0.0, 0.0]}, r"says that its .*activation_sparsity_scale is inf"),
    ],
)
def test_a_share_of_activations_that_cannot_be_is_named(tmp_path, given, words):
    model_type, more, keys = KINDS["gemma3n"]
    written(tmp_path / "a.gguf", random_model(model_type, more), "gemma3n", keys | given)
    with pytest.raises(ValueError, match=words):
        read_config(open_gguf(tmp_path / "a.gguf"))


def test_layers_that_predict_further_tokens_are_left_out_and_matrices_stay_in_their_format(tmp_path):
    """Also that whose columns are in another order, as far as blocks stay whole."""
    more = dict(linear_value_head_dim=32, hidden_size=64, intermediate_size=96)
    model = random_model("qwen3_5_text", DELTA | more)
    further = {"blk.4.attn_norm.weight": np.ones(64), "blk.4.nextn.eh_proj.weight": np.ones((64, 128))}
    keys = {"ssm.inner_size": 128, "nextn_predict_layers": 1, "block_count": 5}
    written(tmp_path / "a.gguf", model, "qwen35", OF_DELTA | keys, further, gguf.GGMLQuantizationType.Q8_0)
    plain = decoder.load(tmp_path / "a.gguf", dtype="float32").model
    assert plain.config.num_hidden_layers == 4
    given = dict(model.named_parameters())
    assert max((weight - given[name]).abs().max() for name, weight in plain.named_parameters()) < 0.01
    if native.available():
        kept = decoder.load(tmp_path / "a.gguf").model
        linear = {name: one for name, one in kept.named_modules() if isinstance(one, QuantisedLinear)}
        assert "model.layers.0.linear_attn.out_proj" in linear
        for name, module in linear.items():
            assert torch.equal(module.rows(torch.arange(module.out_features)), plain.get_submodule(name).weight)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("gpt-oss", "MXFP4"),
        ("qwen3moe", "Q8_0"),
        ("mixtral", "MXFP4"),
        ("qwen35moe", "Q8_0"),
        ("glm4moe", "Q8_0"),
        ("gemma4 with experts", "Q8_0"),
    ],
)
def test_experts_stay_in_the_formats_of_the_file(tmp_path, with_native, architecture, name):
    """And their texts are those of plain decoding to the last bit, whatever is verified."""
    model_type, more, keys = KINDS[architecture]
    model = random_model(model_type, more)
    kind = gguf.GGMLQuantizationType[name]
    path = tmp_path / "a.gguf"
    written(path, model, THEIRS.get(architecture, architecture), keys, kind=kind)
    dec, unpacked = decoder.load(path), decoder.load(path, dtype="float32").model
    experts = [module for module in dec.model.modules() if isinstance(module, QuantisedExperts)]
    given = [name for name in model.state_dict() if name.endswith(".experts.down_proj")]
    assert len(experts) == len(given) and name in repr(experts[0])
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    ids = torch.stack((torch.arange(9) % 4, (torch.arange(9) + 1) % 4), 1)
    with torch.inference_mode():
        for ours, theirs in zip(experts, (m.experts for m in unpacked.modules() if hasattr(m, "experts")), strict=True):
            expected = theirs(x, ids, weights)
            assert 0 < (ours(x, ids, weights) - expected).norm() < 0.05 * expected.norm()
    if architecture == "qwen35moe":
        return  # whose other layers are not
    assert dec.bitwise and (dec.target.backend.whole is not None) == (architecture != "gemma4 with experts")
    prompt = list(range(5, 45)) * 2
    options = dict(max_new_tokens=40, sampling=decoder.SamplingParams(seed=2), ignore_eos=True, return_logprobs=True)
    plain = dec.generate(prompt, method="ar", **options)
    out = dec.generate(prompt, method="prompt-lookup", **options)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


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
