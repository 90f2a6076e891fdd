"""DFlash's draft model: its blocks, its entries of the text, and its checkpoints."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import silu
from transformers import Qwen3Config

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.base import PassOutput
from decoder.cache.draft_layer import DraftLayerCache
from decoder.dflash.draft_model import DFlashConfig, DFlashDraftModel
from decoder.drafters.base import DrafterContext
from decoder.drafters.block_levels import BlockLevels
from decoder.drafters.tuning.level_policy import Expected, LevelPolicy
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.heads import kind_in
from decoder.sampling.sampler import Sampler

from .conftest import (
    VOCAB,
    assert_preempted_as_alone,
    config_damaged,
    drafted_levels,
    random_heads,
    random_tokens,
    tensors_damaged,
    tiny_llama,
)
from .test_families import tiny

IDS, LAYERS, BLOCK, MASK = [0, 2], (1, 3), 6, 47
TREE = TokenSwiftOptions(tree=(3, 2, 1, 1))
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.1, penalty_window=20, seed=5)
WINDOWS = {"full": (None, None), "mixed": (5, None), "windows": (5, 9)}


def draft_model(windows=(None, None), causal=None, **changes):
    """Random weights, whose drafts are right now and then."""
    torch.manual_seed(3)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    layers = Qwen3Config(vocab_size=VOCAB, num_key_value_heads=2, head_dim=8, **sizes)
    causal = tuple(window is not None for window in windows) if causal is None else (causal, causal)
    model = DFlashDraftModel(DFlashConfig(layers, LAYERS, BLOCK, MASK, windows, causal, **changes)).double().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data * 3 if parameter.ndim > 1 else torch.rand(parameter.shape).double() + 0.5
    return model.requires_grad_(False)


def write(model, folder, layout="z-lab", part=None, **changes):
    """A checkpoint of a layout, as it is published; ``part`` of the vocabulary is drafted with a head of its own."""
    shape, windowed = model.shape, any(model.shape.windows)
    layer = model.config.to_diff_dict() | {"model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2}
    layer |= {"layer_types": [("full", "sliding")[window is not None] + "_attention" for window in shape.windows]}
    layer |= {"use_sliding_window": windowed, "sliding_window": next(filter(None, shape.windows), None)}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if layout == "z-lab":
        fields = {"mask_token_id": MASK, "target_layer_ids": IDS}
        config = layer | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": fields}
        for name, usual in (("embedding_scale", 1.0), ("logit_scale", 1.0), ("logit_cap", None)):
            if (value := getattr(shape, name)) != usual:
                published = dict(embedding_scale="input_embedding_scale", logit_scale="output_multiplier")
                fields[published.get(name, "final_logit_softcapping")] = value
        if windowed and not any(shape.causal):
            config["is_causal"] = False
    else:
        config = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": BLOCK}
        config |= {"aux_hidden_state_layer_ids": list(LAYERS), "mask_token_id": MASK, "transformer_layer_config": layer}
        config |= {"sliding_window_non_causal": not any(shape.causal)}
        config["speculators_config"] = {"verifier": {"name_or_path": "some/model"}}
    if part is not None:
        tensors["lm_head.weight"] = torch.randn(len(part), 32).double()
        tensors["d2t"] = part - torch.arange(len(part))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, part, True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return tensors


@pytest.fixture(scope="module")
def target_model():
    return tiny_llama(num_hidden_layers=4)


def features_of(model, ids):
    """What the layers hand on, [n, layers x d], which transformers numbers from the embeddings on."""
    hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[one + 1][0] for one in IDS], -1)


def definition(model, tensors, features, newest, embed, head):
    """The published forward pass over a whole text at once: logits of the block's masks, [block - 1, v]."""
    shape, config = model.shape, model.config
    eps, dim, n = config.rms_norm_eps, config.head_dim, len(features)

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * tensors[f"{name}.weight"]

    def turned(x, positions):
        angles = positions[:, None] * 1e4 ** -(torch.arange(0, dim, 2) / dim)[None]
        cos, sin = (torch.cat([one, one], -1)[:, None] for one in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin

    context = norm(features @ tensors["fc.weight"].T, "hidden_norm")
    x = embed(torch.tensor([newest] + [MASK] * (BLOCK - 1))) * shape.embedding_scale
    positions = torch.arange(n + BLOCK)
    for number, (window, causal) in enumerate(zip(shape.windows, shape.causal, strict=True)):
        name = f"layers.{number}"
        weight = {part: tensors[f"{name}.self_attn.{part}_proj.weight"] for part in "qkvo"}
        read = torch.cat([context, own := norm(x, f"{name}.input_layernorm")])
        query, key, value = ((own if part == "q" else read) @ weight[part].T for part in "qkv")
        query, key, value = (one.unflatten(-1, (-1, dim)) for one in (query, key, value))
        query = turned(norm(query, f"{name}.self_attn.q_norm"), positions[n:])
        key = turned(norm(key, f"{name}.self_attn.k_norm"), positions)
        key, value = (one.repeat_interleave(2, 1) for one in (key, value))
        distance = positions[n:, None] - positions[None]
        seen = distance.abs() < (window or n + BLOCK)
        seen = seen & (distance >= 0) if causal else seen
        scores = torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, value).flatten(1) @ weight["o"].T
        gate, up, down = (tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        read = norm(x, f"{name}.post_attention_layernorm")
        x = x + (silu(read @ gate.T) * (read @ up.T)) @ down.T
    logits = head(norm(x, "norm")[1:]) * shape.logit_scale
    return logits if shape.logit_cap is None else (logits / shape.logit_cap).tanh() * shape.logit_cap


def levels_of(dec, prompt):
    heads, costs = dec.heads["dflash"], VerifyCosts(dec.target)
    context = DrafterContext(dec.target, heads, None, GREEDY, TokenSwiftOptions(), prompt, costs, 100, {})
    return BlockLevels(context, heads, width=VOCAB)


def seen(features):
    """A pass that has returned these features."""
    return PassOutput(features, None, {}, features)


def sampler_behind(text):
    return Sampler(GREEDY, VOCAB, torch.device("cpu"), text)


def assert_alike(levels, expected, ids=None, atol=1e-4):
    """The scores of levels are those logits, up to a constant; ``ids`` are the tokens of the logits' columns."""
    for level, logits in zip(levels, expected, strict=True):
        tokens, scores = zip(*level.rows[0], strict=True)
        columns = list(tokens) if ids is None else [ids.tolist().index(token) for token in tokens]
        scores = torch.tensor(scores, dtype=torch.float64)
        assert torch.allclose(scores.log_softmax(-1), logits.double()[columns].log_softmax(-1), atol=atol)


CASES = [
    ("z-lab", draft_model()),
    ("z-lab", draft_model(WINDOWS["mixed"])),
    ("z-lab", draft_model((5, 5), False, embedding_scale=3.0, logit_scale=0.5, logit_cap=4.0)),
    ("speculators", draft_model(WINDOWS["mixed"])),
]


@torch.no_grad()
def test_embeddings_and_logits_are_not_scaled_and_capped_as_the_models_are():
    changes = dict(num_hidden_layers=4, final_logit_softcapping=2.0, layer_types=["full_attention"] * 4, head_dim=8)
    target = tiny("gemma3_text", **changes)
    model, dec = draft_model(), Decoder(target, heads=draft_model())
    text, levels = list(range(20)), levels_of(dec, list(range(20)))
    levels.read_features(seen(features := torch.randn(19, 64).double()))
    with dec.target.patched():
        found = drafted_levels(levels, levels.state, sampler_behind(text), BLOCK - 1)
    weight = target.get_input_embeddings().weight
    assert_alike(found, definition(model, model.state_dict(), features, 19, weight.__getitem__, target.lm_head))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("layout", "model"), CASES, ids=["full", "mixed", "windows", "speculators"])
