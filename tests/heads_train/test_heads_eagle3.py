"""EAGLE-3's draft model: trained, resumed, gone on from, exported, decoded with."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_books import EAGLE3

import decoder
from heads_train.backbone import FrozenStates, load_backbone
from heads_train.cli import main
from heads_train.new_heads import fit_features, new_heads


def run(flags, *more, command="fit"):
    assert main([command, *flags, *more]) == 0


def without_output(flags):
    return [flag for flag in flags if not flag.startswith("--output")]


def test_it_is_trained_and_drafts_for_its_model(flags, model, tmp_path):
    run(flags, *EAGLE3, "--model.draft_vocab_size=9", "--trainer.max_steps=6")
    folder = tmp_path / "out" / "best"
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(model)
    validation, before = config["training"]["validation"], config["training"]["untrained"]
    assert validation["val_loss"] < before["val_loss"]
    trained = decoder.load_heads(folder)
    assert trained.config.sliding_window == 8 and trained.num_heads == 2 and trained.draft_vocab_size == 9
    dec = decoder.load(model, folder, dtype="float64")
    tree = decoder.TokenSwiftOptions(tree=(2, 2, 1))
    sampling = decoder.SamplingParams(seed=2)
    drafted = dec.generate([1, 2, 3], 20, "eagle3", sampling, tree, ignore_eos=True)
    assert drafted.token_ids == dec.generate([1, 2, 3], 20, "ar", sampling, ignore_eos=True).token_ids
    assert drafted.stats.accepted > 0
    # Its language-model head is the model's own rows.
    rows = dec.model.get_output_embeddings().weight[trained.draft_to_target]
    assert torch.allclose(trained.lm_head.weight.double(), rows, atol=1e-6)


def test_a_checkpoint_goes_on_and_is_validated(flags, tmp_path):
    vocabulary, output = "--model.draft_vocab_size=9", tmp_path / "out"
    run(flags, *EAGLE3, vocabulary)
    before = load_file(output / "last" / "model.safetensors")
    # All its steps are done: the heads are read from the checkpoint and written again.
    run(flags, *EAGLE3, vocabulary)
    after = load_file(output / "last" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    run(flags, *EAGLE3, f"--ckpt_path={output / 'checkpoints' / 'last.ckpt'}", command="validate")


def test_a_run_goes_on_from_a_draft_model_and_another_shape_is_refused(flags, tmp_path, capsys):
    run(flags, *EAGLE3, "--model.draft_vocab_size=9")
    start = [f"--model.heads={tmp_path / 'out' / 'last'}", f"--output={tmp_path / 'more'}"]
    run(without_output(flags), *EAGLE3, *start)
    before = decoder.load_heads(tmp_path / "out" / "last")
    after = decoder.load_heads(tmp_path / "more" / "last")
    assert after.draft_to_target.tolist() == before.draft_to_target.tolist()
    assert not torch.equal(after.fc.weight, before.fc.weight)
    capsys.readouterr()
    other = [*EAGLE3[:-1], "--model.sliding_window=4", *start[:1], f"--output={tmp_path / 'other'}"]
    assert main(["fit", *without_output(flags), *other]) == 2
    assert "another shape" in capsys.readouterr().err


def test_it_is_exported_for_other_engines(flags, tmp_path, capsys):
    run(flags, *EAGLE3)
    source = tmp_path / "out" / "last"
    for layout in ("speculators", "eagle3"):
        output = tmp_path / layout
        assert main(["export", "--format", layout, "--base-model", "org/model", str(source), str(output)]) == 0
        found = decoder.load_heads(output)
        assert found.base_model == "org/model"
        assert torch.equal(found.fc.weight, decoder.load_heads(source).fc.weight)
    capsys.readouterr()
    assert main(["export", str(source), str(tmp_path / "eagle3")]) == 2
    assert "not empty" in capsys.readouterr().err
    run(without_output(flags), f"--output={tmp_path / 'chained'}")
    assert main(["export", str(tmp_path / "chained" / "last"), str(tmp_path / "no")]) == 2
    assert "chained heads" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_one_that_does_not_name_its_layers_is_exported_where_they_are_given(flags, tmp_path, capsys):
    """As the authors' checkpoints are."""
    run(flags, *EAGLE3)
    source = tmp_path / "out" / "last"
    config = json.loads((source / "config.json").read_text())
    layers = config.pop("eagle_aux_hidden_state_layer_ids")
    (source / "config.json").write_text(json.dumps(config))
    for more, words in (
        ([], f"{source} does not say which {len(layers)} layers of the model it reads: add --target-layers"),
        (["--target-layers", "1,x"], f"must be {len(layers)} numbers of layers"),
        (["--target-layers", "1"], f"must be {len(layers)} numbers of layers"),
    ):
        assert main(["export", *more, str(source), str(tmp_path / "no")]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "no").exists()
    given = ",".join(map(str, layers))
    for layout in ("speculators", "eagle3"):
        output = tmp_path / layout
        assert main(["export", "--format", layout, "--target-layers", given, str(source), str(output)]) == 0
        assert list(decoder.load_heads(output).target_layers) == layers
    assert main(["export", "--target-layers", "0,0,0", str(tmp_path / "eagle3"), str(tmp_path / "no")]) == 2
    assert f"reads layers {given}: leave out --target-layers" in capsys.readouterr().err


def test_layers_are_for_eagle3_alone(flags, capsys):
    assert main(["fit", *flags, "--model.target_layers=[1]"]) == 2
    assert "model.target_layers" in capsys.readouterr().err
    assert main(["fit", *flags, *EAGLE3, "--model.target_layers=[1,99]"]) == 2
    assert "layer 99" in capsys.readouterr().err


def test_a_new_draft_model_tells_of_the_last_state(model):
    """The features' fit to it; with the input of the final norm among the features it is that state itself."""
    backbone = load_backbone(str(model), torch.float64)
    layers = len(backbone.model.layers)
    heads = new_heads(backbone.config, "eagle3", 2, (0, layers), None).double()
    states = FrozenStates(backbone, (0, layers))
    ids = torch.randint(0, 15, (4, 64), generator=torch.Generator().manual_seed(0))
    found = states(ids)
    fit_features(heads, [found])
    size = heads.hidden_size
    last = found[..., -size:]
    difference = (heads.combine(found[..., :-size]) - last).norm(dim=-1) / last.norm(dim=-1)
    assert difference.max() < 0.01


@pytest.mark.parametrize("levels", [1, 3])
def test_states_of_layers_are_those_of_transformers(model, levels):
    backbone = load_backbone(str(model), torch.float64)
    ids = torch.randint(0, 15, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = backbone(ids, output_hidden_states=True).hidden_states
    chosen = tuple(range(min(levels, len(backbone.model.layers))))
    found = FrozenStates(backbone, chosen)(ids).split(backbone.config.hidden_size, -1)
    for layer, state in zip(chosen, found, strict=False):
        assert torch.allclose(state, expected[layer])
