"""Built-in multi-token-prediction modules: read from the model's folder, equal to the definition, and lossless."""

import argparse
import json
import re
import shutil
from copy import deepcopy
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.base import PassOutput
from decoder.cache.draft_layer import DraftLayerCache
from decoder.cli.flags import add_loading_flags, load_from_flags
from decoder.drafters.base import DrafterContext
from decoder.drafters.layer_levels import LayerLevels
from decoder.drafters.levels import LevelsWanted, fill_together
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.heads_beside import heads_beside
from decoder.sampling.sampler import Sampler

from ..tiny import byte_tokenizer
from .conftest import VOCAB, assert_preempted_as_alone, drafted_levels, random_heads, random_tokens, some
from .recurrent_models import made
from .test_families import ROUTED, tiny

NAMED = ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"]
FAMILIES = [*NAMED, "deepseek_v3", "glm4_moe", "glm4_moe_lite"]
TREE = TokenSwiftOptions(tree=(2, 2, 1), budget=24, sink=4)


def norm_of(weight, centre, eps):
    """RMSNorm, statistics in float32 as these families have it; Qwen's weights are centred at zero."""

    def norm(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + centre)).to(x)

    return norm


def made_of(family):
    """As `made`, but with the experts that Qwen3-Next has in every layer, and GLM-4.5."""
    if family == "glm4_moe":
        return tiny("glm4_moe", **{**ROUTED, "head_dim": 8})
    return made(family, **{"decoder_sparse_step": 1} if family == "qwen3_next" else {})


class Definition:
    """The definition in the slowest way: for each level all entries anew, through transformers' own layer.

    Entry t reads the token t + 1 and the model's last hidden state t behind its final norm, or of drafts what came out
    of the module before: ``norm(layer(fc([norm(embedding); norm(state)])))``, as vLLM and transformers compute it.
    """

    def __init__(self, model, tensors):
        self.model, self.tensors = model, tensors
        names = [name for name in tensors if name.startswith("layer.")]
        # The last layer attends, and has experts if any has.
        self.layer = type(model.model.layers[-1])(model.config, len(model.model.layers) - 1).to(model.dtype)
        self.layer.load_state_dict({name.removeprefix("layer."): tensors[name] for name in names})
        centre = 1.0 if model.config.model_type.startswith("qwen") else 0.0
        self.norms = {
            part: norm_of(tensors[part], centre, model.config.rms_norm_eps) for part in ("enorm", "hnorm", "norm")
        }

    def logits(self, text, drafted):
        """Behind ``text`` and then behind each of the ``drafted`` tokens, [1 + drafts, V]."""
        model, found = self.model, []
        states = list(model.model(torch.tensor([text])).last_hidden_state[0, :-1])
        tokens = text[1:]
        for token in [*drafted, None]:
            embeddings = model.get_input_embeddings()(torch.tensor(tokens))
            joined = torch.cat((self.norms["enorm"](embeddings), self.norms["hnorm"](torch.stack(states))), -1)
            hidden = (joined @ self.tensors["fc"].T)[None]
            positions = torch.arange(len(tokens))[None]
            causal = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=hidden.dtype).triu(1)
            angles = model.model.rotary_emb(hidden, positions)
            out = self.layer(hidden, position_embeddings=angles, attention_mask=causal[None, None])[0, -1]
            states.append(self.norms["norm"](out))
            tokens = [*tokens, token]
            found.append(model.lm_head(states[-1]))
        return torch.stack(found)


def random_module(model):
    """Random weights of a module, by plain names; experts are those of transformers, one tensor for all."""
    generator, d = torch.Generator().manual_seed(9), model.config.hidden_size

    def random(like, scale):
        return (torch.randn(like, generator=generator) * scale).to(model.dtype)

    last = model.model.layers[-1].state_dict()
    tensors = {f"layer.{name}": random(one.shape, 0.3) for name, one in last.items()}
    return tensors | {"fc": random((d, 2 * d), 0.3)} | {part: random((d,), 0.3) for part in ("enorm", "hnorm", "norm")}