@torch.no_grad()
def test_drafts_are_those_of_the_definition(tmp_path, target_model, layout, model, dtype):
    """For the first block and later ones; entries come with the prompt's chunks and with paths through trees."""
    part = torch.arange(0, VOCAB, 3) if layout == "speculators" else None
    tensors = write(model, tmp_path, layout, part)
    dec = Decoder(deepcopy(target_model).to(dtype), heads=tmp_path)
    assert dec.target.feature_layers == LAYERS
    text = random_tokens(240, 0)
    features, embed = features_of(target_model, text), target_model.get_input_embeddings()
    head = target_model.lm_head if part is None else lambda state: state @ tensors["lm_head.weight"].T
    end, levels = 100, levels_of(dec, text[:100])
    for chunk in (slice(0, 7), slice(7, 90), slice(90, 99)):
        levels.read_features(seen(features[chunk].to(dtype)))
    for accepted in (0, 3, 1, 80, 20):
        if accepted:
            # What was rejected stands between the rows of the path.
            rows = torch.full((2 * accepted, features.shape[1]), 9.0, dtype=dtype)
            rows[::2] = features[end - 1 : end - 1 + accepted].to(dtype)
            levels.follow(seen(rows), list(range(0, 2 * accepted, 2)), text[end : end + accepted])
            end += accepted
        with dec.target.patched():
            found = drafted_levels(levels, levels.state, sampler_behind(text[:end]), BLOCK - 1)
        expected = definition(model, tensors, features[: end - 1], text[end - 1], embed, head)
        assert_alike(found, expected, part, 1e-4 if dtype == torch.float64 else 2e-3)


