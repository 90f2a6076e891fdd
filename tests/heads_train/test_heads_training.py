"""Training through the real command on a tiny random model."""

import json
import os
import random
import re
import resource
import shutil
import signal
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.forked import forked
from tiny_books import HIDDEN, make_books
from torch.nn import functional
from transformers import AutoModelForCausalLM

from decoder.draft_heads import KINDS, DraftHeads
from heads_train import HeadsModule
from heads_train.cli import main
from heads_train.new_heads import fit_heads

HEADS = (1, 2, 3)


def heads_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "heads.safetensors")


def fit_until(ends, flags: list[str], monkeypatch) -> None:
    """A run that ends as by a power cut before the first batch for which ``ends(module)`` is true."""
    training_step = HeadsModule.training_step

    def cut(module, *args):
        if ends(module):
            raise OSError("power cut")
        return training_step(module, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HeadsModule, "training_step", cut)
        assert main(["fit", *flags]) == 2


def assert_same_heads(folder, *names: str) -> None:
    """The heads of a run that was cut and went on are those of the one that was not."""
    for name in names:
        whole, resumed = (heads_of(folder / run / name) for run in ("whole", "out"))
        assert all(torch.equal(whole[tensor], resumed[tensor]) for tensor in whole)


@pytest.fixture
def module(model) -> HeadsModule:
    """Untrained heads on the tiny model in float64, without a trainer."""
    module = HeadsModule(str(model))
    module.backbone_dtype = "float64"
    module.configure_model()
    return module.double()


def test_untrained_heads_predict_what_the_model_predicts(module):
    ids = torch.randint(0, 15, (2, 20))
    logits = module.backbone(ids).logits
    for hidden in module(ids)[0]:
        assert torch.allclose(module.backbone.get_output_embeddings()(hidden), logits, atol=1e-6)


def test_head_i_at_position_t_learns_the_token_after_the_next_i(module):
    for parameter in module.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 15, (2, 20))
    losses, ranks, _ = module.losses(ids, with_ranks=True, with_own=True)
    own = module.backbone(ids).logits.argmax(-1)
    for i, hidden in enumerate(module(ids)[0], start=1):
        log_probs = module.backbone.get_output_embeddings()(hidden).log_softmax(-1)
        pairs = [(row, t) for row in range(2) for t in range(20 - 1 - i)]
        naive = -sum(log_probs[row, t, ids[row, t + 1 + i]] for row, t in pairs) / len(pairs)
        assert torch.allclose(losses[i - 1], naive, rtol=0, atol=1e-9)
        for place, wanted in enumerate((ids[:, 1:], own)):
            expected = [(log_probs[row, t] > log_probs[row, t, wanted[row, t + i]]).sum() for row, t in pairs]
            assert ranks[i - 1][place].flatten().tolist() == expected


def test_a_distilled_head_learns_the_models_own_distribution_of_its_token(module):
    """Head i at position t against the model's logits at t + i, position by position."""
    for parameter in module.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module.distill = True
    ids = torch.randint(0, 15, (2, 20))
    own = module.backbone(ids).logits.softmax(-1)
    losses, _, overlaps = module.losses(ids, with_ranks=False, with_own=True)
    for i, states in enumerate(module(ids)[0], start=1):
        log_probs = module.backbone.get_output_embeddings()(states).log_softmax(-1)
        pairs = [(row, t) for row in range(2) for t in range(20 - 1 - i)]
        naive = -sum((own[row, t + i] * log_probs[row, t]).sum() for row, t in pairs) / len(pairs)
        shared = sum(torch.minimum(own[row, t + i], log_probs[row, t].exp()).sum() for row, t in pairs) / len(pairs)
        assert torch.allclose(losses[i - 1], naive, rtol=0, atol=1e-9)
        assert torch.allclose(overlaps[i - 1].mean(), shared, rtol=0, atol=1e-9)
    module.distill_loss = "overlap"
    for i, loss in enumerate(module.losses(ids, with_ranks=False)[0], start=1):
        log_probs = module.backbone.get_output_embeddings()(module(ids)[0][i - 1]).log_softmax(-1)
        pairs = [(row, t) for row in range(2) for t in range(20 - 1 - i)]
        shared = [torch.minimum(own[row, t + i], log_probs[row, t].exp()).sum().log() for row, t in pairs]
        assert torch.allclose(loss, -sum(shared) / len(pairs), rtol=0, atol=1e-9)