def published(family, tensors, layers):
    """The tensors under the names of published checkpoints, those of experts one by one."""
    if family in NAMED:
        prefix, layer = "mtp.", "mtp.layers.0."
        parts = dict(fc="fc", enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", norm="norm")
    else:
        prefix = layer = f"model.layers.{layers}."
        parts = dict(fc="eh_proj", enorm="enorm", hnorm="hnorm", norm="shared_head.norm")
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith("layer."):
            found[f"{prefix}{parts[name]}.weight"] = tensor
            continue
        name = name.removeprefix("layer.")
        if name.endswith("experts.gate_up_proj"):
            for expert, weight in enumerate(tensor):
                for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                    found[f"{layer}mlp.experts.{expert}.{part}_proj.weight"] = half.clone()
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(tensor):
                found[f"{layer}mlp.experts.{expert}.down_proj.weight"] = weight.clone()
        else:
            found[f"{layer}{name}"] = tensor
    return found


def add_module(folder, family, model):
    """Add a random module to the files of a model; returns its tensors."""
    tensors, file = random_module(model), folder / "model.safetensors"
    more = published(family, tensors, model.config.num_hidden_layers)
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return tensors


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """A family's name, its model's folder with a module inside, the model and the module's tensors."""
    folder = tmp_path_factory.mktemp("models") / request.param
    model = made_of(request.param)
    model.save_pretrained(folder)
    return request.param, folder, model, add_module(folder, request.param, model)


@pytest.fixture(scope="module")
def dec(saved):
    _, folder, model, _ = saved
    return Decoder(model, heads=folder)


def levels_of(dec, text, beam=1):
    heads, costs = dec.heads["mtp"], VerifyCosts(dec.target)
    context = DrafterContext(dec.target, heads, None, SamplingParams(), TokenSwiftOptions(), text, costs, 100, {})
    return LayerLevels(context, heads, width=VOCAB, beam=beam)


@torch.no_grad()
def test_the_definition_is_transformers_own(saved):
    """Its loader reads the published names, too."""
    theirs = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(theirs, "MtpModel"):
        pytest.skip("this transformers runs no such modules")
    _, folder, model, tensors = saved
    main = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", dtype=torch.float64)
    # What it knows of published models alone.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{len(main.model.layers)}.*", "^mtp.*"]
    main.config.num_mtp_layers, main.config.mtp_mlp_layer_types = 1, ["sparse"]
    main.config.mtp_layer_types = ["full_attention"]
    text = list(range(40))
    states = main.model(torch.tensor([text])).last_hidden_state[:, :-1]
    read = theirs.MtpModel.from_pretrained(main).to(torch.float64)
    out = read.forward_layer(0, states, torch.arange(1, 40)[None], None, input_ids=torch.tensor([text[1:]]))
    expected = Definition(model, tensors).logits(text, [])[0]
    assert torch.allclose(main.lm_head(out)[0, -1], expected, atol=1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-4), (torch.float32, 1e-3)], ids=["float64", "float32"])
@torch.no_grad()
def test_drafts_are_those_of_the_definition(saved, dec, dtype, atol):
    """In float32 the native library multiplies, where it is there."""
    _, folder, model, tensors = saved
    if dtype != model.dtype:
        dec = Decoder(deepcopy(model).to(dtype), heads=folder)
    text = random_tokens(130, 0)
    caught = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0][0]))
    model(torch.tensor([text]))
    hook.remove()
    seen = [PassOutput(caught[0][part], None, {}, None) for part in (slice(0, 7), slice(7, 90), slice(90, 99))]
    levels, definition = levels_of(dec, text[:100]), Definition(model, tensors)
    seen = [output._replace(hidden=output.hidden.to(dtype)) for output in seen]
    for part in seen:
        levels.read_features(part)
    before = 100
    for end in (100, 103, 104, 130):
        if end > before:
            new = PassOutput(caught[0][before - 1 : end - 1].to(dtype), None, {}, None)
            levels.follow(new, list(range(end - before)), text[before:end])
        before = end
        sampler = Sampler(SamplingParams(temperature=0), VOCAB, torch.device("cpu"), text[:end])
        with dec.target.patched():
            found = drafted_levels(levels, levels.state, sampler, 3)
        drafted = [level.rows[0][0][0] for level in found]
        for level, expected in zip(found, definition.logits(text[:end], drafted[:2]), strict=True):
            ids, scores = zip(*level.rows[0], strict=True)
            scores = torch.tensor(scores, dtype=torch.float64)
            assert torch.allclose(scores.log_softmax(-1), expected[list(ids)].log_softmax(-1), atol=atol)


@torch.no_grad()
def test_texts_draft_together_as_each_alone(saved, dec):
    """Branches of texts of several lengths are rows of the same products, each over its own entries."""
    texts = [random_tokens(count, count) for count in (9, 80)]
    found = {}

    def wanted(text, place):
        levels, states = levels_of(dec, text, beam=3), torch.Generator().manual_seed(len(text))
        hidden = torch.randn(len(text) - 1, 32, generator=states, dtype=torch.float64)
        levels.read_features(PassOutput(hidden, None, {}, None))
        sampler = Sampler(SamplingParams(temperature=0), VOCAB, torch.device("cpu"), text)
        return LevelsWanted(levels, levels.state, sampler, 4, False, lambda drafted, _: found.update({place: drafted}))

    for place, text in enumerate(texts):
        fill_together([wanted(text, place)])
    alone = dict(found)
    fill_together([wanted(text, place) for place, text in enumerate(texts)])
    for place in alone:
        for ours, expected in zip(found[place], alone[place], strict=True):
            assert ours.parents == expected.parents
            for row, other in zip(ours.rows, expected.rows, strict=True):
                assert [token for token, _ in row] == [token for token, _ in other]
                assert [score for _, score in row] == pytest.approx([score for _, score in other], abs=1e-5)


