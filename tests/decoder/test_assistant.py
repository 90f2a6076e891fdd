"""Gemma 4's assistants: drafts are those of transformers' model, read the cache of the target, and change no text."""

import json
from copy import deepcopy

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Gemma4TextConfig

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.native import library as native
from decoder.backends.native.quantised import QuantisedLinear
from decoder.cache.full import FullCache
from decoder.cache.layout import FULL
from decoder.drafters.assistant_levels import AssistantLevels
from decoder.drafters.base import DrafterContext
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.heads import kind_in
from decoder.heads_beside import heads_beside
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree

from .conftest import (
    VOCAB,
    assert_preempted_as_alone,
    config_damaged,
    drafted_levels,
    random_tokens,
    tensors_damaged,
    tiny_llama,
)
from .test_families import tiny
from .test_windows import FAMILIES

WINDOW = FAMILIES["gemma4_text"][1]["sliding_window"]
TREE = TokenSwiftOptions(tree=(3, 2, 1, 1))
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.1, penalty_window=20, seed=5)
CLUSTERS = dict(use_ordered_embeddings=True, num_centroids=6, centroid_intermediate_top_k=2)


def target_like(name, **changes):
    model_type, overrides = FAMILIES[name]
    return tiny(model_type, **{**overrides, **changes})


@pytest.fixture(scope="module", autouse=True)
def transformers_makes_assistants():
    """Release 5.23 refuses its own, since none of an assistant's layers has keys that the others could share."""
    modes = Gemma4TextConfig.kv_sharing_modes

    def of_all(config):
        own = config.num_hidden_layers
        return ["reuse"] * own if config.num_kv_shared_layers == own else modes.fget(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(of_all))
        yield


@pytest.fixture(scope="module", params=["gemma4_text", "gemma4_text, experts"])
def target_model(request):
    """Keys and values of the last layers are shared, or each layer has its own."""
    return target_like(request.param)


@pytest.fixture(scope="module")
def shared_model():
    return target_like("gemma4_text")


