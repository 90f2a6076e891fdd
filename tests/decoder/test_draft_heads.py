import json
import pickle
import shutil

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.draft_heads import KINDS, DraftHeads
from decoder.drafters.levels import HeadLevels
from decoder.sampling.sampler import Sampler

from . import conftest

D = 16


def random_heads(kind="chained", num_heads=3, dtype=torch.float32) -> DraftHeads:
    torch.manual_seed(0)
    heads = DraftHeads(D, num_heads, norm_eps=1e-5, kind=kind)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads.to(dtype)


def llama_norm(weight, x):
    norm = LlamaRMSNorm(D, eps=1e-5).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm(x)


def llama_mlp(tensors, i):
    """transformers' own gated unit, 2d wide in and out; a head's lower half of outputs is not there."""
    config = LlamaConfig(hidden_size=2 * D, intermediate_size=2 * D, hidden_act="silu")
    mlp = LlamaMLP(config).to(tensors["heads.0.linear.weight"].dtype)
    mlp.gate_proj.weight.data.copy_(tensors[f"heads.{i}.gate.weight"])
    mlp.up_proj.weight.data.copy_(tensors[f"heads.{i}.up.weight"])
    mlp.down_proj.weight.data.zero_()
    mlp.down_proj.weight.data[:D] = tensors[f"heads.{i}.down.weight"]
    return mlp


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "medusa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_follows_the_paper_with_llamas_own_norm(kind, dtype):
    heads = random_heads(kind, dtype=dtype)
    hidden, tokens = torch.randn(2, 5, D, dtype=dtype), torch.randn(2, 5, 3, D, dtype=dtype) * 7
    outputs = heads(hidden, tokens)
    assert len(outputs) == 3
    state = hidden
    for i, output in enumerate(outputs):
        weights = {
            name: heads.state_dict()[f"heads.{i}.{name}.weight"] for name in ("linear", "input_norm", "output_norm")
        }
        before = hidden if kind == "independent" else state
        features = llama_norm(weights["input_norm"], before)
        if kind in ("conditioned", "gated"):
            unit = tokens[..., i, :].float()
            unit = unit / unit.pow(2).mean(-1, keepdim=True).sqrt()
            features = torch.cat((features, unit.to(dtype)), dim=-1)
        state = features @ weights["linear"].T + before
        if kind == "gated":
            state = state + llama_mlp(heads.state_dict(), i)(features)[..., :D]
        assert output.dtype == dtype
        tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.05, atol=0.05)
        assert torch.allclose(output, llama_norm(weights["output_norm"], state), **tolerance)


@pytest.mark.parametrize("kind, width", [("chained", D), ("independent", D), ("conditioned", 2 * D), ("gated", 2 * D)])
def test_tensor_names_and_shapes_are_those_of_the_file_format(kind, width):
    expected = {}
    for i in range(2):
        expected |= {f"heads.{i}.linear.weight": (D, width)}
        expected |= {f"heads.{i}.{norm}.weight": (D,) for norm in ("input_norm", "output_norm")}
        if kind == "gated":
            expected |= {f"heads.{i}.{part}.weight": (width, width) for part in ("gate", "up")}
            expected |= {f"heads.{i}.down.weight": (D, width)}
    assert {name: tuple(t.shape) for name, t in DraftHeads(D, 2, kind=kind).state_dict().items()} == expected


def test_conditioned_heads_ask_for_their_tokens():
    with pytest.raises(ValueError, match="need the embeddings"):
        random_heads("conditioned")(torch.randn(4, D))


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_heads_give_the_models_own_normalised_state(kind):
    heads = DraftHeads(D, 3, norm_eps=1e-5, kind=kind)
    weight, hidden = torch.rand(D), torch.randn(4, D)
    heads.init_from_norm(weight)
    for output in heads(hidden, torch.randn(4, 3, D)):
        assert torch.equal(output, llama_norm(weight, hidden))


