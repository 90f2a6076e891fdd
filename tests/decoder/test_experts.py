"""Experts in the native library: transformers' numbers, and bits that do not depend on who shares an expert."""

from itertools import product

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.backends.native import library as native
from decoder.backends.native.experts import PackedExperts, PackedRouter, are_experts, chooses_alike, packing_experts
from decoder.backends.native.packed_linear import packing
from decoder.work import finish

from .conftest import random_heads, random_tokens, some
from .recurrent_models import ALL, LATENT
from .test_families import EXPERTS, ROUTED, tiny
from .test_whole_model import EXPERTS as RUN_AS_A_WHOLE
from .test_whole_model import passes

MANY = dict(num_experts=64, num_local_experts=64, num_experts_per_tok=6, moe_intermediate_size=24)
GROUPED = dict(ROUTED, **MANY, n_routed_experts=64, n_group=8, topk_group=3, routed_scaling_factor=2.5)
# model type and what differs from the shape of `test_families`
DTYPES = (torch.float32, torch.bfloat16)
FAMILIES = {
    "mixtral": ("mixtral", dict(EXPERTS, sliding_window=None)),
    "qwen3_moe, 64": ("qwen3_moe", dict(EXPERTS, **MANY, head_dim=8, mlp_only_layers=[0])),
    "qwen2_moe": ("qwen2_moe", dict(EXPERTS, decoder_sparse_step=1)),
    "olmoe, not normalised": ("olmoe", EXPERTS),
    "glm4_moe, groups": ("glm4_moe", dict(GROUPED, head_dim=8)),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        dict(ROUTED, moe_num_experts=32, moe_k=4, moe_intermediate_size=24, moe_num_shared_experts=2)
        | dict(moe_layer_start_index=1, head_dim=8),
    ),
    "lfm2_moe": ("lfm2_moe", ALL["lfm2_moe"][1] | dict(norm_topk_prob=True, routed_scaling_factor=1.5)),
    "nemotron_h": (
        "nemotron_h",
        ALL["nemotron_h"][1] | dict(n_routed_experts=8, num_local_experts=8, num_experts_per_tok=3),
    ),
    "deepseek_v2": ("deepseek_v2", dict(ROUTED, **LATENT, routed_scaling_factor=2.5)),
    "gpt_oss, 64": (
        "gpt_oss",
        dict(
            EXPERTS, **MANY, head_dim=8, num_hidden_layers=3, sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}  # fmt: skip
MOST = ("qwen3_moe", {**EXPERTS, **MANY, "num_local_experts": 512, "num_experts": 512, "num_experts_per_tok": 10})

pytestmark = pytest.mark.usefixtures("with_native")


def blocks(model):
    """Each block of experts in a model: the module that chooses and the experts."""
    for module in model.modules():
        parts = dict(module.named_children())
        router = parts.get("gate", parts.get("router"))
        if router is not None and "experts" in parts:
            yield router, parts["experts"]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["32", "16"])
