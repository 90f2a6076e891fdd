"""Every family that the README lists equals transformers' own decoding; what cannot is refused with the reason."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedConfig

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.attention import tree_attention
from decoder.backends.forwards import replaced
from decoder.backends.native.packed_linear import packing
from decoder.backends.reference.attention import Masked
from decoder.model.architectures import refuse_unsupported
from decoder.work import finish

from ..tiny import SIZES
from .conftest import VOCAB, random_heads, some, tiny_llama, transformers_text

SHAPE = dict(SIZES, vocab_size=VOCAB, max_position_embeddings=512, pad_token_id=None)
EXPERTS = dict(
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
ROUTED = dict(EXPERTS, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1)


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


# model type and what differs from SHAPE
FAMILIES = {
    "llama, GQA": ("llama", {}),
    "llama, MHA": ("llama", dict(num_key_value_heads=4, attention_bias=True)),
    "llama, MQA, tied": ("llama", dict(num_key_value_heads=1, tie_word_embeddings=True)),
    "llama, linear": ("llama", rope("linear", factor=4.0)),
    "llama, llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama, yarn": ("llama", rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=8)),
    "mistral, wide window": ("mistral", dict(sliding_window=512, head_dim=8)),
    "ministral3": ("ministral3", dict(head_dim=8)),
    "mixtral": ("mixtral", dict(EXPERTS, sliding_window=None)),
    "qwen2_moe": ("qwen2_moe", EXPERTS),
    "qwen3_moe": ("qwen3_moe", dict(EXPERTS, head_dim=8)),
    "olmoe": ("olmoe", EXPERTS),
    "flex_olmo": ("flex_olmo", EXPERTS),
    "phimoe": ("phimoe", dict(EXPERTS, sliding_window=None)),
    "granitemoe": ("granitemoe", dict(EXPERTS, logits_scaling=3.0, residual_multiplier=0.4)),
    "glm4_moe": ("glm4_moe", dict(ROUTED, head_dim=8)),
    "phi": ("phi", {}),
    "phi3": ("phi3", dict(sliding_window=None)),
    "olmo": ("olmo", dict(clip_qkv=2.0)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", dict(sliding_window=512)),
    "granite": (
        "granite",
        dict(logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=2.0, attention_multiplier=0.3),
    ),
    "starcoder2": ("starcoder2", dict(sliding_window=None)),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {}),
    "gpt2, scaled by layer": ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "opt": ("opt", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "gemma": ("gemma", dict(head_dim=8)),
    "gemma3_text, wide window": ("gemma3_text", dict(head_dim=8, sliding_window=512, tie_word_embeddings=False)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0])),
    "cohere": ("cohere", dict(logit_scale=0.25)),
    "cohere2, wide window": ("cohere2", dict(sliding_window=512)),
    "glm": ("glm", dict(head_dim=8)),
    "glm4": ("glm4", dict(head_dim=8)),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4, wide window": ("exaone4", dict(sliding_window=512)),
    "seed_oss": ("seed_oss", dict(head_dim=8)),
    "helium": ("helium", dict(head_dim=8)),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "persimmon": ("persimmon", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", dict(head_dim=8)),
}

# Their passes are those of another one above, but for the table of angles, or for a window that is never reached.
VARIANTS = {"llama, linear", "llama, llama3", "llama, yarn", "qwen2, yarn", "mistral, wide window"}
ONCE_EACH = some(FAMILIES, FAMILIES.keys() - VARIANTS)

# Of families whose layers PyTorch would run by the same operators, one or two.
OF_EACH_KIND = {
    "llama, GQA", "qwen3", "mixtral", "granitemoe", "glm4_moe", "phi", "olmo", "olmo2", "granite", "gpt_neox", "gpt2",
    "gpt_bigcode", "opt", "gemma", "gemma3_text, wide window", "smollm3", "cohere", "cohere2, wide window", "glm4",
    "persimmon",
}  # fmt: skip


def tiny(model_type, dtype=torch.float64, **overrides):
    """A random model whose text varies: layers that outweigh the embeddings, norms and biases that are not trivial."""
    config = AutoConfig.for_model(model_type, **{**SHAPE, **overrides})
    # transformers' default for experts knows no float64.
    with torch.random.fork_rng():
        torch.manual_seed(5)  # some decays are random to begin with
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if module is model.get_input_embeddings() or parameter.ndim == 1 else 0.4
            parameter.data = noise * scale + (parameter.data if parameter.ndim == 1 else 0)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # by which experts are chosen
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model.tie_weights()
    return model.to(dtype)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def family(request):
    model_type, overrides = request.param
    return tiny(model_type, **overrides)


@pytest.fixture(scope="module")
def dec(family):
    return Decoder(family, heads=random_heads(family))


LENGTH = 20
NARROW = TokenSwiftOptions(tree=(1, 2, 1), ngrams=3, budget=24, sink=4)


def test_greedy_is_transformers_own(family, dec, prompt):
    """With a penalty, so that no text is one token again and again."""
    expected = transformers_text(family, prompt, LENGTH, repetition_penalty=1.5)
    assert len(set(expected)) > 5
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5)
    for method in ("ar", "tokenswift"):
        assert dec.generate(prompt, LENGTH, method, sampling, NARROW).token_ids == expected


def test_trees_and_draft_passes_equal_ar_when_sampling(dec, prompt):
    """Of a family, methods differ in these alone."""
    sampling = SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, penalty_window=16)
    expected = dec.generate(prompt, LENGTH, "ar", sampling)
    for method in ("tokenswift", "magicdec"):
        out = dec.generate(prompt, LENGTH, method, sampling, NARROW)
        assert (method, out.token_ids) == (method, expected.token_ids)
    assert dec.audit(expected).equal


def test_drafts_from_the_whole_text_are_right_every_time(dec, prompt):
    """The draft pass is the model itself: same positions, norm, head and scale of the logits as the verification."""
    options = TokenSwiftOptions(tree=(1, 1, 1, 1), budget=100)
    out = dec.generate(prompt, LENGTH, "magicdec", SamplingParams(seed=5), options)
    assert out.stats.steps == LENGTH // 5


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "granite", "gpt2"])
@pytest.mark.parametrize(
    "dtype, tie", [(torch.float32, 1e-4), (torch.bfloat16, 0.5), (torch.float16, 0.1)], ids=["float32", "bf16", "fp16"]
)
def test_every_dtype_runs_and_the_audit_explains_what_differs(model_type, dtype, tie, prompt):
    """Margins are rounding errors of logits of the order of 5, larger where a tie has chosen another expert."""
    overrides = {"qwen3_moe": EXPERTS, "granite": {"logits_scaling": 2.0}}.get(model_type, {})
    dec = Decoder(tiny(model_type, dtype, **overrides), heads=random_heads(tiny(model_type, **overrides)))
    for method in ("ar", "tokenswift", "magicdec"):
        out = dec.generate(prompt, 30, method, SamplingParams(seed=2, repetition_penalty=1.2), NARROW)
        assert len(out.token_ids) == 30
        audit = dec.audit(out)
        assert audit.equal or audit.margin < tie * (10 if overrides is EXPERTS else 1), str(audit)


def fingerprint(model):
    modules = dict(model.named_modules())
    hooks = {
        name: [len(getattr(module, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks")]
        for name, module in modules.items()
    }
    training = {name: module.training for name, module in modules.items()}
    forwards = {name: module.__dict__.get("forward") for name, module in modules.items()}
    weights = {name: (id(p), p.sum().item(), p.requires_grad) for name, p in model.named_parameters()}
    return hooks, training, forwards, weights, model.config.to_dict(), model.config._attn_implementation


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_users_model_stays_as_it_was(implementation, prompt):
    """Training flags per module, forwards and hooks of the user's own among them, also in the middle of a stream
    and when a step fails."""
    model = tiny_llama(attention_dropout=0.5)
    model.set_attn_implementation(implementation)
    model.train()
    model.model.layers[0].eval()
    calls = []
    linear = model.model.layers[1].mlp.down_proj
    linear.forward = lambda x: calls.append(1) or nn.functional.linear(x, linear.weight)
    model.model.norm.register_forward_pre_hook(lambda norm, args: None)
    failing = []

    def fail(*_):
        if failing:
            raise RuntimeError("layer failed")

    model.model.layers[1].register_forward_hook(fail)
    before = fingerprint(model)
    dec = Decoder(model, heads=random_heads(model), draft_model=model)
    for method in ("ar", "tokenswift", "medusa", "triforce", "magicdec"):
        for _ in dec.stream(prompt, 10, method):
            assert fingerprint(model) == before
        stream = dec.stream(prompt, 40, method)
        next(stream), next(stream)
        failing.append(method)
        with pytest.raises(RuntimeError, match="layer failed"):
            next(stream)
        failing.clear()
        assert fingerprint(model) == before
    assert calls


REFUSED = {
    "t5": ("t5", {}, "is an encoder-decoder"),
    "bart": ("bart", {}, "is an encoder-decoder"),
    "whisper": ("whisper", {}, "is an encoder-decoder"),
    "bert": ("bert", {}, "is an encoder;"),
    "bert as a decoder": ("bert", dict(is_decoder=True), "is an encoder;"),
    "roberta": ("roberta", {}, "is an encoder;"),
    "vit": ("vit", {}, "is no causal language model"),
    "llava": ("llava", {}, "wraps a language model with other parts"),
    "qwen2_vl": ("qwen2_vl", {}, "wraps a language model with other parts"),
    "mamba": ("mamba", {}, "layers, which are not known|recurrent state"),
    "rwkv": ("rwkv", {}, "recurrent state"),
    "recurrent_gemma": ("recurrent_gemma", {}, "layers, which are not known|recurrent state"),
    "gemma, both directions": ("gemma", dict(use_bidirectional_attention=True), "attend in both directions"),
    "gemma3_text, no tokens in a window": ("gemma3_text", dict(sliding_window=0), "with a sliding_window of 0"),
    "mixtral, more than all experts": (
        "mixtral",
        dict(num_local_experts=4, num_experts_per_tok=5),
        "a num_experts_per_tok of 5, and 4 experts",
    ),
    "llama, an unknown activation": ("llama", dict(hidden_act="magic"), "has hidden_act='magic'"),
    "gpt2, an unknown activation": ("gpt2", dict(activation_function="magic"), "has activation_function='magic'"),
    "nemotron_h, an unknown activation": ("nemotron_h", dict(mamba_hidden_act="magic"), "has mamba_hidden_act='magic'"),
    # Modules of these look at nothing, or take what they do not know for something else.
    "gpt_oss, another activation": ("gpt_oss", dict(hidden_act="gelu"), "has hidden_act='gelu'"),
    "llama, an unknown scaling": ("llama", rope("magic", factor=2.0), "has rope_type='magic'"),
    "gemma3_text, an unknown scaling": (
        "gemma3_text",
        {"rope_parameters": {kind: {"rope_type": "magic"} for kind in ("full_attention", "sliding_attention")}},
        "has rope_type='magic'",
    ),
    "llama, no scaling's name": ("llama", rope(None), "has rope_type=None"),
    "llama, partly rotated": ("llama", rope("default", partial_rotary_factor=0.5), "has partial_rotary_factor=0.5"),
    "llama, an unknown quantisation": (
        "llama",
        dict(quantization_config=dict(quant_method="magic")),
        "has quant_method='magic'",
    ),
    "llama, hybrid layers": (
        "llama",
        dict(num_hidden_layers=2, layer_types=["hybrid", "full_attention"]),
        "layers with a recurrent state",
    ),
    "llama, soft caps": ("llama", dict(attn_logit_softcapping=3.0), "has attn_logit_softcapping=3.0"),
    "llama, layers that share keys": ("llama", dict(num_kv_shared_layers=2), "has num_kv_shared_layers=2"),
    "qwen3, temperatures": ("qwen3", dict(attn_temperature_tuning=True), "has attn_temperature_tuning=True"),
    "llama, interleaved": ("llama", dict(rope_interleaved=True), "has rope_interleaved=True"),
    "deepseek_v2, an unknown router": ("deepseek_v2", dict(topk_method="noaux_tc"), "has topk_method='noaux_tc'"),
    "deepseek_v3, an unknown router": ("deepseek_v3", dict(scoring_func="softmax"), "has scoring_func='softmax'"),
    "kimi_linear, an unknown router": (
        "kimi_linear",
        dict(moe_router_activation_func="softmax"),
        "has moe_router_activation_func='softmax'",
    ),
    "glm4_moe_lite, an unknown layer": (
        "glm4_moe_lite",
        dict(num_hidden_layers=2, mlp_layer_types=["dense", "magic"]),
        "has mlp_layer_types='magic'",
    ),
    "granitemoehybrid, unknown positions": (
        "granitemoehybrid",
        dict(position_embedding_type="magic"),
        "has position_embedding_type='magic'",
    ),
    "phimoe, more experts than two": ("phimoe", dict(num_experts_per_tok=3), "has num_experts_per_tok=3"),
    "qwen3_5_text, no gate": ("qwen3_5_text", dict(attn_output_gate=False), "has attn_output_gate=False"),
    # Kinds of layers that some family has, but not this one.
    "gemma3_text, chunks": (
        "gemma3_text",
        dict(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"], attention_chunk_size=64),
        "has (layer_types='chunked_attention'|attention_chunk_size=64)",
    ),
    "gemma3_text, experts alone": (
        "gemma3_text",
        dict(num_hidden_layers=2, layer_types=["full_attention", "moe"]),
        "has layer_types='moe'",
    ),
    "qwen3_next, windows": (
        "qwen3_next",
        dict(num_hidden_layers=2, layer_types=["linear_attention", "sliding_attention"], sliding_window=64),
        "has layer_types='sliding_attention'",
    ),
    "lfm2, other states": (
        "lfm2",
        dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
        "has layer_types='linear_attention'",
    ),
    "lfm2, hybrids": ("lfm2", dict(num_hidden_layers=2, layer_types=["conv", "hybrid"]), "has layer_types='hybrid'"),
    "mistral, windows by layer": (
        "mistral",
        dict(num_hidden_layers=2, sliding_window=64, layer_types=["full_attention", "sliding_attention"]),
        r"do not look at layer_types=\['full_attention', 'sliding_attention'\]",
    ),
    # Options that the family's configuration has, or any could have, and its modules do not look at.
    "deepseek_v2, weights of experts to one": ("deepseek_v2", dict(norm_topk_prob=True), "has norm_topk_prob=True"),
    "nemotron_h, windows": ("nemotron_h", dict(sliding_window=64), "has sliding_window=64"),
    "nemotron_h, biases": ("nemotron_h", dict(attention_bias=True), "has attention_bias=True"),
    "llama, windows": ("llama", dict(sliding_window=64), "has sliding_window=64"),
    "deepseek_v3, windows": ("deepseek_v3", dict(sliding_window=64), "has sliding_window=64"),
    "deepseek_v2, chunks": ("deepseek_v2", dict(attention_chunk_size=64), "has attention_chunk_size=64"),
    "qwen3_moe, scaled experts": ("qwen3_moe", dict(routed_scaling_factor=2.5), "has routed_scaling_factor=2.5"),
    "llama, experts by layer": ("llama", dict(mlp_layer_types=["dense", "sparse"]), "has mlp_layer_types="),
    "qwen3, layers without positions": ("qwen3", dict(no_rope_layers=[1, 0]), "has no_rope_layers="),
    # Sizes.
    "olmo3, half a dimension": ("olmo3", dict(head_dim=8.5), "a head_dim of 8.5"),
    "qwen3, less than no heads": ("qwen3", dict(num_key_value_heads=-1), "a num_key_value_heads of -1"),
    "qwen3, no heads": ("qwen3", dict(num_key_value_heads=0), "a num_key_value_heads of 0"),
    "llama, negative lengths": ("llama", dict(max_position_embeddings=-1), "a max_position_embeddings of -1"),
    "deepseek_v2, less than no ranks": ("deepseek_v2", dict(kv_lora_rank=-1), "a kv_lora_rank of -1"),
    "nemotron_h, nothing at a time": ("nemotron_h", dict(chunk_size=0), "a chunk_size of 0"),
    "qwen3, heads that are left over": (
        "qwen3",
        dict(num_attention_heads=5, num_key_value_heads=2),
        "num_attention_heads of 5, no multiple of its num_key_value_heads of 2",
    ),
    "qwen3_next, heads that are left over": (
        "qwen3_next",
        dict(linear_num_key_heads=3, linear_num_value_heads=4),
        "linear_num_value_heads of 4, no multiple of its linear_num_key_heads of 3",
    ),
    "nemotron_h, heads that are left over": (
        "nemotron_h",
        dict(mamba_num_heads=8, n_groups=3),
        "mamba_num_heads of 8, no multiple of its n_groups of 3",
    ),
    "mixtral, half a pair": ("mixtral", dict(hidden_size=224), "a hidden_size of 224 for 32 heads, .* of 7, where"),
    "gpt_oss, half a pair": ("gpt_oss", dict(head_dim=3), "a head_dim of 3, where rotary embeddings turn pairs"),
    "mixtral, heads of nothing": (
        "mixtral",
        dict(hidden_size=3, num_attention_heads=4, num_key_value_heads=2),
        "a hidden_size of 3 for 4 heads",
    ),
    "deepseek_v3, half a pair": ("deepseek_v3", dict(qk_rope_head_dim=3, head_dim=3), "a qk_rope_head_dim of 3"),
    "glm4_moe, groups that are left over": (
        "glm4_moe",
        dict(n_routed_experts=8, n_group=3),
        "n_group of 3, .* 8 experts",
    ),
    "deepseek_v3, more than all groups": (
        "deepseek_v3",
        dict(n_group=4, topk_group=5),
        "n_group of 4, a topk_group of 5",
    ),
    "qwen2_moe, more than all experts": (
        "qwen2_moe",
        dict(num_local_experts=60, num_experts=2, num_experts_per_tok=4),
        "a num_experts_per_tok of 4, and 2 experts",
    ),
    "llama, a layer apart": (
        "llama",
        dict(per_layer_config={"0": {"num_key_value_heads": 1}}),
        "has per_layer_config=",
    ),
    "llama, a layer left out": ("llama", dict(per_layer_config={"0": {"skip": ["mlp"]}}), "has per_layer_config="),
    "gpt_oss, no experts used": ("gpt_oss", dict(num_experts_per_tok=0), "a num_experts_per_tok of 0"),
    "deepseek_v3, fewer KV heads": (
        "deepseek_v3",
        dict(num_attention_heads=4, num_key_value_heads=2),
        "a num_key_value_heads of 2, and compressed keys",
    ),
    "llama, dynamic": ("llama", rope("dynamic", factor=2.0), "dynamic rotary scaling"),
    "phi3, longrope": (
        "phi3",
        dict(
            hidden_size=32,
            num_attention_heads=4,
            sliding_window=None,
            **rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64),
        ),
        "longrope rotary scaling",
    ),
    "blt": ("blt", {}, "does not use transformers' attention interface"),
    "bloom": ("bloom", {}, "does not use transformers' attention interface"),
    "falcon": ("falcon", {}, "does not use transformers' attention interface"),
    "mpt": ("mpt", {}, "does not use transformers' attention interface"),
    "gptj": ("gptj", {}, "does not use transformers' attention interface"),
    "stablelm": ("stablelm", {}, "does not use transformers' attention interface"),
}


@pytest.mark.parametrize("model_type, overrides, reason", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_is_told_from_the_configuration(model_type, overrides, reason):
    config = AutoConfig.for_model(model_type, **overrides)
    with pytest.raises(ValueError, match=f"^{model_type} .*({reason})") as refusal:
        refuse_unsupported(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_looks_at_is_not_refused(name):
    """Every field of its configuration, but for those that change nothing."""
    model_type, overrides = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **overrides})
    config.unsloth_version, config.initializer_range, config.pretraining_tp = "1", 0.1, 2
    refuse_unsupported(config)


def test_a_configuration_without_a_length_is_refused():
    with pytest.raises(ValueError, match="names no max_position_embeddings"):
        refuse_unsupported(PreTrainedConfig(), LlamaForCausalLM)


class CappedLlama(LlamaForCausalLM):
    """Caps its logits and says so nowhere."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.tanh()
        return output