def test_float64_is_not_narrowed_by_the_norms():
    heads, hidden = random_heads(dtype=torch.float64), torch.randn(3, D, dtype=torch.float64)
    weight, eps = heads.heads[0].input_norm.weight, heads.norm_eps
    exact = weight * hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt()
    assert torch.allclose(heads.heads[0].input_norm(hidden), exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kind": "magic"}, "unknown kind of heads 'magic'; known kinds are gated, conditioned, chained"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"kind": "gated", "gate_width": 0}, "gate_width must be at least 1"),
        ({"kind": "conditioned", "gate_width": 4}, "gate_width is for gated heads, and these are conditioned"),
        ({"shared": True}, "shared is for conditioned and gated heads, and these are chained"),
    ],
)
def test_impossible_heads_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        DraftHeads(**({"hidden_size": D} | arguments))


def test_heads_for_another_hidden_size_are_refused():
    heads = DraftHeads(64)
    heads.check_fits(64)
    for refuse in (lambda: heads.check_fits(384), lambda: heads.init_from_norm(torch.ones(384))):
        with pytest.raises(ValueError, match="the heads are for hidden size 64, the model has 384"):
            refuse()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_heads_load_as_they_were(tmp_path, kind, dtype):
    heads = random_heads(kind, num_heads=2, dtype=dtype)
    heads.save_pretrained(tmp_path / "heads", base_model="some/model", training={"steps": 7})
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == ["config.json", "heads.safetensors"]
    loaded = DraftHeads.from_pretrained(tmp_path / "heads")
    assert (loaded.kind, loaded.num_heads, loaded.norm_eps) == (kind, 2, 1e-5)
    for name, tensor in heads.state_dict().items():
        assert loaded.state_dict()[name].dtype == dtype
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert all(p.requires_grad for p in loaded.parameters())
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert config == {
        "architecture": "tokenswift-heads",
        "format_version": 1,
        "num_heads": 2,
        "hidden_size": D,
        "norm_eps": 1e-5,
        "kind": kind,
        "base_model": "some/model",
        "training": {"steps": 7},
    }