SAMPLED = SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.1, penalty_window=20, seed=5)
RUNS = [
    ("medusa", TREE, SamplingParams(temperature=0)),
    ("tokenswift-fused", TREE, SAMPLED),
    ("auto", None, SAMPLED),
]
# The first family runs all methods, each other one a method of its own.
EACH = [(name, *run) for i, name in enumerate(FAMILIES) for j, run in enumerate(RUNS) if not i or i % 3 == j]


@pytest.mark.parametrize(("saved", "method", "options", "sampling"), EACH, indirect=["saved"])
def test_the_text_is_that_of_plain_decoding(dec, method, options, sampling):
    prompts = [list(range(40)) * 2, [3]]
    single = [dec.generate(prompt, 16, "ar", sampling).token_ids for prompt in prompts]
    output = dec.generate(prompts[0], 16, method, sampling, options)
    assert output.token_ids == single[0] and output.stats.drafted > 0
    batch = dec.generate_batch(prompts, 16, method, sampling, options)
    assert [output.token_ids for output in batch] == single
    resumed = prompts[0] + single[0][:6]
    expected = dec.generate(resumed, 16, "ar", sampling).token_ids
    assert dec.generate(resumed, 16, method, sampling, options).token_ids == expected


@pytest.mark.parametrize("saved", ["deepseek_v3"], indirect=True)
def test_it_may_draft_a_part_of_the_vocabulary(saved):
    _, folder, model, _ = saved
    dec, sampling = Decoder(model, heads=folder), SamplingParams(temperature=0)
    dec.heads["mtp"].set_draft_vocabulary(torch.arange(0, VOCAB, 3))
    levels = levels_of(dec, list(range(20)))
    levels.read_features(PassOutput(torch.ones(19, 32, dtype=torch.float64), None, {}, None))
    sampler = Sampler(sampling, VOCAB, torch.device("cpu"), list(range(20)))
    with torch.no_grad():
        [level] = drafted_levels(levels, levels.state, sampler, 1)
    assert {token for token, _ in level.rows[0]} == set(range(0, VOCAB, 3))
    output = dec.generate(list(range(20)), 12, "medusa", sampling, TREE)
    assert output.token_ids == dec.generate(list(range(20)), 12, "ar", sampling).token_ids and output.stats.drafted


@pytest.mark.parametrize("saved", ["qwen3_5_text"], indirect=True)
def test_a_preempted_text_is_read_again_from_its_beginning(saved, monkeypatch):
    name, folder, *_ = saved
    positions = 96
    dec = Decoder(made(name, max_position_embeddings=positions), heads=folder)
    beside = dec.target.beside_bytes(positions) + DraftLayerCache.planned_bytes(dec.heads["mtp"], positions)
    room = dec.target.kv_bytes * 2 * (positions + 69) + 3 * beside
    assert_preempted_as_alone(dec, room, TREE, monkeypatch)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A model with a tokenizer, in two files."""
    folder = tmp_path_factory.mktemp("models") / "speaking"
    model = made("qwen3_5_text", vocab_size=256)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    add_module(folder, "qwen3_5_text", model)
    return folder


def test_commands_find_the_module_in_the_models_folder(speaking, tmp_path):
    method_of = dict.fromkeys(("medusa", "tokenswift-fused", "auto"), str(speaking))
    assert heads_beside(speaking) == method_of
    parser = argparse.ArgumentParser()
    add_loading_flags(parser)
    for flags in (["--dtype", "float64"], ["--heads", "mtp"]):  # the latter is float32, by the native library
        dec = load_from_flags(parser.parse_args(["--model", str(speaking), *flags]))
        assert list(dec.heads) == ["mtp"] and dec.report().endswith("draft heads: mtp")
        assert dec.generate("Once", 20).text == dec.generate("Once", 20, "ar").text
    assert list(Decoder(dec.model, heads="mtp").heads) == ["mtp"]
    beside = tmp_path / "speaking"
    beside.symlink_to(speaking)
    random_heads(dec.model, kind="gated").save_pretrained(tmp_path / "heads-speaking")
    assert heads_beside(beside)["auto"] == str(tmp_path / "heads-speaking"), "what lies beside comes first"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda found: found.pop("mtp.fc.weight"), "lack tensors: mtp.fc.weight$"),
        (lambda found: found.update({"mtp.strange": torch.ones(1)}), "extra tensors: mtp.strange$"),
        (
            lambda found: found.update({"mtp.fc.weight": torch.ones(32, 32)}),
            r"mtp.fc.weight .* \[32, 32\], not \[32, 64\]",
        ),
    ],
)
def test_what_cannot_be_read_is_told_once_and_decoded_without(speaking, tmp_path, caplog, damage, words):
    folder = tmp_path / "speaking"
    shutil.copytree(speaking, folder)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words) as refusal:
        decoder.load(folder, heads="mtp")
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)
    parser = argparse.ArgumentParser()
    add_loading_flags(parser)
    for _ in range(2):
        dec = load_from_flags(parser.parse_args(["--model", str(folder), "--dtype", "float64"]))
        assert not dec.heads and dec.generate("Once", 5).token_ids
    [told] = [record.message for record in caplog.records if "built-in" in record.message]
    assert re.search(words, told) and str(folder) in told


def test_models_without_a_module_say_so(tmp_path):
    made("qwen3_5_text").save_pretrained(tmp_path)
    assert heads_beside(tmp_path) == {}
    with pytest.raises(ValueError, match="no multi-token-prediction module"):
        decoder.heads.load_built_in(tmp_path)


@pytest.mark.parametrize("saved", ["qwen3_5_text"], indirect=True)
def test_a_module_of_another_model_is_refused(saved):
    name, folder, *_ = saved
    for other in (dict(hidden_size=40), dict(vocab_size=VOCAB + 1)):
        with pytest.raises(ValueError, match="are for a model of hidden size 32 and 48 tokens"):
            Decoder(made(name, **other), heads=folder)


def test_a_model_with_vision_around_it_has_its_module_beside(tmp_path):
    """Published Qwen3.5 checkpoints are like that: the language model's names and configuration are inside."""
    model = made("qwen3_5_text")
    model.save_pretrained(tmp_path)
    tensors = add_module(tmp_path, "qwen3_5_text", model)
    config = json.loads((tmp_path / "config.json").read_text())
    around = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(around))
    module = decoder.load_heads(tmp_path)
    assert torch.equal(module.fc.weight, tensors["fc"]) and module.config.model_type == "qwen3_5_text"


