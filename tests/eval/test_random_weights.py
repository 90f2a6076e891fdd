"""`ts-eval bench --random-weights`: a model made from its configuration alone."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import decoder
from decoder.model.quantising import dtype_name
from ts_eval.cli import main
from ts_eval.comparing.method_spec import NEED_DRAFT_MODEL, MethodSpec
from ts_eval.measuring import measurement, random_weights
from ts_eval.measuring.random_weights import RandomSources
from ts_eval.planning.model_shape import CONFIGS, ModelShape, read_shape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHORT = ["--prompt-tokens", "40", "--new-tokens", "12", "--repeats", "1", "--lengths", "50,200", "--widths", "8",
         "--tree", "1,2", "--ngrams", "2"]  # fmt: skip


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measurement, "COPIED_BYTES", {"cpu": 2**16, "cuda": 2**16})
    monkeypatch.setattr(measurement, "CALLS", 2)


def run(output: Path, *arguments: str):
    # No data folder is needed.
    command = ["bench", "--data-dir", str(output / "none"), *SHORT, "--output", str(output), *arguments]
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, command)


def sources(config: str, *methods: str, seed: int = 0) -> RandomSources:
    return RandomSources.of([MethodSpec.parse(text) for text in methods], config, seed)


def test_the_model_is_the_configurations_in_the_dtype_asked_for(config):
    model = sources(config, "ar").load("cpu", "bfloat16")[None].model
    assert ModelShape.of(model) == read_shape(config, "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    matrices = [parameter.float() for parameter in model.parameters() if parameter.ndim == 2]
    assert all(0.01 < matrix.std() < 0.04 for matrix in matrices)
    whole = sources(config, "ar").load("cpu", "auto")[None].model
    assert whole.dtype == torch.float32
    # They are what a checkpoint of the configuration's dtype could hold.
    assert all(torch.equal(one, one.bfloat16().float()) for one in whole.parameters())
    for dtype in ("int4", "int8"):
        short = sources(config, "ar").load("cpu", dtype)[None].model
        assert dtype_name(short) == dtype and ModelShape.of(short) == read_shape(config, dtype)


def test_tied_embeddings_stay_tied(tmp_path):
    path = tmp_path / "tied.json"
    path.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    model = sources(str(path), "ar").load("cpu", "float32")[None].model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_seed_decides_the_weights_and_the_callers_generator_stays_as_it_was(config):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (sources(config, "ar", seed=seed).load("cpu", "float32")[None] for seed in (5, 5, 6))
    assert torch.equal(torch.rand(1), expected)
    weights = [dec.model.lm_head.weight for dec in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_each_method_gets_heads_of_its_kind_that_do_something(config):
    methods = ("ar", "tokenswift", "medusa", "tokenswift-fused:tree=1,2", "auto", "suffix")
    made = sources(config, *methods)
    kinds = {text: name.removeprefix("random ") for text, name in made.heads.items()}
    assert kinds == {
        "tokenswift": "chained",
        "medusa": "independent",
        "tokenswift-fused:tree=1,2": "gated",
        "auto": "gated",
    }
    loaded = made.load("cpu", "bfloat16")
    for name in made.heads.values():
        (heads,) = loaded[name].heads.values()
        assert heads.kind == name.removeprefix("random ") and heads.num_heads == 3
        assert all(parameter.any() for parameter in heads.parameters())


def test_a_bench_of_random_weights_has_every_figure_and_judges_no_method(config, tmp_path):
    methods = ["tokenswift", "tokenswift-fused", "medusa", "auto", "--random-weights", config]
    result = run(tmp_path, *methods, "--tokens-per-step", "medusa=1.5@4", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench.json").read_text())
    settings = results["settings"]
    assert settings["random_weights"] is True and settings["model"] == config and settings["dtype"] == "bfloat16"
    assert settings["prompt_name"] == "random tokens" and settings["prompt_tokens"] == 40
    assert settings["tokens_per_step"] == {"medusa": {"tokens": 1.5, "nodes": 4}}
    assert settings["widths"] == [1, 4, 8]
    assert [heads["kind"] for heads in results["heads"]] == ["chained", "gated", "independent"]
    assert results["computed"]["tokens"] == 200 and list(results["computed"]["methods"]) == ["ar", "medusa"]
    assert results["computed"]["methods"]["medusa"]["steps"] == pytest.approx(200 / 1.5)

    assert "small.json, random weights" in result.stdout and "Weights are random" in result.stdout
    shown = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.endswith("%")}
    assert shown["ar"][3] == "1.00" and "-" not in shown["ar"]
    for name in ("tokenswift", "tokenswift-fused", "medusa", "auto"):
        assert shown[name][3:5] == ["-", "-"]
    row, ar = results["computed"]["methods"]["medusa"], results["computed"]["methods"]["ar"]
    lines = result.stdout.partition("Computed, not measured: 200 tokens")[2].split()
    assert f"{ar['pass_ms']:.2f}" in lines and f"{row['pass_ms']:.2f}" in " ".join(lines)
    assert f"{row['speedup']:.2f}x" in lines


def test_without_methods_all_are_timed_that_need_no_small_model(config, tmp_path):
    assert run(tmp_path, "--random-weights", config).exit_code == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    assert list(results["methods"]) == [name for name in decoder.methods() if name not in NEED_DRAFT_MODEL]
    assert results["computed"] is None


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--model", "x"], "leave out --model"),
        (["--heads", "x"], "leave out --heads"),
        (["--draft-model", "x"], "leave out --draft-model"),
        (["--prompts", "x"], "leave out --prompts"),
        (["triforce"], "triforce drafts with a small model"),
        (["--dtype", "int5"], "unknown dtype 'int5'"),
        (["--device", "abacus"], "abacus"),
        (["--tokens-per-step", "ar=2@4"], "one token per step"),
        (["--random-weights", "llama-3.1-9b"], "known by name are deepseek-r1-distill-qwen-32b, llama-3.1-8b"),
        (["--random-weights", __file__], "is not JSON: "),
        (["--lengths", "600"], "--lengths must be at most 496"),
    ],
)
def test_wrong_input_is_one_sentence(config, tmp_path, arguments, culprit):
    result = run(tmp_path / "out", "ar", "--random-weights", config, *arguments)
    assert result.exit_code == 2, result.output
    assert culprit in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_told_before_it_is_made(config, tmp_path, monkeypatch):
    monkeypatch.setattr(random_weights, "available_memory", lambda device: 50_000)
    result = run(tmp_path / "out", "ar", "--random-weights", config)
    assert result.exit_code == 2 and "are free on cpu" in result.stderr and result.stderr.count("\n") == 1

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.undo()
    monkeypatch.setattr(random_weights.AutoModelForCausalLM, "from_config", fail)
    monkeypatch.setattr(random_weights, "read_shape", lambda *_: ModelShape(1, 1, 1, 1, 1, 1, 1, 1, 1))
    result = run(tmp_path / "out", "ar", "--random-weights", config)
    assert result.exit_code == 2 and "memory ran out" in result.stderr and result.stderr.count("\n") == 1


def test_every_shipped_configuration_is_of_a_model_that_can_be_decoded():
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    assert "llama-3.1-8b" in names
    for name in names:
        sources(name, "ar").refuse_missing([])


@pytest.mark.gpu
def test_on_a_gpu(config, tmp_path):
    methods = ["tokenswift", "auto", "--random-weights", config, "--new-tokens", "64"]
    result = run(tmp_path, *methods, "--device", "cuda", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    model = sources(config, "ar").load("cuda", "auto")[None].model
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("cuda", torch.bfloat16)}
    assert all(buffer.device.type == "cuda" for buffer in model.buffers())