@pytest.mark.parametrize("kind", ["conditioned", "gated"])
def test_a_shared_head_is_stored_once_and_drafts_as_copies_of_it_do(tmp_path, model, prompt, kind):
    torch.manual_seed(0)
    shape = {"hidden_size": model.config.hidden_size, "kind": kind} | ({"gate_width": 24} if kind == "gated" else {})
    shared, copies = DraftHeads(shared=True, **shape), DraftHeads(**shape)
    for parameter in shared.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    copies.load_state_dict(shared.state_dict())
    one, three = (sum(p.numel() for p in heads.parameters()) for heads in (shared, copies))
    assert three == 3 * one
    shared.save_pretrained(tmp_path)
    assert {name.split(".")[1] for name in load_file(tmp_path / "heads.safetensors")} == {"0"}
    loaded = DraftHeads.from_pretrained(tmp_path)
    assert loaded.shared and loaded.heads[0] is loaded.heads[2] and loaded.gate_width == shape.get("gate_width")
    hidden, tokens = torch.randn(5, shape["hidden_size"]), torch.randn(5, 3, shape["hidden_size"])
    for found, wanted in zip(loaded(hidden, tokens), copies(hidden, tokens), strict=True):
        assert torch.equal(found, wanted)
    drafted = []
    for heads in (loaded, copies):
        dec = Decoder(model, heads=heads)
        sampler = Sampler(SamplingParams(seed=5), dec.model.config.vocab_size, torch.device("cpu"), [5, 6, 7])
        with torch.inference_mode():
            levels = HeadLevels(dec.target, dec.heads[kind], True, width=6, beam=4)
            drafted.append([one.rows for one in conftest.drafted_levels(levels, hidden[:1].double(), sampler, 5)])
    assert drafted[0] == drafted[1]
    plain = Decoder(model).generate(prompt, 24, "ar", SamplingParams(seed=5))
    assert (
        Decoder(model, heads=loaded).generate(prompt, 24, "auto", SamplingParams(seed=5)).token_ids == plain.token_ids
    )


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_half_written(tmp_path):
    random_heads().save_pretrained(tmp_path)
    before = (tmp_path / "heads.safetensors").read_bytes()
    with pytest.raises(TypeError):
        DraftHeads(D).save_pretrained(tmp_path, training={"not": object()})
    assert (tmp_path / "heads.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "heads.safetensors"]


def published(folder, heads, sharded, config=None) -> None:
    """Write a whole model's checkpoint with heads inside, as TokenSwift's authors publish it."""
    (config or LlamaConfig(hidden_size=D, num_attention_heads=2, rms_norm_eps=1e-5)).save_pretrained(folder)
    parts = {"linear": "linear", "input_norm": "input_layernorm", "output_norm": "post_layernorm"}
    tensors = {"model.embed_tokens.weight": torch.zeros(4, D), "model.layers.0.input_layernorm.weight": torch.ones(D)}
    for name, tensor in heads.state_dict().items():
        _, number, part, _ = name.split(".")
        tensors[f"model.medusa_layers.{number}.{parts[part]}.weight"] = tensor
    names = sorted(tensors)
    groups = [names[0::3], names[1::3], names[2::3]] if sharded else [names]
    weight_map = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors" if sharded else "model.safetensors"
        save_file({name: tensors[name] for name in group}, folder / file)
        weight_map |= dict.fromkeys(group, file)
    if sharded:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_published_checkpoints_are_read_for_their_head_tensors_alone(tmp_path, sharded):
    heads = random_heads(dtype=torch.bfloat16)
    published(tmp_path, heads, sharded)
    loaded = DraftHeads.from_pretrained(tmp_path)
    assert (loaded.kind, loaded.num_heads, loaded.hidden_size, loaded.norm_eps) == ("chained", 3, D, 1e-5)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in heads.state_dict().items())


def test_a_published_checkpoint_that_lacks_a_shard_is_refused(tmp_path):
    published(tmp_path, random_heads(), sharded=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(OSError, match="has no model-00002-of-00003"):
        DraftHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t.pop("model.medusa_layers.1.post_layernorm.weight"), "lack tensors: heads.1.output_norm.weight"),
        (
            lambda t: t.update({"model.medusa_layers.0.linear.bias": torch.ones(D)}),
            "have extra tensors: model.medusa_layers.0.linear.bias",
        ),
        (lambda t: t["model.medusa_layers.2.linear.weight"].fill_(float("nan")), "no finite numbers"),
        (lambda t: t.update({"model.medusa_layers.2.linear.weight": torch.ones(D, 4)}), r"has shape \[16, 4\]"),
        (
            lambda t: [t.pop(name) for name in list(t) if "medusa" in name],
            "no tensors of a known heads format; give what heads-train has written$",
        ),
    ],
    ids=["missing", "extra", "NaN", "shape", "a model without heads"],
)
def test_spoilt_published_checkpoints_are_refused_with_the_reason(tmp_path, spoil, reason):
    published(tmp_path, random_heads(), sharded=False)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=reason):
        DraftHeads.from_pretrained(tmp_path)


def test_pickle_is_never_read(tmp_path):
    """Neither beside safetensors nor in their place: unpickling this file would create another."""
    published(tmp_path, random_heads(), sharded=False)

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"model.medusa_layers.0.linear.weight": Payload()}))
    DraftHeads.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="of pickle files those of EAGLE-3 alone are read"):
        DraftHeads.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("index", ["{}", '{"weight_map": [1]}', '{"weight_map": {"model.medusa_layers.0": 3}}'])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    published(tmp_path, random_heads(), sharded=True)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="has no weight_map from tensors to files"):
        DraftHeads.from_pretrained(tmp_path)


