"""Heads that draft a part of the vocabulary, states that are kept, and text that is token ids already."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import heads_train.module
import heads_train.progress
from decoder.draft_heads import DraftHeads
from heads_train.cli import main
from heads_train.draft_vocabulary import READ_TOKENS, expected_counts
from heads_train.module import HeadsModule


def run(flags, *more, command="fit"):
    assert main([command, *flags, *more]) == 0


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_heads_are_trained_over_a_draft_vocabulary_and_go_on_with_it(flags, tmp_path):
    run(flags, "--model.kind=gated", "--model.distill=true", "--model.draft_vocab_size=9")
    best = DraftHeads.from_pretrained(tmp_path / "out" / "best")
    assert best.draft_vocab_size == 9 and best.draft_to_target.diff().gt(0).all()
    config = settings_of(tmp_path / "out" / "best")
    validation = config["training"]["validation"]
    assert config["draft_vocab_size"] == config["training"]["draft_vocab_size"] == 9
    assert 0 < validation["val_coverage"] < 1
    # A mean over a few positions less.
    assert validation["val_overlap_head1"] < validation["val_coverage"] + 0.02
    # Heads that have one bring it along, to validation as to another run.
    start = ["--model.kind=gated", f"--model.heads={tmp_path / 'out' / 'best'}", f"--output={tmp_path / 'more'}"]
    run([flag for flag in flags if not flag.startswith("--output")], *start)
    more = DraftHeads.from_pretrained(tmp_path / "more" / "last")
    assert more.draft_to_target.tolist() == best.draft_to_target.tolist()
    checkpoint = tmp_path / "out" / "checkpoints" / "last.ckpt"
    run(flags, "--model.kind=gated", f"--ckpt_path={checkpoint}", command="validate")


def test_what_a_checkpoint_brings_is_not_computed_before_it_is_read(flags, monkeypatch):
    flags = [*flags, "--model.kind=gated", "--model.draft_vocab_size=9", "--model.fitted_tokens=400"]
    computed = []
    for name in ("fit_heads", "expected_counts"):
        real = getattr(heads_train.module, name)
        counted = lambda *args, real=real, name=name: (computed.append(name), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(heads_train.module, name, counted)
    run(flags, "--trainer.max_steps=3")
    assert sorted(computed) == ["expected_counts", "fit_heads"]
    run(flags, "--trainer.max_steps=6")
    assert len(computed) == 2


@pytest.mark.parametrize(("count", "length"), [(5, 20), (1000, 512), (9, 8192), (200, 1024)])
def test_a_bounded_part_of_all_the_text_is_read_for_a_draft_vocabulary(count, length):
    """The model takes minutes for more on two cores, and longer places tell less than many."""
    chunks = np.repeat(np.arange(count, dtype=np.uint32)[:, None], length, axis=1)
    read = []

    def states_of(ids):
        read.append(ids)
        return ids[..., None].float()

    counts = expected_counts(
        chunks, states_of, lambda states: 1e4 * torch.eye(count)[states[:, 0].long()], torch.device("cpu")
    )
    tokens = sum(ids.numel() for ids in read)
    assert tokens == counts.sum() and tokens <= max(READ_TOKENS, 1024)
    assert tokens == min(count, READ_TOKENS // min(length, 1024)) * min(length, 1024)
    assert counts[0] and counts[-1]


def test_where_nobody_watches_a_bar_lines_tell_how_long_it_takes(monkeypatch, capsys):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(heads_train.progress.time, "monotonic", lambda: next(clock))
    assert list(heads_train.progress.progress(list("abcdef"), "reading")) == list("abcdef")
    assert capsys.readouterr().err.splitlines() == [
        "reading: the model reads 6 chunks",
        "reading: 1 of 6 chunks, 0:03:20 left",
        "reading: 3 of 6 chunks, 0:01:20 left",
        "reading: 5 of 6 chunks, 0:00:24 left",
    ]


def test_a_draft_vocabulary_of_all_tokens_changes_no_loss(model):
    torch.manual_seed(0)
    module = HeadsModule(str(model))
    module.backbone_dtype = "float64"
    module.configure_model()
    module = module.double()
    for parameter in module.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 15, (2, 20))
    module.distill = True
    plain = module.losses(ids, with_ranks=True, with_own=True)
    module.heads.set_draft_vocabulary(torch.arange(module.backbone.config.vocab_size))
    drafted = module.losses(ids, with_ranks=True, with_own=True)
    for one, other in zip(plain, drafted, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=0, atol=1e-9)
    assert module.val_coverage.compute().item() == pytest.approx(1)


def test_kept_states_change_no_bit_of_the_heads(flags, tmp_path):
    heads = []
    kept = [f"--model.state_cache={tmp_path / 's'}"]
    for name, more in (("plain", []), ("kept", kept), ("again", kept), ("half of them", kept)):
        output = tmp_path / name.replace(" ", "-")
        if name == "half of them":
            for path in sorted(tmp_path.glob("s/states-*/*.npy"))[::2]:
                path.unlink()
        run([flag for flag in flags if not flag.startswith("--output")], f"--output={output}", *more)
        heads.append(load_file(output / "last" / "heads.safetensors"))
    assert list((tmp_path / "s").glob("states-*/*.npy"))
    for tensors in heads[1:]:
        assert all(torch.equal(tensors[name], heads[0][name]) for name in heads[0])


def test_rows_of_token_ids_are_trained_on_as_they_are(flags, tmp_path, capsys):
    folder = tmp_path / "ids"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 15, (8, 32)).astype(np.uint32)
    np.save(folder / "train-000.npy", rows)
    np.save(folder / "train-001.npy", rows[::-1])
    np.save(folder / "validation-000.npy", rows[:4])
    flags = [flag for flag in flags if not flag.startswith("--data.source")]
    run(flags, f"--data.source={folder}", "--trainer.max_steps=2", "--trainer.val_check_interval=2")
    assert settings_of(tmp_path / "out" / "last")["training"]["train_chunks"] == 16
    np.save(folder / "train-001.npy", rows[0])
    capsys.readouterr()
    assert main(["fit", *flags, f"--data.source={folder}", f"--data.cache_dir={tmp_path / 'other'}"]) == 2
    assert "rows of token ids are needed" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 1_000_000])
def test_a_draft_vocabulary_that_no_model_has_is_refused(flags, size, capsys):
    assert main(["fit", *flags, f"--model.draft_vocab_size={size}"]) == 2
    assert "model.draft_vocab_size must be 1 to the model's" in capsys.readouterr().err