@torch.no_grad()
def test_the_engine_hands_over_the_features_of_each_text(target_model, monkeypatch):
    """Blocks of texts that are decoded together are the definition's, with transformers' states of each text so far."""
    model, asked, found = draft_model(WINDOWS["mixed"]), [], []
    dec, filling, read = Decoder(target_model, heads=model), BlockLevels.filling, BlockLevels.read

    def spied(levels, state, sampler, *args):
        asked.append(list(sampler.context))
        return filling(levels, state, sampler, *args)

    monkeypatch.setattr(BlockLevels, "filling", spied)
    monkeypatch.setattr(BlockLevels, "read", lambda *args: found.append(read(*args)) or found[-1])
    dec.generate_batch([list(range(40)) * 3, [3], list(range(7))], 16, "medusa", GREEDY, TREE)
    embed, head = target_model.get_input_embeddings(), target_model.lm_head
    assert len(asked) > 20
    for text, levels in zip(asked, found, strict=True):
        expected = definition(model, model.state_dict(), features_of(target_model, text[:-1]), text[-1], embed, head)
        assert_alike(levels, expected[: len(levels)])


RUNS = [
    ("medusa", TREE, GREEDY, "full", torch.float64),
    ("medusa", TREE, SAMPLED, "windows", torch.float64),
    ("medusa", None, SAMPLED, "mixed", torch.float32),
    ("tokenswift-fused", TokenSwiftOptions(tree=(2,) + (1,) * 8), SAMPLED, "mixed", torch.float32),
    ("auto", None, GREEDY, "windows", torch.float32),
    ("auto", None, SAMPLED, "full", torch.float64),
]


@pytest.mark.parametrize(("method", "options", "sampling", "windows", "dtype"), RUNS)
def test_the_text_is_that_of_plain_decoding(target_model, method, options, sampling, windows, dtype):
    dec = Decoder(deepcopy(target_model).to(dtype), heads=draft_model(WINDOWS[windows]), prefix_cache_bytes=1 << 22)
    prompts = [list(range(40)) * 2, [3], list(range(7))]
    single = [dec.generate(prompt, 30, "ar", sampling).token_ids for prompt in prompts]
    outputs = [dec.generate(prompt, 30, method, sampling, options) for prompt in prompts]
    assert [output.token_ids for output in outputs] == single
    if options is not None:  # costs measured on a busy machine may say that no draft pays
        assert all(sum(getattr(each.stats, name) for each in outputs) for name in ("drafted", "accepted"))
    batch = dec.generate_batch(prompts, 30, method, sampling, options)
    assert [output.token_ids for output in batch] == single
    assert dec.generate(prompts[0], 7, method, sampling, options).token_ids == single[0][:7]
    resumed = prompts[0] + single[0][:6]
    expected = dec.generate(resumed, 16, "ar", sampling).token_ids
    assert dec.generate(resumed, 16, method, sampling, options).token_ids == expected


def test_the_text_is_the_same_where_the_device_walks_the_tree(target_model, as_on_cuda):
    dec = Decoder(target_model, heads=draft_model(WINDOWS["windows"]))
    output = dec.generate(list(range(40)), 30, "medusa", SAMPLED, TREE)
    assert output.token_ids == dec.generate(list(range(40)), 30, "ar", SAMPLED).token_ids
    assert output.stats.accepted > 0


def test_a_kept_prefix_is_gone_on_from(target_model, monkeypatch):
    """Drafts behind a prefix that was taken over are those of the whole text."""
    dec, kept = Decoder(target_model, heads=draft_model(), prefix_cache_bytes=1 << 22), []
    begin, whole = BlockLevels.begin_with, Decoder(target_model, heads=draft_model())
    monkeypatch.setattr(BlockLevels, "begin_with", lambda levels, *args: kept.append(args) or begin(levels, *args))
    prompt = random_tokens(90, 2)
    longer = prompt + dec.generate(prompt, 20, "medusa", GREEDY, TREE).token_ids[:10]
    again, fresh = (each.generate(longer, 30, "medusa", GREEDY, TREE) for each in (dec, whole))
    assert kept[0][0] is not None and kept[0][1] > 80
    assert again.token_ids == fresh.token_ids and again.stats.accepted_by_depth == fresh.stats.accepted_by_depth