def test_published_heads_decode_like_our_own(tmp_path, model, prompt):
    """In a whole-model folder of the authors' layout, for the one call that the README gives."""
    own = conftest.random_heads(model)
    config = LlamaConfig(hidden_size=model.config.hidden_size, rms_norm_eps=own.norm_eps)
    published(tmp_path, own, sharded=True, config=config)
    options = TokenSwiftOptions(tree=(1, 3, 3, 3))
    theirs = Decoder(model, heads=tmp_path).generate(prompt, 40, "tokenswift", options=options)
    ours = Decoder(model, heads=own).generate(prompt, 40, "tokenswift", options=options)
    assert theirs.token_ids == ours.token_ids
    assert theirs.stats.accepted_by_depth == ours.stats.accepted_by_depth


def test_heads_that_do_not_fit_are_refused_with_their_place(tmp_path, model):
    random_heads().save_pretrained(tmp_path / "small")
    with pytest.raises(
        ValueError, match=f"^the heads in {tmp_path / 'small'} are for hidden size 16, the model has 32: give heads"
    ):
        Decoder(model, heads=tmp_path / "small")


def edit_config(**changes):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_tensors(change):
    def edit(folder):
        path = folder / "heads.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def cut_file(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        (edit_config(architecture="other"), ValueError, "is not a heads checkpoint"),
        (edit_config(format_version=2), ValueError, "heads of format version 2, this program reads 1"),
        (edit_config(kind="magic"), ValueError, "unknown kind of heads 'magic'"),
        (edit_config(num_heads=4), ValueError, "heads in .* lack tensors: heads.3.input_norm.weight"),
        (edit_config(num_heads=2), ValueError, "heads in .* have extra tensors: heads.2.input_norm.weight"),
        (edit_config(num_heads=9), ValueError, r"lack tensors: (heads\S+, ){2}heads\S+ and 15 more$"),
        (edit_config(num_heads=0), ValueError, "config.json: num_heads must be at least 1"),
        (edit_tensors(lambda t: t.update({"heads.0.linear.weight": torch.ones(D, D).int()})), ValueError, "no finite"),
        (edit_config(num_heads=None), ValueError, "gives no usable num_heads"),
        (edit_config(hidden_size=8), ValueError, r"has shape \[16\], not \[8\]|has shape \[16, 16\], not \[8, 8\]"),
        (edit_tensors(lambda t: t["heads.1.linear.weight"].fill_(float("nan"))), ValueError, "no finite numbers"),
        (edit_tensors(lambda t: t["heads.0.input_norm.weight"].fill_(float("inf"))), ValueError, "no finite numbers"),
        (edit_tensors(lambda t: t.update(other=torch.ones(1))), ValueError, "have extra tensors: other"),
        (cut_file("config.json", 20), ValueError, "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "holds no JSON object"),
        (cut_file("heads.safetensors", 500), ValueError, "is not a whole safetensors file"),
        (lambda folder: (folder / "heads.safetensors").unlink(), OSError, "has no heads.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), OSError, "it has no config.json"),
    ],
)
def test_spoilt_checkpoints_are_refused_with_the_reason(tmp_path, spoil, error, reason):
    random_heads().save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=reason):
        DraftHeads.from_pretrained(tmp_path)


def test_missing_folders_and_files_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="there is no folder of heads at"):
        DraftHeads.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(OSError, match="is a file"):
        DraftHeads.from_pretrained(tmp_path / "file")


