"""Heads trained where the text is written, on a CPU here: the rows are the model's, the heads learn from them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoder import DraftHeads, SamplingParams

sys.path.append(str(Path(__file__).parents[2] / "data" / "scripts"))
import lockstep
import train_heads_on_gpu as training

GREEDY = SamplingParams(temperature=0)
pytestmark = pytest.mark.parametrize("folders", ["Qwen2"], indirect=True)


def run(folders, monkeypatch, *more):
    arguments = ["train_heads_on_gpu", "--device", "cpu", "--tokens", "64", "--rows", "24", "--together", "10"]
    arguments += ["--held-out", "4", "--steps", "40", "--batch", "4", "--learning-rate", "2e-3", "--gate-width", "16"]
    for name in ("model", "prompts", "books"):
        arguments += [f"--{name}", str(folders / name)]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(folders / "out"), *more])
    training.main()
    config = json.loads((folders / "out" / "config.json").read_text())["training"]
    return DraftHeads.from_pretrained(folders / "out"), config


def overlaps(figures):
    return [figures[f"val_overlap_head{level}"] for level in (1, 2, 3)]


def test_rows_hold_the_prompts_and_behind_them_what_generate_writes(folders):
    model = AutoModelForCausalLM.from_pretrained(folders / "model")
    ends, tokens = list(range(40)), 80
    turns = [
        [([7, 70 + row, 5], GREEDY), ([100, 101], GREEDY), *[([200, 90 + n], GREEDY) for n in range(60)]]
        for row in range(4)
    ]
    script = lockstep.Script([iter(row) for row in turns], tokens, torch.device("cpu"))
    own = lockstep.Lockstep(model, 4, tokens, short=False)
    ids, states = lockstep.write_script(own, script, ends, 0)
    last = model(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model.model.norm(states), last, rtol=1e-4, atol=1e-4)
    seen = []
    for row, prompts in zip(ids, turns, strict=True):
        at = turn = 0
        while at < tokens and turn < lockstep.TURNS:
            prompt = prompts[turn][0]
            assert row[at : at + len(prompt)].tolist() == prompt[: tokens - at]
            at, turn = at + len(prompt), turn + 1
            if at < tokens:
                wanted = model.generate(row[None, :at], max_new_tokens=tokens - at, do_sample=False, eos_token_id=ends)
                end = wanted.shape[1]
                assert row[:end].tolist() == wanted[0].tolist()
                at = end
        seen.append(turn)
    assert max(seen) > 2


def test_heads_are_nearer_to_the_model_fitted_than_new_and_trained_than_before(folders, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folders / "model")
    # A random model's distributions are all but even, and every head has them.
    model.lm_head.weight.data *= 20
    model.save_pretrained(folders / "model")
    heads, fitted = run(folders, monkeypatch, "--draft-vocab-size", "200", "--steps", "1", "--learning-rate", "0")
    assert (heads.kind, heads.shared, heads.gate_width, heads.draft_vocab_size) == ("gated", True, 16, 200)
    new = DraftHeads(32, 3, 1e-6, "gated", heads.draft_to_target, 16, True)
    new.init_from_norm(model.model.norm.weight)
    new.save_pretrained(folders / "new")
    _, trained = run(folders, monkeypatch, "--heads", str(folders / "new"))
    assert trained["train_chunks"] == 24 and trained["draft_vocab_size"] == 200
    for new, later, best in zip(
        overlaps(trained["untrained"]), overlaps(trained["validation"]), overlaps(fitted["validation"]), strict=True
    ):
        assert new < 0.3 and later > 0.5 and best > 0.6
    assert "| steps of cross entropy | 20 |" in (folders / "out" / "README.md").read_text()


def test_half_of_the_minutes_is_for_the_text_and_heads_are_kept_whatever_comes_behind_training(
    folders, monkeypatch, capsys
):
    monkeypatch.setattr("heads_train.callbacks.VERSIONS", ("no-such-package", "torch"))
    seen = []

    def stopped(module, rows):
        if seen:
            raise KeyboardInterrupt
        seen.append(rows)
        return {}

    monkeypatch.setattr(training, "validate", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(folders, monkeypatch, "--rows", "4000", "--together", "4", "--minutes", "0.1", "--draft-vocab-size", "200")
    assert "half of the time is over" in capsys.readouterr().out
    told = json.loads((folders / "out" / "config.json").read_text())["training"]
    assert 4 <= told["train_chunks"] < 4000 and told["steps"] > 1 and told["steps_of_cross_entropy"] < told["steps"]
    assert told["versions"]["no-such-package"] == "not installed"
    assert DraftHeads.from_pretrained(folders / "out").num_heads == 3


def test_more_draft_tokens_than_the_model_has_are_refused_before_text_is_written(folders, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(folders, monkeypatch)
    told = capsys.readouterr()
    assert "the model has 257 tokens: give --draft-vocab-size 257 or less" in told.err and "text" not in told.out


def test_rows_that_do_not_fit_are_refused_before_they_are_written(folders, monkeypatch, capsys):
    monkeypatch.setattr(training, "available_memory", lambda device: 2**20)
    with pytest.raises(SystemExit):
        run(folders, monkeypatch, "--draft-vocab-size", "200")
    assert "24 rows, 10 of them together, need about 0.0 GiB" in capsys.readouterr().err
    assert not (folders / "out").exists()
