"""The command line: shipped configurations, and errors of one sentence."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny_books import make_random_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    ResNetConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from decoder import DraftHeads, load_heads
from decoder.draft_heads import KINDS
from heads_train import cli
from heads_train.cli import CONFIGS, main

PAPER = {
    "llama31": ("meta-llama/Llama-3.1-8B", 200, 3, 5e-3, "ddp"),
    "llama2-yarn": ("NousResearch/Yarn-Llama-2-7b-128k", 200, 3, 5e-3, "ddp"),
    "qwen25-1.5b": ("Qwen/Qwen2.5-1.5B", 200, 3, 5e-3, "ddp"),
    "qwen25-7b": ("Qwen/Qwen2.5-7B", 200, 3, 5e-3, "ddp"),
    "qwen25-14b": ("Qwen/Qwen2.5-14B", 600, 1, 1e-3, "ddp"),
    "r1-qwen-32b": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 200, 3, 5e-3, "fsdp"),
    "qwq-32b": ("Qwen/QwQ-32B", 200, 3, 5e-3, "fsdp"),
}


@pytest.fixture
def parsed(monkeypatch):
    """Parse arguments with the real command, starting nothing; returns the settings of its subcommand."""

    class Parsed(Exception):
        pass

    def stop(self):
        raise Parsed(self.config[self.config.subcommand])

    monkeypatch.setattr(cli.HeadsCLI, "before_instantiate_classes", stop)

    def parse(*args):
        with pytest.raises(Parsed) as caught:
            cli.run(args)
        return caught.value.args[0]

    return parse


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_config_is_found_by_name_and_parsed(parsed, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = parsed("fit", "--config", name, "--model.num_heads", "2")
    assert settings.model.num_heads == 2
    assert settings.data.tokenizer == settings.model.model_name_or_path
    assert settings.trainer.max_steps > 0


@pytest.mark.parametrize("name", PAPER)
def test_paper_configs_hold_the_settings_of_the_paper(parsed, name):
    settings = parsed("fit", f"--config={name}.yaml")
    model, data, trainer = settings.model, settings.data, settings.trainer
    found = (
        model.model_name_or_path,
        trainer.max_steps,
        data.batch_size,
        model.learning_rate,
        trainer.strategy,
    )
    assert found == PAPER[name]
    assert (data.source, data.chunk_tokens, data.chunks_per_book) == ("emozilla/pg19", 8192, 1)
    assert (model.warmup_steps, model.weight_decay, model.beta1, model.beta2) == (50, 0.1, 0.9, 0.999)
    assert (trainer.accumulate_grad_batches, trainer.devices) == (10, 4)
    assert str(trainer.precision).startswith("bf16")
    assert (model.num_heads, model.kind) == (3, "chained")


@pytest.mark.parametrize(
    ("name", "kind", "output"),
    [
        ("reference-medusa", "independent", "runs/heads-independent"),
        ("reference-conditioned", "conditioned", "runs/heads-conditioned"),
        ("reference-generated", "chained", "runs/heads-generated"),
    ],
)
def test_the_reference_configs_differ_in_kind_text_and_output_only(parsed, name, kind, output):
    chained, other = (parsed("fit", "--config", file).as_dict() for file in ("reference.yaml", f"{name}.yaml"))
    assert (chained["model"].pop("kind"), other["model"].pop("kind")) == ("chained", kind)
    assert (chained.pop("output"), other.pop("output")) == ("runs/heads-chained", output)
    for config in (chained, other):
        for name in ("config", "base", "data"):
            config.pop(name)
    assert chained == other


# Made small, these are the model of qwen25-1.5b or r1-qwen-32b; that they are read, the test above shows.
SAME_WHEN_SMALL = ("qwen25-7b", "qwen25-14b", "qwq-32b")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=pytest.mark.slow) if path.stem in SAME_WHEN_SMALL else path.stem
        for path in sorted(CONFIGS.glob("*.yaml"))
    ],
)
def test_every_shipped_config_trains_one_step_of_a_small_model_of_its_architecture(name, flags, tmp_path):
    """The file as it is, but for what needs a network, a cluster or hours."""
    small = make_random_model(name, tmp_path / "model")
    own = {"source", "chunk_tokens", "chunks_per_book", "batch_size", "cache_dir"}
    here = [flag for flag in flags if flag.partition("=")[0].removeprefix("--data.") in own]
    shipped = {}
    for file in cli.with_bases(f"{name}.yaml"):
        for section, values in yaml.safe_load(file.read_text()).items():
            shipped[section] = {**shipped.get(section, {}), **values} if isinstance(values, dict) else values
    if "draft_vocab_size" in shipped["model"]:
        here += ["--model.draft_vocab_size=100", f"--model.state_cache={tmp_path / 'states'}"]
    if shipped["data"]["source"] == "generated":
        books = next(flag.partition("=")[2] for flag in here if flag.startswith("--data.source="))
        here = [flag for flag in here if not flag.startswith("--data.source=")]
        here += [f"--data.generated.prompts={books}", "--data.generated.texts=8", "--data.generated.prompt_tokens=8"]
    quick = ["accelerator=cpu", "devices=1", "strategy=auto", "max_steps=1", "accumulate_grad_batches=1"]
    quick += ["enable_progress_bar=false", "enable_model_summary=false", "val_check_interval=1"]
    out = tmp_path / "out"
    args = [f"--model.model_name_or_path={small}", f"--output={out}", *here, *(f"--trainer.{flag}" for flag in quick)]
    assert main(["fit", "--config", f"{name}.yaml", *args]) == 0
    assert yaml.safe_load((out / "config.yaml").read_text())["base"] is None
    training = json.loads((out / "last" / "config.json").read_text())["training"]
    assert training["steps"] == 1
    heads = load_heads(out / "last")
    # A rate that warms up starts at zero, so what moved is seen in the optimizer and not in the heads. The head of a
    # draft model is the model's own and not trained.
    optimizer = torch.load(out / "checkpoints" / "last.ckpt", weights_only=False)["optimizer_states"][0]
    trained = [name for name, _ in heads.named_parameters() if name != "lm_head.weight"]
    assert len(optimizer["state"]) == len(trained)
    assert any(state["exp_avg"].abs().max() > 0 for state in optimizer["state"].values())


def test_heads_named_in_a_readme_are_where_a_shipped_config_leaves_them():
    root = Path(__file__).parents[2]
    text = "".join((root / name).read_text() for name in ("README.md", "packages/heads-train/README.md"))
    outputs = {yaml.safe_load(path.read_text())["output"] for path in CONFIGS.glob("*.yaml")}
    named = set(re.findall(r"(runs/[\w.-]+)/(?:best|last)", text))
    assert named and named <= outputs


def test_the_template_names_every_kind_of_heads():
    line = next(line for line in (CONFIGS / "template.yaml").read_text().splitlines() if line.startswith("  kind:"))
    assert [kind for kind in KINDS if kind not in line] == []


def test_print_config_prints_what_a_run_would_use(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["fit", "--config", "r1-qwen-32b.yaml", "--model.num_heads", "4", "--print_config"])
    assert end.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["num_heads"] == 4
    assert printed["trainer"]["strategy"] == "fsdp"
    assert printed["data"]["chunk_tokens"] == 8192


def test_a_file_of_the_same_name_wins_over_the_shipped_one(parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference.yaml").write_text("output: here\nmodel:\n  model_name_or_path: m\ndata:\n  source: s\n")
    assert parsed("fit", "--config", "reference.yaml").output == "here"


def test_a_file_builds_on_its_base_whose_settings_are_saved_with_its_own(parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "template.yaml").write_text("output: not the shipped one\n")
    (tmp_path / "sub" / "mine.yaml").write_text("base: llama31.yaml\nmodel:\n  num_heads: 5\n")
    (tmp_path / "sub" / "ours.yaml").write_text("base: mine.yaml\noutput: ours\n")
    settings = parsed("fit", "--config", "sub/ours.yaml", "--model.kind=gated")
    assert (settings.output, settings.model.num_heads, settings.model.kind) == ("ours", 5, "gated")
    # From the shipped configuration, and from the one that it builds on.
    assert settings.model.model_name_or_path == "meta-llama/Llama-3.1-8B" and settings.trainer.max_steps == 200


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.yaml": "base: b.yaml", "b.yaml": "base: a.yaml"}, "a.yaml is the base of a configuration that it builds"),
        ({"a.yaml": "base: none.yaml"}, "there is no configuration none.yaml; shipped are"),
        ({"a.yaml": "model: ["}, "a.yaml is not YAML: "),
        ({"a.yaml": "base: b.yaml", "b.yaml": "model:\n  kind: a\n  kind: b"}, "'kind' in line 3 of "),
        ({"a.yaml": "base: 5"}, "base in a.yaml must be the name of a configuration, not 5"),
        ({"a.yaml": "base: [b.yaml]"}, "base in a.yaml must be the name of a configuration, not ['b.yaml']"),
        ({"a.yaml": "model: &m {kind: *m}"}, "model.kind in a.yaml holds itself"),
    ],
)
def test_a_wrong_base_is_one_sentence(files, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert main(["fit", "--config", "a.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("heads-train: ") and reason in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--base=llama31.yaml"], "base is a line of a configuration file: give several --config instead"),
        (["--model.model_name_or_path=/no/model"], "there is no model folder at /no/model"),
        (["--data.source=/no/books"], "there is no file or folder of books at /no/books"),
        (["--model.kind=magic"], "unknown kind of heads 'magic'; known kinds are gated, conditioned, chained"),
        (["--model.num_heads=0"], "num_heads must be at least 1, got 0"),
        (["--model.num_heads=many"], "num_heads"),
        (["--no-such-flag"], "no-such-flag"),
        (["--data.chunk_tokens=0"], "data.chunk_tokens must be at least 1, got 0"),
        (["--data.batch_size=0"], "data.batch_size must be at least 1, got 0"),
        (["--data.chunk_tokens=150"], "lower --data.chunk_tokens"),
        (["--data.batch_size=99"], "do not fill one step of 1 x 99; lower --data.batch_size"),
        (["--data.chunk_tokens=4"], "data.chunk_tokens is 4; these heads and this model take 5 to 256"),
        (["--trainer.max_steps=-1", "--trainer.max_epochs=-1"], "the cosine schedule needs an end"),
        (["--config=nothing.yaml"], "there is no configuration nothing.yaml; shipped are"),
        (["--ckpt_path=/no/such.ckpt"], "/no/such.ckpt"),
        (["--ckpt_path=last"], "there is no checkpoint"),
        (["--model.head_weights=[1,2]"], "model.head_weights must be 3 numbers of at least 0 and not all 0, got [1.0"),
        (["--model.head_weights=[1,-2,1]"], "model.head_weights must be 3 numbers"),
        (["--model.head_weights=[0,0,0]"], "at least 0 and not all 0, got [0.0, 0.0, 0.0]"),
        (["--model.loss_chunk_tokens=0"], "model.loss_chunk_tokens must be at least 1, got 0"),
        (["--model.heads=/no/heads"], "there is no folder of heads at /no/heads"),
        (["--data.text_column=body"], "no text column 'body' but short_book_title, text; give --data.text_column"),
        (["--data.source=generated"], "data.source generated and --data.generated.prompts"),
        (["--data.max_chunks=0"], "data.max_chunks must be at least 1, got 0"),
        (["--trainer.log_every_n_steps=0"], "trainer.log_every_n_steps must be at least 1, got 0"),
        (["--trainer.callbacks=probes.Hungry"], "memory ran out; lower --data.batch_size or --model.loss_chunk_tokens"),
        ([f"--model.learning_rate=1{'0' * 400}"], "learning_rate"),
        ([f"--data.batch_size=1{'0' * 400}"], "batch_size"),
        (["--model.learning_rate=.inf"], "model.learning_rate must be at least 0 and finite, got inf"),
        (["--model.beta2=1.0"], "model.beta2 must be at least 0 and below 1, got 1.0"),
        (["--model.weight_decay", "-1" + "0" * 5000], "--model.weight_decay must be a number that a float holds"),
        (["--model={num_heads: 1, kind: gated, num_heads: 2}"], "'num_heads' in line 1 of --model is there twice"),
        (["--trainer.strategy=fsdp", "--trainer.devices=auto"], "give --trainer.devices"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_status_2(flags, tmp_path, capsys, extra, reason):
    assert main(["fit", *flags, *extra]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("heads-train: ") and reason in last
    assert not (tmp_path / "out" / "last").exists()


def test_a_missing_setting_is_named(capsys):
    assert main(["fit", "--data.source=books"]) == 2
    said = capsys.readouterr().err
    assert "model.model_name_or_path" in said and "give it as a flag, or a --config that has it" in said


def test_a_model_without_rms_norms_is_refused(flags, model, tmp_path, capsys):
    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    assert main(["fit", *flags, f"--model.model_name_or_path={tmp_path / 'gpt2'}"]) == 2
    assert "models of type gpt2 are not supported: they have no rms_norm_eps" in capsys.readouterr().err


def test_a_model_that_is_no_decoder_is_refused(flags, model, tmp_path, capsys):
    t5 = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert main(["fit", *flags, f"--model.model_name_or_path={tmp_path / 't5'}"]) == 2
    assert "t5 is an encoder-decoder; only decoder-only causal models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary scaling"),
        (ResNetConfig().to_dict(), "resnet is no causal language model"),
        ({"hidden_size": "x"}, "cannot be read: "),
    ],
)
def test_a_model_that_could_not_be_decoded_is_refused_before_its_weights_are_read(
    flags, model, tmp_path, capsys, change, reason
):
    config = (
        change if change.get("model_type") == "resnet" else json.loads((model / "config.json").read_text()) | change
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert main(["fit", *flags, f"--model.model_name_or_path={tmp_path / 'model'}"]) == 2
    assert reason in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_model_that_scales_its_logits_is_refused_and_one_that_scales_by_one_is_not(flags, model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "granite")
    sizes = json.loads((model / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: sizes[name] for name in (*names, "num_key_value_heads", "max_position_embeddings")}
    for scaling, status in ((8.0, 2), (1.0, 0)):
        config = GraniteConfig(**sizes, logits_scaling=scaling)
        GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
        flags = [*flags, f"--model.model_name_or_path={tmp_path / 'granite'}", "--trainer.max_steps=1"]
        assert main(["fit", *flags]) == status
        refused = "GraniteForCausalLM is not supported: it changes its logits behind" in capsys.readouterr().err
        assert refused == (status == 2)


def test_a_tokenizer_larger_than_the_vocabulary_is_named(flags, model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "model")
    small = LlamaForCausalLM.from_pretrained(model)
    small.resize_token_embeddings(10)
    small.save_pretrained(tmp_path / "model")
    assert main(["fit", *flags, f"--model.model_name_or_path={tmp_path / 'model'}"]) == 2
    assert "and the model has 10 tokens only: give the model its own tokenizer" in capsys.readouterr().err


def test_weights_that_are_cut_short_are_named(flags, model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert main(["fit", *flags, f"--model.model_name_or_path={tmp_path / 'model'}"]) == 2
    assert f"the model {tmp_path / 'model'} cannot be read: " in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--model.model_name_or_path=nobody/no-model", "the model nobody/no-model cannot be read"),
        ("--data.source=nobody/no-books", "the data set nobody/no-books could not be read from the Hugging Face hub"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_named(flags, tmp_path, flag, reason):
    """In a process of its own, whose network ends nowhere: the client libraries read their settings when imported."""
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"HF_HOME": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}
    command = [sys.executable, "-m", "heads_train", "fit", *flags, flag]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["heads-train", "fit", "--config", "no.yaml"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("heads_train", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("heads-train: there is no configuration no.yaml")


def test_compiling_without_a_compiler_is_refused(flags, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/no/compiler")
    assert main(["fit", *flags, "--model.compile=true"]) == 2
    assert "model.compile needs a C++ compiler: install /no/compiler" in capsys.readouterr().err


def test_heads_that_do_not_fit_the_run_are_refused(flags, tmp_path, capsys):
    DraftHeads(32, 2).save_pretrained(tmp_path / "two")
    DraftHeads(16, 3).save_pretrained(tmp_path / "small")
    assert main(["fit", *flags, f"--model.heads={tmp_path / 'two'}"]) == 2
    assert "are 2 of kind chained, and 3 of kind chained were asked for" in capsys.readouterr().err
    assert main(["fit", *flags, f"--model.heads={tmp_path / 'small'}"]) == 2
    assert "small are for hidden size 16, the model has 32" in capsys.readouterr().err


def test_a_run_of_other_heads_is_not_gone_on_with(flags, capsys):
    assert main(["fit", *flags, "--trainer.max_steps=2", "--save_every=1"]) == 0
    assert main(["fit", *flags, "--model.kind=independent"]) == 2
    assert "model.kind chained, this run has independent; give another --output" in capsys.readouterr().err
    assert main(["fit", *flags, "--model.num_heads=2"]) == 2
    assert "made with model.num_heads 3, this run has 2; give another --output" in capsys.readouterr().err


def test_a_checkpoint_of_another_program_is_refused(flags, tmp_path, capsys):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, tmp_path / "other.ckpt")
    assert main(["validate", *flags, f"--ckpt_path={tmp_path / 'other.ckpt'}"]) == 2
    assert "the checkpoint is not one of heads-train" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty", "heads"])
def test_a_file_that_is_no_whole_checkpoint_is_named(flags, tmp_path, capsys, damage):
    whole = tmp_path / "whole.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(5000)}}, whole)
    DraftHeads(32, 3).save_pretrained(tmp_path / "heads")
    contents = {
        "garbage": b"no checkpoint at all",
        "cut": whole.read_bytes()[:10000],
        "empty": b"",
        "heads": (tmp_path / "heads" / "heads.safetensors").read_bytes(),
    }
    last = tmp_path / "out" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.write_bytes(contents[damage])
    reason = f"heads-train: {last} cannot be read as a checkpoint; give another"
    for args in (["fit", *flags], ["validate", *flags, f"--ckpt_path={last}"]):
        assert main(args) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith(reason)
    assert last.read_bytes() == contents[damage]


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_measuring_untrained_heads_is_said(flags, tmp_path, capsys, subcommand):
    DraftHeads(32, 3, 1e-5).save_pretrained(tmp_path / "heads")
    said = "measuring untrained heads; give --ckpt_path or --model.heads"
    assert main([subcommand, *flags]) == 0
    assert said in capsys.readouterr().err
    assert main([subcommand, *flags, f"--model.heads={tmp_path / 'heads'}"]) == 0
    assert said not in capsys.readouterr().err


def test_a_terminated_run_says_so_and_goes_on(flags, tmp_path, capsys):
    terminate = ["--trainer.callbacks=probes.Terminate", "--trainer.callbacks.step=3", "--save_every=1"]
    assert main(["fit", *flags, *terminate]) == 143
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == "heads-train: stopped; the same command goes on from the checkpoint saved last"
    assert 0 < torch.load(tmp_path / "out" / "checkpoints" / "last.ckpt", weights_only=False)["global_step"] < 12
    early = [*terminate[:1], "--trainer.callbacks.step=1", "--save_every=9", f"--output={tmp_path / 'early'}"]
    assert main(["fit", *flags, *early]) == 143
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("heads-train: stopped; there is no checkpoint yet, so the same command starts anew")
    assert main(["fit", *flags]) == 0
    assert json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]["steps"] == 12


@pytest.mark.slow
def test_the_installed_command_reports_without_a_traceback(tmp_path):
    command = [sys.executable, "-c", "import sys; from heads_train.cli import main; sys.exit(main())"]
    done = subprocess.run([*command, "fit", "--config", "no.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("heads-train: there is no configuration no.yaml")
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(command in shown for command in ("fit", "validate", "test", "export writes", "push sends"))


@pytest.mark.parametrize("arguments", [[], ["fti"]])
def test_a_wrong_command_is_told_all_of_them(capsys, arguments):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(command in told for command in ("fit", "validate", "test", "export", "push"))


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_run_without_a_precision_takes_one_that_the_processor_multiplies(
    flags, tmp_path, capsys, monkeypatch, multiplies
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies)
    unset = [flag for flag in flags if not flag.startswith("--trainer.precision")]
    assert main(["fit", *unset, "--trainer.max_steps=1"]) == 0
    taken = "bf16-mixed" if multiplies else "32-true"
    assert f"trainer.precision: {taken}, chosen for this machine" in capsys.readouterr().err
    told = json.loads((tmp_path / "out" / "last" / "config.json").read_text())["training"]
    assert told["precision"] == taken
    assert main(["validate", *unset, "--ckpt_path=last", "--trainer.precision=64-true"]) == 0
    assert "chosen for this machine" not in capsys.readouterr().err