@pytest.mark.parametrize(
    "model_type, overrides, reason",
    [
        ("doge", {}, "uses an attention mask of its own"),
        ("nemotron", dict(head_dim=8), "another attention and cache: its layers hand nothing on"),
        ("opt", dict(ffn_dim=48, do_layer_norm_before=False), "has no final norm"),
    ],
)
def test_what_the_configuration_does_not_tell_is_refused_too(model_type, overrides, reason):
    model = tiny(model_type, **overrides)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=f"^{model_type} .*{reason}"):
        Decoder(model)
    assert fingerprint(model) == before


def test_a_model_that_bends_its_logits_is_refused():
    model = CappedLlama(tiny_llama().config).double()
    model.load_state_dict(tiny_llama().state_dict())
    with pytest.raises(ValueError, match="changes its logits behind its language-model head"):
        Decoder(model)


@pytest.mark.parametrize(
    "asked, reason",
    [
        (dict(position_bias=torch.zeros(1)), "'position_bias'"),
        (dict(sliding_window=511), "a sliding window of 511 tokens"),
        (dict(is_causal=False), "both directions"),
        (dict(attention_mask=torch.zeros(1, 1, 3, 3)), "mask of its own"),
        (dict(sliding_window=512, softcap=None, is_causal=True, position_ids=torch.zeros(1), use_cache=True), None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_attention_never_ignores_what_a_model_asks_of_it(asked, reason):
    layer = tiny("llama").model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    arguments = {"attention_mask": None, **asked}
    if reason is None:
        assert tree_attention(layer, query, key, key, sequences=[Masked(3)], **arguments)[0].shape == (1, 3, 4, 8)
    else:
        with pytest.raises(ValueError, match=f"llama uses .*{reason}"):
            tree_attention(layer, query, key, key, **arguments)


def test_a_model_on_other_devices_is_refused():
    model = tiny("llama")
    model.model.embed_tokens.to("meta")
    with pytest.raises(ValueError, match="spread over cpu, meta; load it on one device"):
        Decoder(model)
    with pytest.raises(ValueError, match="on device meta; only cpu and cuda"):
        Decoder(model.to("meta"))


def test_experts_in_float64_are_told_how():
    config = AutoConfig.for_model("mixtral", **SHAPE, num_local_experts=4, sliding_window=None)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm").double()
    with pytest.raises(ValueError, match="float64 only with experts_implementation='eager'"):
        Decoder(model)


def test_something_else_than_a_transformers_model_is_refused():
    with pytest.raises(ValueError, match=r"transformers model .* is needed, not Linear"):
        Decoder(nn.Linear(2, 2))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_packed_layers_of_every_family_compute_the_same(with_native, name, prompt):
    """In a text, and in its single steps."""
    model_type, overrides = FAMILIES[name]
    model = tiny(model_type, torch.float32, **overrides)
    packed, ids = finish(packing(model.modules())), torch.tensor([prompt])
    assert packed
    for text in (ids, ids[:, :1]):
        with torch.inference_mode():
            expected = model(text).logits
            with replaced(packed):
                actual = model(text).logits
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
