"""EAGLE-3's draft model: its drafts, its cache of the text, and its checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.base import PassOutput
from decoder.drafters.base import DrafterContext
from decoder.drafters.layer_levels import LayerLevels
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.eagle3.checkpoint import save_draft_model
from decoder.eagle3.config import Eagle3Config, default_layers
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.sampling.sampler import Sampler

from .conftest import VOCAB, drafted_levels, random_heads, random_tokens, tiny_llama
from .recurrent_models import LATENTS
from .test_families import tiny
from .test_windows import FAMILIES as WINDOWED

LAYERS = (1, 2, 4)
TREE = TokenSwiftOptions(tree=(3, 2, 2, 1))


def draft_model(window=None, own_head=False, seed=3, **changes):
    """Random weights, whose drafts of a text that repeats itself are right now and then."""
    torch.manual_seed(seed)
    settings = dict(
        target_hidden_size=32,
        hidden_size=32,
        intermediate_size=48,
        attention_heads=4,
        kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        target_layers=LAYERS,
        sliding_window=window,
    )
    chosen = torch.arange(0, VOCAB, 2) if own_head else None
    return Eagle3DraftModel(Eagle3Config(**{**settings, **changes}), chosen, own_head=own_head).double()


@pytest.fixture(scope="module")
def target_model():
    return tiny_llama(num_hidden_layers=4)


def features_of(model, ids):
    """What transformers says the layers read, [n, layers x d]."""
    caught = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0][0]))
    hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    # The last of transformers' hidden states is behind the norm.
    inputs = [*(state[0] for state in hidden[:-1]), caught[0]]
    return torch.cat([inputs[layer] for layer in LAYERS], -1)


def seen(features):
    """A pass that has returned these features."""
    return PassOutput(features, None, {}, features)


def levels_of(dec, prompt, beam=1):
    heads = dec.heads["eagle3"]
    context = DrafterContext(
        dec.target, heads, None, SamplingParams(), TokenSwiftOptions(), prompt, VerifyCosts(dec.target), 100, {}
    )
    return LayerLevels(context, heads, width=VOCAB // 2, beam=beam)


@pytest.mark.parametrize("window", [None, 5, 300])
@torch.no_grad()
def test_decoding_drafts_what_training_computes(target_model, window):
    """The referee is the training-time test over the whole text at once, with transformers' own hidden states."""
    dec = Decoder(target_model, heads=draft_model(window))
    heads = dec.heads["eagle3"]
    text = random_tokens(640, 0)
    features, embed = features_of(target_model, text), target_model.get_input_embeddings()
    prompt, levels = text[:600], levels_of(dec, text[:600])
    for part in (slice(0, 7), slice(7, 580), slice(580, 599)):
        levels.read_features(seen(features[part]))
    end = len(prompt)
    for accepted in (0, 3, 1, 16, 20):
        if accepted:
            new = slice(end - 1, end - 1 + accepted)
            levels.follow(seen(features[new]), list(range(accepted)), text[end : end + accepted])
            end += accepted
        sampler = Sampler(SamplingParams(temperature=0), VOCAB, torch.device("cpu"), text[:end])
        found = drafted_levels(levels, levels.state, sampler, 3)
        drafted = [level.rows[0][0][0] for level in found]
        tokens = [*text[1:end], *drafted]
        ahead = torch.stack([embed(torch.tensor(tokens[i : i + end - 1])) for i in range(3)], 1)
        expected = heads(features[None, : end - 1], ahead[None])
        for level, state in zip(found, expected, strict=True):
            logits = target_model.lm_head(state[0, -1])
            scores = torch.tensor([score for _, score in level.rows[0]], dtype=torch.float64)
            ids = torch.tensor([token for token, _ in level.rows[0]])
            log_probs = logits.log_softmax(-1)[ids]
            assert torch.allclose(scores.log_softmax(-1), log_probs.log_softmax(-1), atol=1e-9)


@torch.no_grad()
def test_a_branch_is_drafted_as_a_chain_of_its_own(target_model):
    dec = Decoder(target_model, heads=draft_model(window=9))
    text = random_tokens(40, 1)
    features = features_of(target_model, text)
    sampler = Sampler(SamplingParams(temperature=0), VOCAB, torch.device("cpu"), text)

    def scores_behind(branches):
        """The logits behind each of some branches of equal length, drafted together."""
        levels = levels_of(dec, text)
        levels.read_features(seen(features[:-1]))
        state, newest = levels.state, sampler.draft_context().newest()
        for depth in range(len(branches[0]) + 1):
            if depth:
                ends = sorted({tuple(branch[:depth]) for branch in branches})
                starts = sorted({end[:-1] for end in ends})
                state = state.index_select(0, torch.tensor([starts.index(end[:-1]) for end in ends]))
                newest = torch.tensor([end[-1] for end in ends])
            advancing = levels._advance(depth, state, newest)
            product = next(advancing)
            while True:
                try:
                    product = advancing.send(product.together([product])[0])
                except StopIteration as done:
                    state, logits = done.value
                    break
        return dict(zip(ends, logits, strict=True))

    branches = [(1, 5, 9), (1, 5, 10), (1, 6, 9), (2, 6, 9), (40, 41, 42)]
    together = scores_behind(branches)
    for branch in branches:
        assert torch.allclose(together[branch], scores_behind([branch])[branch], atol=1e-9)