def hub(monkeypatch, repository, cache):
    """A hub that copies what is asked for, as `huggingface_hub` does; the names it was asked for."""
    asked = []

    def snapshot_download(name, allow_patterns, cache_dir=None, token=None, local_files_only=False):
        assert name == "someone/heads"
        asked.append(allow_patterns)
        cache.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for path in repository.glob(pattern):
                shutil.copy(path, cache)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_is_fetched_without_the_files_it_does_not_need(tmp_path, monkeypatch):
    random_heads().save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "model.safetensors").write_text("the whole model")
    hub(monkeypatch, tmp_path / "hub", tmp_path / "cache")
    heads = DraftHeads.from_pretrained("someone/heads")
    assert (heads.num_heads, heads.source) == (3, "someone/heads")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["config.json", "heads.safetensors"]


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_published_model_only_the_shards_with_heads_are_fetched(tmp_path, monkeypatch, sharded):
    published(tmp_path / "hub", random_heads(), sharded)
    for extra in ("model-00009-of-00009.safetensors", "pytorch_model.bin", "modeling_llama.py"):
        (tmp_path / "hub" / extra).write_text("not to be read")
    hub(monkeypatch, tmp_path / "hub", tmp_path / "cache")
    loaded = DraftHeads.from_pretrained("someone/heads").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in random_heads().state_dict().items())
    fetched = {path.name for path in (tmp_path / "cache").iterdir()}
    assert not fetched & {"model-00009-of-00009.safetensors", "pytorch_model.bin", "modeling_llama.py"}


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(OSError, match=r"^there is no folder of heads at someone/heads, and it could not be read from"):
        DraftHeads.from_pretrained("someone/heads")


def test_a_hub_is_asked_with_the_users_token_and_cache(tmp_path, monkeypatch):
    given = []

    def snapshot_download(name, allow_patterns, **arguments):
        given.append(arguments)
        return str(tmp_path)

    published(tmp_path, random_heads(), False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    arguments = dict(cache_dir="/cache", token="secret", local_files_only=True)
    DraftHeads.from_pretrained("someone/heads", **arguments)
    assert given == [arguments, arguments]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_module_with_values_that_are_no_numbers_is_refused(model, value):
    """Also a number that is one only in the wider type of the heads."""
    heads = DraftHeads(model.config.hidden_size).double()
    heads.heads[1].linear.weight.data[0, 0] = value
    single = conftest.tiny_llama(torch.float32)
    with pytest.raises(ValueError, match=r"heads\.1\.linear\.weight of the heads holds values that are no"):
        Decoder(single, heads=heads)


def test_a_draft_vocabulary_is_saved_with_the_heads(tmp_path):
    heads = random_heads("gated", dtype=torch.bfloat16)
    heads.set_draft_vocabulary(torch.tensor([1, 4, 9]))
    heads.save_pretrained(tmp_path)
    assert load_file(tmp_path / "heads.safetensors")["draft_to_target"].dtype == torch.int64
    loaded = DraftHeads.from_pretrained(tmp_path)
    assert loaded.draft_to_target.tolist() == [1, 4, 9] and loaded.draft_vocab_size == 3
    assert loaded.to(torch.float64).draft_to_target.dtype == torch.int64
    loaded.check_fits(D, 10)
    with pytest.raises(ValueError, match=r"draft token 9, and the model has 9 tokens: they are another model's"):
        loaded.check_fits(D, 9)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 4}))
    with pytest.raises(ValueError, match=r"draft_vocab_size 4, and heads.safetensors has 3: copy both files anew"):
        DraftHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "given, words",
    [
        (torch.tensor([1, 1, 2]), "does not ascend"),
        (torch.tensor([3, 2]), "does not ascend"),
        (torch.tensor([-1, 2]), "does not ascend"),
        (torch.tensor([1, 2], dtype=torch.int32), "int32"),
        (torch.tensor([[1, 2]]), r"int64 \[1, 2\]"),
        (torch.tensor([], dtype=torch.int64), r"int64 \[0\]"),
    ],
)
def test_a_list_that_is_no_draft_vocabulary_is_refused(tmp_path, given, words):
    with pytest.raises(ValueError, match=words):
        random_heads().set_draft_vocabulary(given)
    random_heads().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "heads.safetensors") | {"draft_to_target": given}
    save_file(tensors, tmp_path / "heads.safetensors")
    with pytest.raises(ValueError, match=words) as caught:
        DraftHeads.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)
