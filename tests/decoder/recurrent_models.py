"""Tiny random models with recurrent layers, compressed keys and experts, whose states matter to the text."""

import pytest
import torch

from decoder.backends.native import library as native

from .test_families import EXPERTS, ROUTED, SHAPE, tiny

DELTA = dict(
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    num_hidden_layers=4,
)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_expand=2, mamba_chunk_size=8)
LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    qk_head_dim=16,
    v_head_dim=12,
    head_dim=8,
    num_key_value_heads=4,
)
# model type, and what differs from SHAPE
RECURRENT = {
    "qwen3_next": ("qwen3_next", {**EXPERTS, **DELTA, "decoder_sparse_step": 2}),
    "qwen3_5_text": ("qwen3_5_text", DELTA),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**EXPERTS, **DELTA}),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3)),
    "lfm2_moe": (
        "lfm2_moe",
        {**EXPERTS, **dict(layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3, num_dense_layers=1)},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **EXPERTS,
            **MAMBA2,
            **dict(
                num_hidden_layers=3,
                layer_types=["mamba", "attention", "mamba"],
                shared_intermediate_size=16,
                logits_scaling=2.0,
                position_embedding_type="rope",
            ),
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **ROUTED,
            **dict(
                layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
                num_hidden_layers=5,
                head_dim=8,
                mamba_num_heads=8,
                mamba_head_dim=8,
                ssm_state_size=8,
                n_groups=2,
                chunk_size=8,
                moe_shared_expert_intermediate_size=16,
            ),
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {**MAMBA2, **dict(mamba_d_ssm=64, head_dim=8, ssm_multipliers=[1.0, 1.1, 0.9, 1.2, 0.8])},
    ),
    "bamba": ("bamba", {**MAMBA2, **dict(num_hidden_layers=3, attn_layer_indices=[1])}),
    "zamba2": (
        "zamba2",
        dict(
            num_hidden_layers=5,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"],
            mamba_d_state=8,
            mamba_headdim=8,
            mamba_ngroups=2,
            n_mamba_heads=8,
            chunk_size=8,
            num_mem_blocks=1,
            adapter_rank=4,
        ),
    ),
    "minimax": (
        "minimax",
        {
            **EXPERTS,
            **dict(
                head_dim=8,
                block_size=8,
                num_hidden_layers=3,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
                sliding_window=None,
            ),
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **ROUTED,
            **LATENT,
            **dict(
                num_hidden_layers=3,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
                q_lora_rank=None,
                linear_head_dim=8,
                linear_num_heads=4,
            ),
        },
    ),
    "jamba": (
        "jamba",
        {
            **EXPERTS,
            **dict(
                num_hidden_layers=4,
                attn_layer_period=2,
                attn_layer_offset=1,
                expert_layer_period=2,
                mamba_d_state=4,
                mamba_dt_rank=4,
                use_mamba_kernels=False,
            ),
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        dict(
            layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
}
LATENTS = {
    "deepseek_v2": ("deepseek_v2", {**ROUTED, **LATENT}),
    "deepseek_v3": ("deepseek_v3", {**ROUTED, **LATENT, "num_local_experts": 4}),
    "glm4_moe_lite": ("glm4_moe_lite", {**ROUTED, **LATENT}),
    "axk1": ("axk1", {**ROUTED, **LATENT}),
    # Its layers attend twice, and some of its experts change nothing.
    "longcat_flash": (
        "longcat_flash",
        dict(LATENT, num_layers=2, num_hidden_layers=4, moe_intermediate_size=16, moe_topk=2, n_routed_experts=4)
        | dict(zero_expert_num=2),
    ),
}
ALL = {**RECURRENT, **LATENTS}
GRANITE = dict(embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3)
# Those that the native library runs as a whole: of ALL or another, with what differs, and the dtype.
NATIVE = {
    "qwen3_5_text, 32": ("qwen3_5_text", {}, torch.float32),
    "qwen3_5_text, 16": ("qwen3_5_text", dict(linear_num_value_heads=6, linear_value_head_dim=20), torch.bfloat16),
    "qwen3_next, 16": ("qwen3_next", {}, torch.bfloat16),
    "qwen3_5_moe_text, 32": ("qwen3_5_moe_text", {}, torch.float32),
    "bamba, 32": ("bamba", {}, torch.float32),
    "lfm2, 16": ("lfm2", dict(conv_bias=True), torch.bfloat16),
    "lfm2_moe, 32": ("lfm2_moe", {}, torch.float32),
    # As the dense ones of Granite 4 are, which rotate nothing.
    "granitemoehybrid, 32": (
        "granitemoehybrid",
        dict(GRANITE, num_local_experts=0, num_experts=0, position_embedding_type="nope"),
        torch.float32,
    ),
    "granitemoehybrid with experts, 32": (
        "granitemoehybrid",
        dict(GRANITE, shared_intermediate_size=12),
        torch.float32,
    ),
    "granitemoehybrid with experts, 16": ("granitemoehybrid", GRANITE, torch.bfloat16),
}
OFTEN = [
    "qwen3_5_text, 32",
    "qwen3_next, 16",
    "lfm2_moe, 32",
    "granitemoehybrid, 32",
    "granitemoehybrid with experts, 32",
]
"""Those of them that most quick tests run; slow ones run all."""


def made(name, **overrides):
    """One of `ALL` or `NATIVE`, as `test_families.tiny` makes it."""
    if name in NATIVE and not native.multiplies(NATIVE[name][2]):
        pytest.skip("the library does not multiply this dtype here")
    name, more, dtype = NATIVE.get(name, (name, {}, torch.float64))
    model_type, own = ALL[name]
    return tiny(model_type, dtype, **{**own, **more, **overrides})


__all__ = ["ALL", "LATENT", "LATENTS", "NATIVE", "OFTEN", "RECURRENT", "SHAPE", "made"]