@pytest.mark.parametrize(
    ("saved", "method"),
    some(
        product(("qwen3_5_text", "deepseek_v3"), ("medusa", "auto")),
        [("qwen3_5_text", "medusa"), ("deepseek_v3", "auto")],
    ),
    indirect=["saved"],
)
def test_a_kept_beginning_is_gone_on_from(saved, dec, method):
    """The module's entries are those of a fresh text, so that it drafts as well behind what is taken over."""
    reusing, sampling = Decoder(dec.model, heads=dec.heads, prefix_cache_bytes=2**24), SAMPLED
    text = list(range(40)) * 2
    options = TREE if method == "medusa" else None
    whole = dec.generate(text, 16, "ar", sampling).token_ids
    first = reusing.generate(text, 16, method, sampling, options)
    assert first.token_ids == whole and not first.stats.reused_tokens
    for given in (text + whole, text, [*text[:70], 1, 2, 3, 4]):
        fresh, out = (one.generate(given, 16, method, sampling, options) for one in (dec, reusing))
        assert out.token_ids == fresh.token_ids and out.stats.reused_tokens >= 48
        if method == "medusa":
            assert out.stats.accepted_by_depth == fresh.stats.accepted_by_depth
    # What no module has followed is read anew for it, and for others taken over.
    other = [*reversed(range(48))]
    for method_then, reused in (("ar", False), (method, False), (method, True), ("ar", True)):
        out = reusing.generate(other, 16, method_then, sampling)
        assert bool(out.stats.reused_tokens) == reused
        assert out.token_ids == dec.generate(other, 16, "ar", sampling).token_ids


@pytest.mark.parametrize("saved", ["qwen3_5_text"], indirect=True)
def test_entries_that_were_taken_over_are_those_that_would_be_computed(saved, dec):
    text = random_tokens(60, 3)
    states = torch.randn(59, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def seen(part):
        return PassOutput(states[part], None, {}, None)

    whole, earlier, later = levels_of(dec, text), levels_of(dec, text[:50] + [1] * 10), levels_of(dec, text)
    whole.read_features(seen(slice(0, 59)))
    earlier.read_features(seen(slice(0, 59)))
    later.read_features(seen(slice(0, 20)))  # of what was not confirmed
    later.begin_with(earlier.kept(59), 49)
    later.read_features(seen(slice(49, 59)))
    sampler = Sampler(SamplingParams(temperature=0), VOCAB, torch.device("cpu"), text)
    for ours, expected in zip(*(drafted_levels(one, one.state, sampler, 3) for one in (later, whole)), strict=True):
        assert [token for token, _ in ours.rows[0]] == [token for token, _ in expected.rows[0]]
        scores = ([score for _, score in one.rows[0]] for one in (ours, expected))
        assert next(scores) == pytest.approx(next(scores), abs=1e-6)
