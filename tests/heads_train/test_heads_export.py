"""Heads in vLLM's layout of Medusa: the names and shapes that its loader asks for, and the same drafts."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import decoder
from heads_train.backbone import final_norm, load_backbone, norm_weight
from heads_train.cli import main

VOCABULARY = torch.tensor([1, 3, 4, 9])


@pytest.fixture
def heads(model):
    """Heads of kind medusa for the tiny model, with weights that are no zeros."""
    plain = load_backbone(str(model), torch.float32)
    made = decoder.DraftHeads(plain.config.hidden_size, 2, kind="medusa")
    made.init_from_norm(norm_weight(final_norm(plain)))
    for head in made.heads:
        torch.nn.init.normal_(head.linear.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return made


class OfVllm:
    """What `Medusa.load_weights`, `forward` and `compute_logits` of vllm/model_executor/models/medusa.py do."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        d, drafted = self.config["hidden_size"], self.config["truncated_vocab_size"]
        shapes = {f"blocks.{index}.layers.0.weight": (d, d) for index in range(self.config["num_heads"])}
        # With original_lm_head the one matrix is taken from this name.
        assert self.config["original_lm_head"] and self.config["num_hidden_layers"] == 1
        shapes["lm_heads.0.weight"] = drafted, d
        self.token_map = tensors.pop("token_map") if drafted < self.config["vocab_size"] else None
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
        self.blocks = [tensors[f"blocks.{index}.layers.0.weight"] for index in range(self.config["num_heads"])]
        self.lm_head = tensors["lm_heads.0.weight"]

    def logits(self, hidden):
        found = []
        for block in self.blocks:
            own = (hidden + functional.silu(hidden @ block.T)) @ self.lm_head.T
            if self.token_map is not None:
                whole = torch.full((*own.shape[:-1], self.config["vocab_size"]), -torch.inf)
                whole[..., self.token_map] = own
                own = whole
            found.append(own)
        return found


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
def test_medusa_heads_draft_in_vllms_layout_as_here(heads, model, tmp_path, vocabulary):
    heads.set_draft_vocabulary(vocabulary)
    heads.save_pretrained(tmp_path / "heads")
    given = ["--format", "medusa", "--model", str(model), "--base-model", "org/model"]
    assert main(["export", *given, str(tmp_path / "heads"), str(tmp_path / "out")]) == 0
    theirs, plain = OfVllm(tmp_path / "out"), load_backbone(str(model), torch.float32)
    assert theirs.config["architectures"] == ["MedusaModel"] and theirs.config["model_type"] == "medusa"
    assert theirs.config["base_model_name_or_path"] == "org/model"
    state = torch.randn(7, plain.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # vLLM hands its heads what the model's final norm has given.
        expected = [plain.lm_head(out) for out in heads(state)]
        found = theirs.logits(final_norm(plain)(state))
    for own, other in zip(expected, found, strict=True):
        drafted = slice(None) if vocabulary is None else vocabulary
        torch.testing.assert_close(other[:, drafted], own[:, drafted], rtol=1e-4, atol=1e-4)
        if vocabulary is not None:
            assert set(other.argmax(-1).tolist()) <= set(vocabulary.tolist())


def test_what_cannot_be_exported_as_medusa_is_told(heads, model, tmp_path, capsys):
    heads.save_pretrained(tmp_path / "heads")
    decoder.DraftHeads(heads.hidden_size, 1, kind="independent").save_pretrained(tmp_path / "other")
    with torch.no_grad():
        heads.init_from_norm(torch.full((heads.hidden_size,), 7.0))
    heads.save_pretrained(tmp_path / "foreign")
    medusa = ["--format", "medusa"]
    for given, source, words in (
        (medusa, "heads", "--model goes with --format medusa"),
        (["--model", str(model)], "heads", "--model goes with --format medusa"),
        ([], "heads", "2 medusa heads"),
        ([*medusa, "--model", str(model)], "other", "1 independent heads"),
        ([*medusa, "--model", str(model), "--target-layers", "1"], "heads", "--target-layers is for EAGLE-3"),
        ([*medusa, "--model", str(model)], "foreign", "another model"),
    ):
        assert main(["export", *given, str(tmp_path / source), str(tmp_path / "no")]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_medusa_heads_are_trained_and_keep_the_models_norm(flags, tmp_path, model):
    run = [*[flag for flag in flags if not flag.startswith("--model.kind")], "--model.kind=medusa"]
    assert main(["fit", *run]) == 0
    made = decoder.load_heads(tmp_path / "out" / "last")
    assert made.kind == "medusa" and made.heads[0].linear.weight.abs().sum() > 0
    assert torch.equal(
        made.heads[0].input_norm.weight, norm_weight(final_norm(load_backbone(str(model), torch.float32)))
    )
    dec = decoder.load(model, heads=made)
    assert dec.generate([1, 2, 3], 12, "medusa").token_ids == dec.generate([1, 2, 3], 12, "ar").token_ids