@pytest.mark.parametrize(
    "method, options, window", [("eagle3", TREE, None), ("eagle3", TREE, 6), ("eagle3", None, 6), ("auto", None, None)]
)
def test_the_text_is_that_of_plain_decoding(target_model, method, options, window):
    dec = Decoder(target_model, heads=draft_model(window, own_head=window is not None))
    sampling = SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.1, penalty_window=20, seed=5)
    prompts = [list(range(40)) * 2, [3], list(range(7))]
    single = [dec.generate(prompt, 30, "ar", sampling).token_ids for prompt in prompts]
    outputs = [dec.generate(prompt, 30, method, sampling, options) for prompt in prompts]
    assert [output.token_ids for output in outputs] == single
    # Without a given tree, costs measured on a busy machine may say that no draft pays.
    assert options is None or sum(output.stats.drafted for output in outputs) > 0
    batch = dec.generate_batch(prompts, 30, method, sampling, options)
    assert [output.token_ids for output in batch] == single


def test_the_text_is_the_same_where_the_device_walks_the_tree(target_model, as_on_cuda):
    dec = Decoder(target_model, heads=draft_model(window=6))
    sampling = SamplingParams(temperature=0.8, repetition_penalty=1.1, penalty_window=20, seed=5)
    prompt = list(range(40))
    output = dec.generate(prompt, 30, "eagle3", sampling, TREE)
    assert output.token_ids == dec.generate(prompt, 30, "ar", sampling).token_ids
    assert output.stats.accepted > 0


def test_a_tree_deeper_than_the_levels_trained_keeps_its_shape(target_model):
    """The one layer fills any number of levels, each as wide as the tree asks for."""
    dec = Decoder(target_model, heads=draft_model())
    nodes = []
    for last in (1, 3):
        tree = (1,) * dec.heads["eagle3"].num_heads + (last,)
        stats = dec.generate(list(range(40)), 30, "eagle3", SamplingParams(seed=1), TokenSwiftOptions(tree=tree)).stats
        nodes.append(stats.nodes / stats.steps)
    # Two more in each step, but for the first one and those near the end of the text.
    assert nodes[1] > nodes[0] + 1


def test_counts_and_sources_name_the_heads(target_model):
    dec = Decoder(target_model, heads=draft_model())
    stats = dec.generate(list(range(40)), 30, "eagle3", SamplingParams(seed=1), TREE).stats
    assert stats.tokens_per_step > 1 and set(stats.accepted_by_source) == {"heads"}


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
@pytest.mark.parametrize("window", [None, 7])
def test_a_checkpoint_of_either_layout_is_read_again(tmp_path, target_model, layout, window):
    model = draft_model(window, own_head=True)
    model.base_model = "some/model"
    save_draft_model(model, tmp_path, layout=layout, training={"steps": 3})
    again = decoder.load_heads(tmp_path)
    assert again.config == model.config and again.base_model == "some/model"
    assert torch.equal(again.draft_to_target, model.draft_to_target)
    states, tokens = torch.randn(2, 9, 96).double(), torch.randn(2, 9, 3, 32).double()
    for ours, theirs in zip(model(states, tokens), again(states, tokens), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert Decoder(target_model, heads=tmp_path).heads.keys() == {"eagle3"}
    assert decoder.load_heads(tmp_path).kind == "eagle3"


def test_sglang_names_the_layers_by_their_outputs(tmp_path):
    """Input of layer i is output of layer i - 1, and SGLang's configuration numbers outputs."""
    save_draft_model(draft_model(own_head=True), tmp_path, layout="eagle3")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in LAYERS]
    assert any(name.startswith("midlayer.") for name in load_file(tmp_path / "model.safetensors"))


def test_a_pickled_checkpoint_of_the_first_authors(tmp_path):
    """Without layers' numbers, with `d2t` as offsets, and with the target's embeddings among the tensors."""
    save_draft_model(draft_model(own_head=True), tmp_path, layout="eagle3")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [id - index for index, id in enumerate(range(0, VOCAB, 2))]
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 32).double()
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_config"], config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = decoder.load_heads(tmp_path)
    assert model.embed_tokens is not None and model.config.target_layers is None
    model.check_fits(32, VOCAB, layers=12)
    assert model.target_layers == default_layers(12) == (2, 6, 9)


class _Harmful:
    def __reduce__(self):
        return print, ("ran",)


def _with(tmp_path, **changes):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))


def _pickled(tmp_path, content):
    (tmp_path / "model.safetensors").unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")