def test_every_heads_loss_is_torchs_cross_entropy_of_its_token(module):
    ids = torch.randint(0, 15, (1, 12))
    lm_head = module.backbone.get_output_embeddings()
    losses, _, _ = module.losses(ids, with_ranks=False)
    for i, states in enumerate(module(ids)[0], start=1):
        # Head i reads position t and predicts token t + 1 + i.
        logits, targets = lm_head(states[0, : -1 - i]), ids[0, 1 + i :]
        assert torch.allclose(losses[i - 1], torch.nn.functional.cross_entropy(logits, targets))


def test_conditioned_heads_read_the_true_tokens_before_their_targets(model):
    """Position t of head i gets the embedding of token t + i: what a drafter would have drafted just before."""
    module = HeadsModule(str(model), kind="conditioned", backbone_dtype="float32")
    module.configure_model()
    ids = torch.randint(0, 15, (2, 20))
    tokens = module._tokens_before(ids)
    table = module.backbone.get_input_embeddings().weight
    for i in range(1, 4):
        assert torch.equal(tokens[:, : 20 - i, i - 1], table[ids[:, i:]])


# That each of the others trains at all, a step of each shipped configuration shows.
@pytest.mark.parametrize(
    "kind", [kind if kind in ("chained", "gated") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_fit_lowers_every_loss_and_leaves_heads_logs_and_curves(flags, model, tmp_path, drawn, kind):
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert main(["fit", *flags, f"--model.kind={kind}", "--trainer.max_steps=36", "--model.learning_rate=0.03"]) == 0
    out = tmp_path / "out"
    for name in ("last", "best"):
        heads = DraftHeads.from_pretrained(out / name)
        assert (heads.kind, heads.num_heads, heads.hidden_size, heads.norm_eps) == (kind, 3, HIDDEN, 1e-5)
        config = json.loads((out / name / "config.json").read_text())
        assert config["base_model"] == str(model)
        training = config["training"]
        for i in HEADS:
            assert training["validation"][f"val_loss_head{i}"] < training["untrained"][f"val_loss_head{i}"] - 0.2
    assert (out / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    logs = EventAccumulator(str(out)).Reload()
    for i in HEADS:
        for stage in ("train", "val"):
            names = [f"{stage}_loss_head{i}", *(f"{stage}_top{k}_head{i}" for k in (1, 2, 3))]
            assert set(names) <= set(logs.Tags()["scalars"])
    shown = {"train_loss", "val_loss", "tokens_per_second", "peak_memory_gib", "lr-AdamW/pg1"}
    shown |= {f"val_tokens_per_step_{way}" for way in ("top1", "top2", "top3", "sampled")}
    assert shown <= set(logs.Tags()["scalars"])
    assert logs.Scalars("peak_memory_gib")[-1].value > 0.05
    figures = training["validation"]
    assert 1 <= figures["val_tokens_per_step_top1"] <= figures["val_tokens_per_step_top3"] <= 4
    card = (out / "best" / "README.md").read_text()
    assert f"{figures['val_tokens_per_step_top3']:.2f} with 1, 2, 3 guesses" in card
    assert f"| 3 | {training['untrained']['val_loss_head3']:.2f} | {figures['val_loss_head3']:.2f} |" in card
    assert f"| torch | {torch.__version__} |" in card and f"heads={json.dumps(str(out / 'best'))}" in card
    after = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_backbone_gets_no_gradient_no_training_mode_and_no_place_in_checkpoints(flags, model, tmp_path, monkeypatch):
    seen = []

    def look(module, *_):
        module.train()
        seen.append({name: tensor.clone() for name, tensor in module.backbone.state_dict().items()})
        assert not module.backbone.training and module.heads.training
        assert all(p.grad is None and not p.requires_grad for p in module.backbone.parameters())

    monkeypatch.setattr(HeadsModule, "on_train_batch_end", look)
    assert main(["fit", *flags]) == 0
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in seen[-1].items())
    checkpoint = torch.load(tmp_path / "out" / "checkpoints" / "last.ckpt", weights_only=False)
    assert set(checkpoint["state_dict"]) == {f"heads.{name}" for name in DraftHeads(HIDDEN).state_dict()}
    assert len(checkpoint["optimizer_states"][0]["state"]) == 3 * 3
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["last.ckpt"]


# An epoch has 6 batches and a validation: cut inside the first, on its edge, and inside a later one; then after a
# validation between the batches of one step, and in epochs of 4 batches.
@pytest.mark.parametrize(
    ("cut_at", "extra"),
    [
        (3, []),
        pytest.param(6, [], marks=pytest.mark.slow),
        pytest.param(8, ["--trainer.accumulate_grad_batches=2"], marks=pytest.mark.slow),
        (8, ["--trainer.accumulate_grad_batches=2", "--trainer.val_check_interval=5", "--save_every=3"]),
        pytest.param(6, ["--trainer.limit_train_batches=4", "--trainer.val_check_interval=4"], marks=pytest.mark.slow),
        (6, ["--trainer.limit_train_batches=0.7", "--trainer.val_check_interval=4"]),
    ],
)
def test_cut_and_resumed_equals_uncut(flags, tmp_path, monkeypatch, cut_at, extra):
    flags = [*flags, "--save_every=1", *extra]
    assert main(["fit", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    fit_until(lambda module: module.global_step == cut_at, flags, monkeypatch)
    assert main(["fit", *flags]) == 0
    assert_same_heads(tmp_path, "last", "best")
    for name in ("last", "best"):
        configs = [json.loads((tmp_path / run / name / "config.json").read_text()) for run in ("whole", "out")]
        assert configs[0]["training"] == configs[1]["training"]
    ends = [torch.load(tmp_path / run / "checkpoints" / "last.ckpt", weights_only=False) for run in ("whole", "out")]
    for callback in ("LossCurves", "ExportHeads"):
        assert ends[0]["callbacks"][callback] == ends[1]["callbacks"][callback]


BOOKS, MORE, LAST = "the books", "other books", "the last heads"
"""Stand for paths that a test knows."""
SETTINGS = (
    ("model.learning_rate", 0.01, 0.02),
    ("model.weight_decay", 0.1, 0.2),
    ("model.beta1", 0.9, 0.8),
    ("model.beta2", 0.999, 0.99),
    ("model.warmup_steps", 2, 3),
    ("model.head_weights", [1.0, 1.0, 1.0], [1.0, 2.0, 1.0]),
    ("model.distill", False, True),
    ("model.backbone_dtype", "auto", "float32"),
    ("model.heads", None, LAST),
    ("data.source", BOOKS, MORE),
    ("data.chunk_tokens", 32, 16),
    ("data.chunks_per_book", 2, 1),
    ("data.max_chunks", None, 23),
    ("data.seed", 0, 1),
    ("trainer.precision", "32-true", "bf16-mixed"),
    ("trainer.gradient_clip_val", None, 0.5),
    ("trainer.limit_train_batches", 1.0, 5),
)


@pytest.mark.parametrize(
    "settings", [SETTINGS[::4], pytest.param(SETTINGS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_run_with_other_settings_is_not_gone_on_with(flags, model, tmp_path, capsys, settings):
    flags = [*flags, "--save_every=1"]
    assert main(["fit", *flags, "--trainer.max_steps=2"]) == 0
    weights = (tmp_path / "out" / "last" / "heads.safetensors").read_bytes()
    more = make_books(tmp_path / "more")
    paths = {BOOKS: flags_value(flags, "data.source"), MORE: str(more), LAST: str(tmp_path / "out" / "last")}
    for setting, *values in settings:
        before, now = (paths.get(value, value) if isinstance(value, str) else value for value in values)
        capsys.readouterr()
        given = str(now).lower() if isinstance(now, bool) else str(now).replace(" ", "")
        assert main(["fit", *flags, f"--{setting}={given}", "--trainer.val_check_interval=5"]) == 2, setting
        said = f"made with {setting} {before}, this run has {now}; give another --output to start afresh"
        assert said in capsys.readouterr().err
    assert main(["fit", *flags, "--data.batch_size=2"]) == 2
    assert "made with chunks per step 4, this run has 2; give another --output" in capsys.readouterr().err
    assert (tmp_path / "out" / "last" / "heads.safetensors").read_bytes() == weights
    # The same chunks per step, taken in two parts; more steps; and other settings where nothing is trained.
    halves = ["--data.batch_size=2", "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=3"]
    assert main(["fit", *flags, *halves]) == 0
    assert main(["validate", *flags, "--model.learning_rate=1", f"--data.source={more}", "--ckpt_path=last"]) == 0


def test_the_overlap_is_learned_where_it_is_asked_for(flags, tmp_path, capsys):
    flags = [*flags, "--model.kind=gated", "--save_every=1"]
    assert main(["fit", *flags, "--model.distill_loss=overlap"]) == 2
    assert "model.distill_loss overlap needs the model's own distributions" in capsys.readouterr().err
    flags += ["--model.distill=true"]
    assert main(["fit", *flags, "--model.distill_loss=overlap"]) == 0
    training = json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]
    assert training["distill_loss"] == "overlap"
    untrained, trained = training["untrained"], training["validation"]
    assert trained["val_overlap_head1"] > untrained["val_overlap_head1"]
    capsys.readouterr()
    assert main(["fit", *flags]) == 2
    assert "made with model.distill_loss overlap, this run has cross_entropy" in capsys.readouterr().err


def test_a_checkpoint_of_before_there_was_another_loss_goes_on(flags, tmp_path):
    flags = [*flags, "--save_every=1"]
    assert main(["fit", *flags, "--trainer.max_steps=2"]) == 0
    path = tmp_path / "out" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    del checkpoint["run"]["model.distill_loss"]
    torch.save(checkpoint, path)
    assert main(["fit", *flags, "--trainer.max_steps=3"]) == 0
    assert torch.load(path, weights_only=False)["global_step"] == 3


def test_a_run_whose_books_have_changed_is_not_gone_on_with(flags, tmp_path, capsys):
    books = make_books(tmp_path / "books")
    flags = [*flags, f"--data.source={books}", "--save_every=1"]
    assert main(["fit", *flags, "--trainer.max_steps=2"]) == 0
    shutil.copy(books / "train.jsonl.gz", books / "train-2.jsonl.gz")
    assert main(["fit", *flags]) == 2
    assert "made with training chunks 24, this run has 48; give another --output" in capsys.readouterr().err


def test_the_figures_say_the_step_they_are_of_and_outlast_a_cut(flags, tmp_path, capsys):
    flags = [*flags, "--save_every=1", "--trainer.val_check_interval=5", "--trainer.max_steps=8"]
    assert main(["fit", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    shown = capsys.readouterr().out.splitlines()[-1]
    cut = ["--trainer.callbacks=probes.Cut", "--trainer.callbacks.step=7"]
    assert main(["fit", *flags, *cut]) == 2
    assert main(["fit", *flags]) == 0
    assert shown.startswith("expected tokens per step with ") and shown in capsys.readouterr().out
    assert main(["fit", *flags]) == 0
    again = capsys.readouterr().out
    assert "all 8 steps were made before" in again and shown in again
    for run in ("whole", "out"):
        last, best = (
            json.loads((tmp_path / run / name / "config.json").read_text())["training"] for name in ("last", "best")
        )
        assert (last["steps"], last["validated_at_step"]) == (8, 5)
        assert (best["steps"], best["validated_at_step"], best["validation"]) == (5, 5, last["validation"])
        card = (tmp_path / run / "last" / "README.md").read_text()
        assert "Validated at step 5: " in card and "| steps | 8 |" in card
        assert f"| {last['validation']['val_loss_head3']:.2f} |" in card


def flags_value(flags: list[str], name: str) -> str:
    return next(flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}="))


def test_a_run_on_the_same_few_batches_is_not_gone_on_with(flags, capsys):
    flags = [*flags, "--trainer.overfit_batches=4", "--trainer.val_check_interval=4", "--save_every=1"]
    assert main(["fit", *flags, "--trainer.max_steps=2"]) == 0
    assert main(["fit", *flags]) == 2
    assert "with --trainer.overfit_batches does not go on; give another --output" in capsys.readouterr().err


def test_a_run_cut_again_between_the_batches_of_one_step_equals_uncut(flags, tmp_path, monkeypatch):
    flags = [*flags, "--save_every=1", "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=6"]
    assert main(["fit", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    for batches in (4, 1):
        left = iter(range(batches))
        fit_until(lambda module, left=left: next(left, None) is None, flags, monkeypatch)
    assert main(["fit", *flags]) == 0
    assert_same_heads(tmp_path, "last")


# A kill that leaves no time to write is what the tests of a power cut prove in this process.
@pytest.mark.parametrize("kill", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_step_goes_on_from_the_last_save(flags, tmp_path, kill):
    flags = [*flags, "--save_every=3"]
    assert main(["fit", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    last = tmp_path / "out" / "checkpoints" / "last.ckpt"
    slowly = ["fit", *flags, "--trainer.callbacks=probes.Slow", "--trainer.callbacks.seconds=0.1"]
    with open(tmp_path / "said", "wb") as stderr:
        process = forked(main, slowly, stderr=stderr.fileno())
    while not last.exists():
        time.sleep(0.01)
        assert process.is_alive(), (tmp_path / "said").read_text()
    time.sleep(random.uniform(0, 0.5))
    os.kill(process.pid, kill)
    process.join(60)
    said = (tmp_path / "said").read_text()
    if kill == signal.SIGINT:
        assert process.exitcode == 130, said
        assert said.strip().splitlines()[-1].startswith("heads-train: stopped; the same command goes on")
        assert "Traceback" not in said
    else:
        assert process.exitcode == -signal.SIGKILL
    assert torch.load(last, weights_only=False)["global_step"] in (3, 6, 9)
    assert main(["fit", *flags, "--ckpt_path=last"]) == 0
    assert_same_heads(tmp_path, "last", "best")


@contextmanager
def disk_of(size: int):
    """No file can grow beyond ``size`` bytes, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The heads have 13 KB, the checkpoint several times that: the one or the other is what does not fit.
@pytest.mark.parametrize("size", [pytest.param(10_000, marks=pytest.mark.slow), 30_000])
def test_a_full_disk_ends_in_a_sentence_and_keeps_what_was_trained(flags, tmp_path, monkeypatch, capsys, size):
    flags = [*flags, "--trainer.logger=false", "--save_every=3"]
    assert main(["fit", *flags, f"--output={tmp_path / 'whole'}"]) == 0
    fit_until(lambda module: module.global_step == 8, flags, monkeypatch)
    capsys.readouterr()
    with disk_of(size):
        assert main(["fit", *flags]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("heads-train: ") and "free some space and give the same command again" in said
    assert json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]["steps"] >= 6
    assert DraftHeads.from_pretrained(tmp_path / "out" / "last").num_heads == 3
    assert not list((tmp_path / "out").rglob(".writing-*"))
    assert main(["fit", *flags]) == 0
    assert_same_heads(tmp_path, "last")


def test_validate_and_test_take_a_checkpoint(flags, tmp_path, capsys):
    assert main(["fit", *flags]) == 0
    ckpt = f"--ckpt_path={tmp_path / 'out' / 'checkpoints' / 'last.ckpt'}"
    capsys.readouterr()
    losses = []
    for extra in ([], [ckpt], ["--ckpt_path=last"], [f"--model.heads={tmp_path / 'out' / 'last'}"]):
        assert main(["validate", *flags, *extra]) == 0
        rows = (line.split() for line in capsys.readouterr().out.splitlines())
        losses.append(next(float(row[3]) for row in rows if "val_loss" in row))
    assert losses[1] < losses[0]
    assert losses[1] == losses[2] == losses[3]
    assert main(["test", *flags, ckpt]) == 0
    assert "test_top3_head3" in capsys.readouterr().out


def test_without_validation_the_last_heads_are_the_best(flags, tmp_path):
    assert main(["fit", *flags, "--trainer.limit_val_batches=0"]) == 0
    assert heads_of(tmp_path / "out" / "best").keys() == heads_of(tmp_path / "out" / "last").keys()


def test_divergence_stops_with_a_sentence_and_keeps_the_last_good_heads(flags, tmp_path, monkeypatch, capsys):
    training_step = HeadsModule.training_step

    def explode(module, *args):
        if module.global_step == 8:
            module.heads.heads[0].linear.weight.data.fill_(float("nan"))
        return training_step(module, *args)

    monkeypatch.setattr(HeadsModule, "training_step", explode)
    assert main(["fit", *flags]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the loss is nan after 8 steps" in said and "lower --model.learning_rate" in said
    assert DraftHeads.from_pretrained(tmp_path / "out" / "last").num_heads == 3
    assert json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]["steps"] == 6


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--trainer.limit_val_batches=0"], r"the loss is \S+ after \d+ steps, at the start it was \S+; lower"),
        ([], r"the validation loss is \S+ after 6 steps; lower"),
    ],
)
def test_a_learning_rate_that_makes_the_loss_explode_ends_the_run(flags, tmp_path, capsys, extra, said):
    flags = [*flags, "--trainer.max_steps=60", "--model.learning_rate=100", "--model.warmup_steps=0", *extra]
    assert main(["fit", *flags]) == 1
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out" / "last").exists()


def test_heads_of_weight_zero_do_not_learn(flags, tmp_path):
    assert main(["fit", *flags, "--model.kind=independent", "--model.head_weights=[2,0,1]"]) == 0
    moved = [heads_of(tmp_path / "out" / "last")[f"heads.{i}.linear.weight"].abs().max() > 0 for i in range(3)]
    assert moved == [True, False, True]
    figures = json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]["validation"]
    assert figures["val_loss"] == pytest.approx(2 * figures["val_loss_head1"] + figures["val_loss_head3"])


def test_a_run_can_start_from_given_heads(flags, tmp_path):
    assert main(["fit", *flags]) == 0
    first = json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]
    again = [*flags, f"--model.heads={tmp_path / 'out' / 'last'}", f"--output={tmp_path / 'again'}"]
    assert main(["fit", *again]) == 0
    second = json.loads((tmp_path / "again" / "last" / "config.json").read_text())["training"]
    assert second["untrained"] == first["validation"]


@pytest.mark.slow
def test_compiled_layers_train_the_same_heads(flags, tmp_path):
    flags = [*flags, "--trainer.max_steps=3"]
    assert main(["fit", *flags, f"--output={tmp_path / 'plain'}"]) == 0
    torch._dynamo.utils.counters.clear()
    assert main(["fit", *flags, "--model.compile=true"]) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    plain, compiled = heads_of(tmp_path / "plain" / "last"), heads_of(tmp_path / "out" / "last")
    assert all(torch.allclose(plain[name], compiled[name], rtol=0, atol=1e-4) for name in plain)


def test_heads_of_a_diverged_validation_are_not_written(flags, tmp_path, monkeypatch, capsys):
    def explode(module):
        module.val_metrics = {"val_loss": float("nan")}

    monkeypatch.setattr(HeadsModule, "on_validation_epoch_end", explode)
    assert main(["fit", *flags]) == 1
    assert "the validation loss is nan after 6 steps" in capsys.readouterr().err
    assert not (tmp_path / "out" / "last").exists()


def test_bf16_trains_float32_heads_on_a_bf16_model(flags, tmp_path, monkeypatch):
    dtypes = set()
    monkeypatch.setattr(HeadsModule, "on_train_start", lambda module: dtypes.add(module.backbone.dtype))
    assert main(["fit", *flags, "--trainer.precision=bf16-mixed"]) == 0
    assert dtypes == {torch.bfloat16}
    assert all(tensor.dtype == torch.float32 for tensor in heads_of(tmp_path / "out" / "last").values())


@pytest.mark.parametrize("shared", [False, True])
def test_a_fit_finds_the_heads_that_give_the_next_state(shared):
    """Where the next state is a linear function of the state and the token, heads of any depth know it."""
    torch.manual_seed(0)
    d, rows = 12, []
    turn, read = torch.linalg.qr(torch.randn(d, d))[0], torch.randn(d, d) * 0.2
    for _ in range(20):
        embedded = functional.rms_norm(torch.randn(40, d), (d,))
        states = [functional.rms_norm(torch.randn(d), (d,))]
        for token in embedded[1:]:
            states.append(functional.rms_norm(turn @ states[-1] + read @ token, (d,)))
        states = torch.stack(states) * 3
        rows.append((states, torch.stack([embedded.roll(-i, 0) for i in (1, 2, 3)], dim=-2)))
    heads = DraftHeads(d, kind="gated", gate_width=8, shared=shared)
    found = {}
    for fitted in (False, True):
        if fitted:
            fit_heads(heads, lambda: iter(rows))
        outputs = heads(*rows[0])
        for level, output in enumerate(outputs, start=1):
            wanted = rows[0][0].roll(-level, 0)
            found[fitted, level] = functional.cosine_similarity(output, wanted, dim=-1)[: -level - 1].mean().item()
    for level in (1, 2, 3):
        assert found[False, level] < 0.6 and found[True, level] > 0.95, found


def test_fitted_heads_start_better_and_a_cut_run_goes_on(flags, tmp_path, capsys):
    flags = [*flags, "--model.kind=gated", "--model.distill=true", "--model.learning_rate=1e-4", "--save_every=1"]
    untrained = {}
    for name, more in (("zero", []), ("fitted", ["--model.fitted_tokens=4000", "--model.shared=true"])):
        out = [f"--output={tmp_path / name}", "--trainer.max_steps=2"]
        assert main(["fit", *flags, *more, *out]) == 0
        training = json.loads((tmp_path / name / "last" / "config.json").read_text())["training"]
        untrained[name] = training["untrained"]["val_overlap_head1"]
    assert untrained["fitted"] > untrained["zero"]
    assert DraftHeads.from_pretrained(tmp_path / "fitted" / "last").shared
    assert main(["fit", *flags, *more, f"--output={tmp_path / 'fitted'}", "--trainer.max_steps=4"]) == 0
    capsys.readouterr()
    assert main(["fit", *flags, f"--output={tmp_path / 'fitted'}", "--trainer.max_steps=5"]) == 2
    assert "made with model.shared True, this run has False" in capsys.readouterr().err
    assert main(["fit", *flags, f"--model.heads={tmp_path / 'fitted' / 'last'}", f"--output={tmp_path / 'new'}"]) == 2
    assert "model.shared True, and" in capsys.readouterr().err
    assert main(["fit", *flags, "--model.kind=chained", "--model.fitted_tokens=9"]) == 2
    assert "for heads of kind conditioned or gated" in capsys.readouterr().err