def test_a_preempted_text_is_read_again_from_its_beginning(monkeypatch):
    """Plans count the entries of all layers."""
    positions = 96
    dec = Decoder(tiny_llama(num_hidden_layers=4, max_position_embeddings=positions), heads=draft_model())
    entry = DraftLayerCache.entry_bytes(dec.heads["dflash"])
    assert entry == 2 * 2 * (8 + 8) * 8  # layers, heads, keys and values, bytes
    beside = dec.target.beside_bytes(positions) + DraftLayerCache.planned_bytes(dec.heads["dflash"], positions)
    room = dec.target.kv_bytes * 400 + 3 * beside  # of 480 positions, a draft cache of 64 for each included
    assert_preempted_as_alone(dec, room, TREE, monkeypatch)


def test_all_levels_cost_one_pass():
    """One level does not pay for the pass, all do; and none where they bring too little."""

    policy, tried = LevelPolicy(15, 15, at_once=True), set()

    def best_behind(steps, rate):
        """Verifications cost 1, blocks 1 and a hundredth for each level; a level adds ``rate`` of the one before."""
        for _ in range(steps):
            tokens = [sum(rate**level for level in range(number + 1)) for number in range(policy.levels + 1)]
            policy.observe([Expected(one, 1.0) for one in tokens], 1.0, policy.levels and 1 + 0.01 * policy.levels)
            tried.add(policy.levels)
        return policy.best

    assert best_behind(1000, 0.4) == 0
    assert best_behind(6000, 0.9) >= 7, "all are tried now and then, where none pay"
    assert best_behind(1000, 0.4) == 0 and tried <= {15, 7, 3, 1, 0}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_a_folder_is_recognised(tmp_path, target_model, layout, causal):
    """Layers with a window are causal unless the checkpoint says otherwise, and the others never are."""
    model = draft_model(WINDOWS["mixed"], None if causal else False)
    write(model, tmp_path, layout)
    assert kind_in(tmp_path) == "dflash"
    again = decoder.load_heads(tmp_path)
    assert again.shape == DFlashConfig(again.config, LAYERS, BLOCK, MASK, (5, None), (causal, False))
    assert again.base_model == ("some/model" if layout == "speculators" else None)
    assert Decoder(target_model, heads={"dflash": tmp_path}).heads.keys() == {"dflash"}


def _fields(**changes):
    return config_damaged(dflash_config={"mask_token_id": MASK, "target_layer_ids": IDS, **changes})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (tensors_damaged(lambda found: found.pop("norm.weight")), "lack tensors: norm.weight$"),
        (tensors_damaged(lambda found: found.update(strange=torch.ones(1))), "extra tensors: strange$"),
        (tensors_damaged(lambda found: found.update({"fc.weight": torch.ones(32, 96)})), r"\[32, 96\], not \[32, 64\]"),
        (tensors_damaged(lambda found: found["fc.weight"].fill_(torch.nan)), "finite"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "whole safetensors"),
        (_fields(target_layer_ids=[2, 0]), r"must ascend from 0 on, and are \[3, 1\]"),
        (_fields(mask_token_id=VOCAB), f"one of {VOCAB} tokens, got {VOCAB}"),
        (_fields(mask_token_id=None), "got None"),
        (_fields(projector_type="domino"), "its projector_type is domino"),
        (_fields(selector_rank=256), "its selector_rank is 256"),
        (config_damaged(block_size=1), "block_size must be an integer from 2"),
        (config_damaged(dflash_config={}), "unknown 'target_layer_ids'"),
        (config_damaged(hidden_act="relu"), "relu"),
        (config_damaged(layer_types=["sliding_attention"] * 2), "no sliding_window"),
        (config_damaged(num_hidden_layers=3), "2 layers of 3"),
        (config_damaged(hidden_size="32"), "hidden_size must be an integer of at least 1, got '32'"),
        (config_damaged(num_key_value_heads=3), "cannot share"),
        (config_damaged(rope_parameters={"rope_type": "strange"}), "unknown .strange."),
        (config_damaged(transformer_layer_config=None), "not of a draft model that can be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path, damage, words):
    write(draft_model(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=words) as refusal:
        decoder.load_heads(tmp_path)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_draft_model_of_another_model_is_refused(target_model):
    for overrides, words in (
        (dict(hidden_size=16, num_attention_heads=2), "is for hidden size 32, the model has 16"),
        (dict(vocab_size=VOCAB + 1), f"is for {VOCAB} tokens, the model has {VOCAB + 1}"),
        (dict(num_hidden_layers=2), "reads layer 3, the model has 2 layers"),
    ):
        with pytest.raises(ValueError, match=words):
            Decoder(tiny_llama(**overrides), heads=draft_model())
    both = {"eagle3": random_heads(target_model, kind="eagle3"), "dflash": draft_model()}
    with pytest.raises(ValueError, match="both read layers"):
        Decoder(target_model, heads=both)