def random_assistant(target, model_type="gemma4_assistant", sizes=None, **changes):
    """transformers' model, its weights spread so that its drafts are right now and then."""
    config = target.config
    text = dict(
        model_type="gemma4_text",
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=config.sliding_window,
        num_key_value_heads=config.per_layer_config["sliding_attention"].num_key_value_heads,
        num_global_key_value_heads=1,
        attention_k_eq_v=config.attention_k_eq_v,
        head_dim=config.per_layer_config["sliding_attention"].head_dim,
        global_head_dim=config.per_layer_config["full_attention"].head_dim,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=3,
    )
    text |= sizes or {}
    if config.rope_parameters:
        text["rope_parameters"] = config.rope_parameters
    config = AutoConfig.for_model(
        model_type, text_config=text, backbone_hidden_size=target.config.hidden_size, **changes
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.4 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.tie_weights()
    return model.to(target.dtype).requires_grad_(False)


@pytest.fixture(scope="module", params=["all tokens", "clusters"])
def assistant(request, target_model, tmp_path_factory):
    """The model of transformers, and its folder."""
    model = random_assistant(target_model, **(CLUSTERS if request.param == "clusters" else {}))
    folder = tmp_path_factory.mktemp("assistants") / "a"
    model.save_pretrained(folder)
    return model, folder


def theirs(target, assistant, text, drafted):
    """Logits [1 + drafts, V] behind ``text`` and behind each of the ``drafted`` tokens, as transformers generates.

    Its assistants are handed the model's keys and values. Of windows these are those that the newest token sees.
    """
    cache, found = DynamicCache(), []
    state = target.model(torch.tensor([text[:-1]]), past_key_values=cache).last_hidden_state[:, -1:]
    pairs = {}
    for layer, held in zip(target.model.layers, cache.layers, strict=False):  # those that share keep nothing
        pairs[layer.self_attn.layer_type] = held.keys, held.values
    pairs["sliding_attention"] = tuple(one[:, :, -(WINDOW - 1) :] for one in pairs["sliding_attention"])
    for token in [text[-1], *drafted]:
        read = torch.cat((target.get_input_embeddings()(torch.tensor([[token]])), state), -1)
        positions = torch.tensor([[len(text) - 1]])
        output = assistant(inputs_embeds=read, position_ids=positions, shared_kv_states=pairs)
        state = output.last_hidden_state
        found.append(output.logits[0, 0])
    return torch.stack(found)


def levels_behind(dec, text, beam=1, width=VOCAB):
    """Levels of ``text``, an empty cache and a sampler: nothing is drafted before a pass was seen."""
    cache, heads = FullCache(200), dec.heads["assistant"]
    context = DrafterContext(
        dec.target, heads, None, GREEDY, TokenSwiftOptions(), text, VerifyCosts(dec.target), 100, {}
    )
    levels = AssistantLevels(context, heads, width=width, beam=beam)
    sampler = Sampler(GREEDY, VOCAB, torch.device("cpu"), text)
    assert levels.state_behind(cache, sampler) is None
    return levels, cache, sampler


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@torch.no_grad()
def test_drafts_are_those_of_transformers(target_model, assistant, dtype):
    model, folder = assistant
    dec = Decoder(deepcopy(target_model).to(dtype), heads=folder)
    text = random_tokens(60, 0)
    levels, cache, sampler = levels_behind(dec, text)
    with dec.target.patched():
        dec.target.prefill(text[:50], cache)
        tree = TokenTree(text[50])
        tree.add(0, (text[51] + 1) % VOCAB, "heads")
        node = tree.add(0, text[51], "heads")
        assert node == 2  # what was rejected stands before it
        [seen] = dec.target.forward([tree], [cache])
        cache.keep([0, node])
        levels.follow(seen, [0, node], text[51:53])
        sampler = Sampler(GREEDY, VOCAB, torch.device("cpu"), text[:53])
        found = drafted_levels(levels, levels.state_behind(cache, sampler), sampler, 4)
    drafted = [level.rows[0][0][0] for level in found]
    expected = theirs(target_model, model, text[:53], drafted[:-1])
    for level, logits in zip(found, expected, strict=True):
        tokens, scores = zip(*level.rows[0], strict=True)
        if model.masked_embedding is not None:
            assert len(tokens) == VOCAB // 3 and set(tokens) == {*logits.topk(VOCAB // 3).indices.tolist()}
        scores = torch.tensor(scores, dtype=torch.float64)
        expected = logits[list(tokens)].double().log_softmax(-1)
        assert torch.allclose(scores.log_softmax(-1), expected, atol=1e-4 if dtype == torch.float64 else 2e-3)


SHARED, ALONE = "gemma4_text", "gemma4_text, experts"
RUNS = [
    (SHARED, CLUSTERS, "medusa", TREE, GREEDY, torch.float64),
    (ALONE, {}, "medusa", None, SAMPLED, torch.float32),
    (ALONE, CLUSTERS, "tokenswift-fused", TokenSwiftOptions(tree=(2,) + (1,) * 8), SAMPLED, torch.float32),
    (SHARED, {}, "auto", None, GREEDY, torch.float32),
    (SHARED, CLUSTERS, "auto", TokenSwiftOptions(kv_dtype="int8"), SAMPLED, torch.float32),
]


@pytest.mark.parametrize(("name", "changes", "method", "options", "sampling", "dtype"), RUNS)
def test_the_text_is_that_of_plain_decoding(tmp_path, name, changes, method, options, sampling, dtype):
    target = target_like(name)
    random_assistant(target, **changes).save_pretrained(tmp_path)
    dec = Decoder(target.to(dtype), heads=tmp_path, prefix_cache_bytes=1 << 22)
    prompts = [list(range(40)), [3], list(range(7))]
    plain = TokenSwiftOptions(kv_dtype=options.kv_dtype) if options else None
    single = [dec.generate(prompt, 24, "ar", sampling, plain).token_ids for prompt in prompts]
    outputs = [dec.generate(prompt, 24, method, sampling, options) for prompt in prompts]
    assert [output.token_ids for output in outputs] == single
    if options is not None and options.tree is not None:  # costs measured on a busy machine may say that no draft pays
        assert all(sum(getattr(each.stats, name) for each in outputs) for name in ("drafted", "accepted"))
    assert [output.token_ids for output in dec.generate_batch(prompts, 24, method, sampling, options)] == single
    resumed = prompts[0] + single[0][:6]
    expected = dec.generate(resumed, 12, "ar", sampling, plain).token_ids
    assert dec.generate(resumed, 12, method, sampling, options).token_ids == expected


@torch.no_grad()
def test_texts_that_are_decoded_together_draft_as_alone(target_model, assistant, monkeypatch):
    """Each attends to its own cache, also where they stand at different levels and lengths."""
    model, folder = assistant
    asked, found, filling, read = [], [], AssistantLevels.filling, AssistantLevels.read

    def spied(levels, state, sampler, *args):
        asked.append(list(sampler.context))
        return filling(levels, state, sampler, *args)

    monkeypatch.setattr(AssistantLevels, "filling", spied)
    monkeypatch.setattr(AssistantLevels, "read", lambda *args: found.append(read(*args)) or found[-1])
    Decoder(target_model, heads=folder).generate_batch(
        [list(range(40)), [3], list(range(7))], 12, "medusa", GREEDY, TokenSwiftOptions(tree=(2, 1, 1))
    )
    assert len(asked) > 15
    for text, levels in zip(asked, found, strict=True):
        drafted = [level.rows[0][0][0] for level in levels]
        for level, logits in zip(levels, theirs(target_model, model, text, drafted[:-1]), strict=True):
            best = logits.topk(len(level.rows[0])).indices.tolist()
            assert [token for token, _ in level.rows[0]] == best


@torch.no_grad()
def test_branches_go_on_from_their_own_states(shared_model, tmp_path):
    """Rows of a level behind several branches are those behind each by itself."""
    model = random_assistant(shared_model, **CLUSTERS)
    model.save_pretrained(tmp_path)
    dec, text = Decoder(shared_model, heads=tmp_path), random_tokens(30, 1)
    levels, cache, sampler = levels_behind(dec, text, beam=3, width=4)
    with dec.target.patched():
        dec.target.prefill(text[:-2], cache)
        [seen] = dec.target.forward([TokenTree(text[-2])], [cache])
        cache.keep([0])
        levels.follow(seen, [0], text[-1:])
        found = drafted_levels(levels, levels.state_behind(cache, sampler), sampler, 3)
    candidates = [(token,) for token, _ in found[0].rows[0]]
    for level in found[1:]:
        assert len(level.rows) == len(level.parents) == 3
        branches = [candidates[parent] for parent in level.parents]
        for branch, row in zip(branches, level.rows, strict=True):
            logits = theirs(shared_model, model, text, branch)[-1]
            assert [token for token, _ in row] == logits.topk(4).indices.tolist()
        candidates = [(*branch, token) for branch, row in zip(branches, level.rows, strict=True) for token, _ in row]


def test_a_preempted_text_is_gone_on_with(monkeypatch, tmp_path):
    """Nothing is kept of a text beside the model's own cache."""
    positions = 96
    target = target_like("gemma4_text", max_position_embeddings=positions)
    random_assistant(target).save_pretrained(tmp_path)
    dec = Decoder(target, heads=tmp_path)
    room = dec.target.kv_bytes * 220 + 3 * dec.target.beside_bytes(positions)
    assert_preempted_as_alone(dec, room, TREE, monkeypatch)


def test_the_text_is_the_same_where_the_device_walks_the_tree(shared_model, tmp_path, as_on_cuda):
    random_assistant(shared_model).save_pretrained(tmp_path)
    dec = Decoder(shared_model, heads=tmp_path)
    output = dec.generate(list(range(40)), 30, "medusa", SAMPLED, TREE)
    assert output.token_ids == dec.generate(list(range(40)), 30, "ar", SAMPLED).token_ids
    assert output.stats.accepted > 0


@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_a_folder_is_recognised(tmp_path, shared_model, model_type):
    folder = tmp_path / "a"
    random_assistant(shared_model).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if model_type != config["model_type"]:
        config["text_config"]["model_type"] = "gemma4_unified_text"
        (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    assert kind_in(folder) == "assistant"
    again = decoder.load_heads(folder)
    assert again.kind == "assistant" and again.source == str(folder)
    assert [kind.size for kind in again.layer_kinds] == [WINDOW, WINDOW, 0] and again.layer_kinds[-1] == FULL
    assert Decoder(shared_model, heads={"assistant": folder}).heads.keys() == {"assistant"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (tensors_damaged(lambda found: found.pop("pre_projection.weight")), "lack tensors: pre_projection.weight$"),
        (tensors_damaged(lambda found: found.update(strange=torch.ones(1))), "extra tensors: strange$"),
        (tensors_damaged(lambda found: found["model.norm.weight"].fill_(torch.nan)), "finite"),
        (
            tensors_damaged(lambda found: found["masked_embedding.token_ordering"].fill_(3)),
            "each token once$",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "whole safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors"),
        (config_damaged(num_centroids=7), "48 tokens cannot be told apart by the best 2 of 7 centroids"),
        (config_damaged(centroid_intermediate_top_k=9), "best 9 of 6"),
        (config_damaged(backbone_hidden_size="32"), "backbone_hidden_size"),
        (config_damaged(text_config=None), "not of an assistant that can be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path, shared_model, damage, words):
    random_assistant(shared_model, **CLUSTERS).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, OSError), match=words) as refusal:
        decoder.load_heads(tmp_path)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_assistant_of_another_model_is_refused(tmp_path, shared_model):
    random_assistant(shared_model).save_pretrained(tmp_path)
    for model, words in (
        (tiny_llama(hidden_size=64), "is for a model of hidden size 32 and 48 tokens"),
        (tiny_llama(), f"reads a sliding window of {WINDOW} tokens, of which the model keeps nothing"),
        (
            tiny("gemma4_text", **{**FAMILIES["gemma4_text"][1], "global_head_dim": 8}),
            "4 heads of 16 for .* 2 of 8: give",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            Decoder(model, heads=tmp_path)


def test_the_folder_beside_the_model_is_taken(tmp_path, shared_model):
    """As both are published: NAME, and NAME-assistant beside it."""
    model, assistant = tmp_path / "gemma", tmp_path / "gemma-assistant"
    shared_model.save_pretrained(model)
    assert heads_beside(model) == {}
    random_assistant(shared_model).save_pretrained(assistant)
    assert heads_beside(model) == dict.fromkeys(("auto", "tokenswift-fused", "medusa"), str(assistant))


def test_an_assistant_is_no_model(tmp_path, shared_model):
    random_assistant(shared_model).save_pretrained(tmp_path / "a")
    shared_model.save_pretrained(tmp_path / "gemma")
    for arguments in (dict(model=tmp_path / "a"), dict(model=tmp_path / "gemma", draft_model=tmp_path / "a")):
        with pytest.raises(
            ValueError, match=r"a cannot be used: it is an assistant, .* give that one, and this as its"
        ):
            decoder.load(**arguments, tokenizer=False)


def write_file(path, model, kind="F32", **changes):
    """A GGUF file of an assistant, with llama.cpp's names."""
    text, tensors = model.config.get_text_config(), {name: one.float() for name, one in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    keys = {
        "context_length": 128,
        "block_count": 3,
        "nextn_predict_layers": 3,
        "embedding_length": text.hidden_size,
        "embedding_length_out": model.config.backbone_hidden_size,
        "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads,
        "attention.shared_kv_layers": 3,
        "attention.key_length": text.per_layer_config["full_attention"].head_dim,
        "attention.key_length_swa": text.per_layer_config["sliding_attention"].head_dim,
        "attention.sliding_window": text.sliding_window,
        "rope.dimension_count": text.per_layer_config["full_attention"].head_dim,
        **changes,
    }
    for key, value in keys.items():
        if value is not None:
            writer.add_uint32(f"gemma4-assistant.{key}", value)
    writer.add_array("gemma4-assistant.attention.sliding_window_pattern", [True, True, False])
    writer.add_array("gemma4-assistant.attention.head_count_kv", [2, 2, 1])
    writer.add_float32("gemma4-assistant.attention.layer_norm_rms_epsilon", text.rms_norm_eps)
    writer.add_float32("gemma4-assistant.rope.freq_base", 1e6)
    writer.add_float32("gemma4-assistant.rope.freq_base_swa", 1e4)
    size = text.per_layer_config["full_attention"].head_dim // 2
    turned = int(size * 0.25)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (size - turned), np.float32))
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "pre_projection.weight": "nextn.pre_projection.weight",
        "post_projection.weight": "nextn.post_projection.weight",
    }
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            continue
        theirs = outside.get(name)
        if theirs is None:
            _, _, number, own = name.split(".", 3)
            stem = own.removesuffix(".weight")
            theirs = f"blk.{number}.{names.get(stem, 'layer_output_scale')}.weight"
        numbers = tensor.numpy()
        if kind != "F32" and numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
            made = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(theirs, gguf.quants.quantize(numbers, made), raw_dtype=made)
        else:
            writer.add_tensor(theirs, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def float_model():
    """Whose rotary embeddings are those of published models, and whose sizes are whole blocks."""
    return target_like("gemma4_text", rope_parameters=None).float()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@torch.no_grad()
def test_a_file_is_read_as_its_folder(tmp_path, float_model, kind):
    model = random_assistant(float_model, sizes=dict(hidden_size=32, intermediate_size=64)).float()
    model.save_pretrained(tmp_path / "a")
    write_file(tmp_path / "a.gguf", model, kind)
    assert kind_in(tmp_path / "a.gguf") == "assistant"
    text, found = random_tokens(40, 2), []
    for source in (tmp_path / "a", tmp_path / "a.gguf"):
        dec = Decoder(float_model, heads=source)
        levels, cache, sampler = levels_behind(dec, text)
        with dec.target.patched():
            dec.target.prefill(text[:-2], cache)
            [seen] = dec.target.forward([TokenTree(text[-2])], [cache])
            cache.keep([0])
            levels.follow(seen, [0], text[-1:])
            found.append(drafted_levels(levels, levels.state_behind(cache, sampler), sampler, 2))
    for of_folder, of_file in zip(*found, strict=True):
        scores = [torch.tensor([score for _, score in sorted(level.rows[0])]) for level in (of_folder, of_file)]
        assert torch.allclose(*(one.log_softmax(-1) for one in scores), atol=1e-3 if kind == "F32" else 0.2)
        if kind != "F32":
            break  # what was drafted may be another token
    quantised = any(isinstance(one, QuantisedLinear) for one in dec.heads["assistant"].modules())
    assert quantised == (kind != "F32" and native.available())
    plain = dec.generate(text, 20, "ar", SAMPLED)
    assert dec.generate(text, 20, "medusa", SAMPLED, TREE).token_ids == plain.token_ids


def test_bad_files_are_refused_in_a_sentence(tmp_path, float_model):
    model = random_assistant(float_model)
    write_file(tmp_path / "a.gguf", model, embedding_length_out=None)
    with pytest.raises(ValueError, match=r"a\.gguf has no gemma4-assistant\.embedding_length_out"):
        decoder.load_heads(tmp_path / "a.gguf")
    write_file(tmp_path / "b.gguf", model, feed_forward_length=48)
    with pytest.raises(ValueError, match=r"the assistant in .*b\.gguf has shape"):
        decoder.load_heads(tmp_path / "b.gguf")
    write_file(tmp_path / "c.gguf", model)
    with pytest.raises(ValueError, match=r"c\.gguf cannot be used: it is an assistant"):
        decoder.load(tmp_path / "c.gguf")