def _retensored(tmp_path, change):
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: _with(path, num_hidden_layers=2), "2 layers"),
        (lambda path: _with(path, hidden_act="relu"), "relu"),
        (lambda path: _with(path, intermediate_size=99), "shape"),
        (lambda path: _retensored(path, lambda found: found.pop("norm.weight")), "lack tensors: norm.weight"),
        (lambda path: _retensored(path, lambda found: found.update(strange=torch.ones(1))), "extra tensors: strange"),
        (lambda path: _retensored(path, lambda found: found.pop("fc.weight")), "fc.weight"),
        (lambda path: _retensored(path, lambda found: found["norm.weight"].fill_(float("nan"))), "finite"),
        (lambda path: _retensored(path, lambda found: found["t2d"].fill_(True)), "do not agree"),
        (lambda path: _retensored(path, lambda found: found["d2t"].fill_(VOCAB)), "draft vocabulary"),
        (lambda path: (path / "model.safetensors").write_bytes(b"cut"), "whole safetensors"),
        (lambda path: _with(path, rope_parameters={"rope_type": "strange"}), "no or an unknown 'strange'"),
        (lambda path: _with(path, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "no or an unknown"),
        (lambda path: _with(path, transformer_layer_config=None), "transformer_layer_config is None"),
        (lambda path: _with(path, eagle_config=[1]), "cannot|can be read"),
        (
            lambda path: _retensored(path, lambda found: found.update({"norm.weight": torch.ones(32).long()})),
            "no finite",
        ),
        (lambda path: _pickled(path, [torch.ones(1)]), "something else than tensors with their names"),
        (lambda path: _pickled(path, {1: torch.ones(1)}), "something else than tensors with their names"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path, damage, words):
    save_draft_model(draft_model(own_head=True), tmp_path, layout="eagle3")
    damage(tmp_path)
    with pytest.raises(ValueError, match=words) as refusal:
        decoder.load_heads(tmp_path)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_pickle_that_could_run_code_is_refused(tmp_path, capsys):
    save_draft_model(draft_model(own_head=True), tmp_path, layout="eagle3")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": _Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="tensors alone"):
        decoder.load_heads(tmp_path)
    assert "ran" not in capsys.readouterr().out


def test_a_draft_model_of_another_model_is_refused(target_model):
    for changes, words in (
        (dict(target_hidden_size=16, hidden_size=16), "hidden size 16"),
        (dict(vocab_size=VOCAB + 1), f"{VOCAB + 1} tokens"),
        (dict(target_layers=(1, 2, 5)), "layer 5"),
    ):
        with pytest.raises(ValueError, match=words):
            Decoder(target_model, heads=draft_model(**changes))


def test_methods_of_other_heads_say_what_they_need(tmp_path, target_model):
    dec = Decoder(target_model, heads=draft_model())
    with pytest.raises(ValueError, match="draft heads"):
        dec.generate([1, 2], 4, "tokenswift")
    with pytest.raises(ValueError, match="eagle3"):
        Decoder(target_model).generate([1, 2], 4, "eagle3")
    draft_model(own_head=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load_heads"):
        decoder.DraftHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("window", [None, 5])
def test_speculators_reads_it_and_computes_the_same(tmp_path, window):
    """vLLM's own training library as the referee, where it is installed."""
    theirs = pytest.importorskip("speculators.models.eagle3.core").Eagle3DraftModel
    target = tiny_llama(torch.float32, num_hidden_layers=4)
    target.save_pretrained(tmp_path / "target")
    model = draft_model(window, own_head=True).float()
    model.save_pretrained(tmp_path / "draft", base_model=str(tmp_path / "target"), training={"steps": 1})
    other = theirs.from_pretrained(tmp_path / "draft").eval()
    embed = target.get_input_embeddings()
    other.embed_tokens.weight.data = embed.weight.data.clone()
    # As many as a block of its attention holds.
    count = 128
    features = torch.randn(1, count, 3 * 32)
    ids = torch.randint(VOCAB, (1, count + 3))
    ahead = torch.stack([embed(ids)[:, i : i + count] for i in range(3)], 2)
    logits = []
    other.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    with torch.no_grad():
        other(features, ids[:, :count], torch.zeros(1, count, dtype=torch.long), ttt_steps=3)
        for ours, found in zip(model(features, ahead), logits, strict=True):
            # The last positions wrap around, each in its own way.
            assert torch.allclose(model.lm_head(ours)[:, :-3], found[:, :-3], atol=1e-5)


@pytest.mark.parametrize(
    "family, words",
    [
        (WINDOWED["gemma3n_text"], "hand on 4 states of each token, and draft heads read one"),
        (LATENTS["longcat_flash"], "counts 4 layers and has 2"),
    ],
    ids=["several states", "two layers in one"],
)
def test_layers_that_cannot_be_read_are_told(family, words):
    model_type, overrides = family
    other = tiny(model_type, **overrides)
    with pytest.raises(ValueError, match=words):
        Decoder(other, heads=random_heads(other, kind="eagle3"))