@pytest.mark.parametrize("name", [*FAMILIES, "512 experts"])
def test_a_block_gives_what_transformers_gives_whatever_rows_are_beside(name, dtype, tolerance):
    model_type, overrides = FAMILIES.get(name, MOST)
    model = tiny(model_type, dtype, **overrides)
    found = list(blocks(model))
    assert found
    for router, experts in found:
        if "e_score_correction_bias" in router._buffers:
            router.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, len(router.weight)).flip(0))
        if "moe_statics" in router._modules:
            own = router.moe_statics.e_score_correction_bias
            own.data.copy_(torch.linspace(-0.03, 0.03, len(router.weight)).flip(0).view_as(own))
        assert are_experts(experts) and chooses_alike(router)
        x = torch.randn(150, router.weight.shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
        handed = [torch.linspace(-0.3, 0.3, len(router.weight))] if hasattr(router, "use_expert_bias") else []
        logits, weights, ids = PackedRouter(router).forward(x, *handed)
        packed, alone = PackedExperts(experts), PackedRouter(router)
        with torch.inference_mode():
            theirs = experts(x, ids, weights)
        ours = packed.forward(x, ids, weights)
        assert (ours - theirs).double().norm() <= tolerance * theirs.double().norm()
        order = torch.randperm(150, generator=torch.Generator().manual_seed(4))
        assert torch.equal(packed.forward(x[order], ids[order], weights[order]), ours[order])
        for row in (0, 77, 149):
            own = alone.forward(x[row : row + 1], *handed)
            assert all(torch.equal(mine[0], all_[row]) for mine, all_ in zip(own, (logits, weights, ids), strict=True))
            assert torch.equal(packed.forward(x[row : row + 1], *own[:0:-1])[0], ours[row])


def test_equal_experts_are_chosen_in_order_once_they_are_packed_anew():
    [(router, _), *_] = blocks(tiny("qwen3_moe", torch.float32, **dict(EXPERTS, **MANY)))
    packed = PackedRouter(router)
    held = packed.held
    packed.renew(router)
    assert packed.held is held
    router.weight.data[10:50] = router.weight.data[30]
    x = router.weight.data[30:31] * 3
    packed.renew(router)
    _, weights, ids = packed.forward(x)
    assert ids.tolist() == [[10, 11, 12, 13, 14, 15]] and weights.unique().numel() == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    some(product(FAMILIES, DTYPES), [(name, DTYPES[number % 2]) for number, name in enumerate(FAMILIES)]),
)
def test_every_method_gives_the_text_of_plain_decoding(name, dtype):
    model_type, overrides = FAMILIES[name]
    model = tiny(model_type, dtype, **overrides)
    dec = Decoder(model, heads=random_heads(model))
    assert dec.bitwise, dec.report()
    assert passes(dec) == (model_type in (*RUN_AS_A_WHOLE, "lfm2_moe") and native.multiplies(dtype))
    prompt = random_tokens(30, 1)
    given = dict(max_new_tokens=60, sampling=SamplingParams(seed=3), ignore_eos=True, return_logprobs=True)
    plain = dec.generate(prompt, method="ar", **given)
    for method in ("tokenswift", "magicdec", "auto"):
        out = dec.generate(prompt, method=method, **given)
        assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs), method
    batch = dec.generate_batch([prompt[:9], prompt, prompt[:17]], method="tokenswift", **given)
    assert (batch[1].token_ids, batch[1].logprobs) == (plain.token_ids, plain.logprobs)
    if dec.target.has_two_forms:  # what comes behind is another text, since its prompt is longer
        return
    behind = dec.generate(prompt + plain.token_ids[:25], method="ar", **given | dict(max_new_tokens=35))
    assert behind.token_ids == plain.token_ids[25:]


def test_a_block_that_the_user_has_changed_runs_as_it_is():
    for change in ("experts", "gate"):
        model = tiny("qwen3_moe", torch.float32, **EXPERTS)
        dec = Decoder(model, bitwise=False)
        assert passes(dec)
        seen = []
        hooked = getattr(model.model.layers[1].mlp, change)
        hooked.register_forward_hook(lambda module, args, output, seen=seen: seen.append(module))
        dec.target.refresh_weights()
        dec.generate([1, 2, 3], 3, "ar", ignore_eos=True)
        assert seen and not passes(dec)


@pytest.mark.parametrize("part", ["shared_expert_gate", "shared_expert.up_proj", "gate"])
def test_a_block_whose_weights_have_several_dtypes_is_not_read_in_one(part):
    model = tiny("qwen2_moe", torch.bfloat16, **EXPERTS, decoder_sparse_step=1)
    blocks = [layer.mlp for layer in model.model.layers]
    blocks[1].get_submodule(part).float()
    for number, block in enumerate(blocks):
        layers = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
        held = finish(packing(layers))  # what the block is made of lives as long as this
        assert (block in finish(packing_experts([block, *block.children()]))) == (number != 1) and held
