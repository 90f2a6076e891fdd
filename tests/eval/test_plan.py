"""`ts-eval plan` against the paper's figures, a real cache, and its own arithmetic."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

import decoder
from decoder.drafters.tuning.verify_costs import WIDEST
from decoder.model.quantising import dtype_around
from ts_eval.cli import main
from ts_eval.planning import command as planning
from ts_eval.planning import floors, plan
from ts_eval.planning.model_shape import ModelShape, read_shape

# The paper's review discussion: the full cache at 102,400 tokens in bf16, and head parameters of section 4.1.
FULL_CACHE_GB = {
    "llama-3.1-8b": 13.4,
    "yarn-llama-2-7b-128k": 53.7,
    "qwen2.5-1.5b": 2.9,
    "qwen2.5-7b": 5.9,
    "qwen2.5-14b": 20.1,
}
HEADS_MILLIONS = {"llama-3.1-8b": 50.3, "qwen2.5-1.5b": 7.1, "qwen2.5-7b": 38.5, "qwen2.5-14b": 78.6}
PARAMETERS_BILLIONS = {"llama-3.1-8b": 8.03, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77}


def run(*arguments: str, width: str = "120"):
    return CliRunner(env={"COLUMNS": width}).invoke(main, ["plan", *arguments])


def plan_json(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", FULL_CACHE_GB)
def test_full_caches_are_the_papers(name):
    made = plan_json("--model", name, "--max-new-tokens", "102400")
    held = made["methods"]["tokenswift"]["bytes"]
    assert round(held["full_cache"] / 1e9, 1) == FULL_CACHE_GB[name]
    assert made["partial_cache_slots"] == 4096
    assert held["draft_cache"] == held["full_cache"] * 4097 // 102400
    shown = run("--model", name, "--max-new-tokens", "102400")
    assert f"{FULL_CACHE_GB[name]} GB" in shown.stdout


@pytest.mark.parametrize("name", PARAMETERS_BILLIONS)
def test_weights_and_heads_are_those_of_the_published_models(name):
    shape = read_shape(name)
    assert round(shape.parameters / 1e9, 2) == PARAMETERS_BILLIONS[name]
    assert shape.weight_bytes == 2 * shape.parameters
    assert shape.heads_bytes(3) / 2e6 == pytest.approx(HEADS_MILLIONS[name], abs=0.1)


def test_quantised_weights_are_those_of_layers_and_head_alone():
    whole, short, bytes_of = (read_shape("llama-3.1-8b", dtype) for dtype in (dtype_around(), "int4", "int8"))
    layers, head = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336), 128256 * 4096
    # Of 32 weights half a byte each and two half precision numbers, or a byte each and one.
    saved = whole.value_bytes * (layers + head) - head * 34 // 32
    assert whole.weight_bytes - short.weight_bytes == saved - layers * 20 // 32
    assert whole.weight_bytes - bytes_of.weight_bytes == saved - layers * 34 // 32
    assert short.cache_bytes(100) == whole.cache_bytes(100)
    held = f"{whole.weight_bytes / 1e9 - (saved - layers * 20 // 32) / 1e9:.1f} GB"
    assert held in run("--model", "llama-3.1-8b", "--dtype", "int4", "--bandwidth", "40").stdout
    refused = run("--model", "llama-3.1-8b", "--dtype", "int4")
    assert refused.exit_code == 2 and "give its --bandwidth" in refused.stderr
    refused = run("--model", "llama-3.1-8b", "--dtype", "int5")
    assert refused.exit_code == 2 and "use one of auto, float32, bfloat16, float16, float64, int4" in refused.stderr


def test_a_pass_reads_a_tied_embedding_and_of_an_untied_one_only_the_head():
    tied, untied = (read_shape(name) for name in ("qwen2.5-1.5b", "llama-3.1-8b"))
    assert tied.read_parameters == tied.parameters
    assert untied.read_parameters == untied.parameters - 128256 * 4096


@pytest.fixture
def held(data, monkeypatch):
    """By what a method decodes, the bytes of the full cache and of the drafter's own caches."""

    def held(method: str, heads: str | None, options: decoder.TokenSwiftOptions, bitwise: bool = False):
        seen = {}

        class Watched(decoder.decoder.Engine):
            def step(self):
                stepped = super().step()
                [(sequence, _)] = stepped
                levels, tuned, draft_pass = (
                    getattr(sequence.drafter, name, None) for name in ("heads", "_source", "draft_pass")
                )
                levels = levels or tuned
                kept = [sequence.cache.keys, sequence.cache.values]
                own = [draft_pass.partial.keys, draft_pass.partial.values] if draft_pass else []
                own += [levels.text._pairs] if hasattr(levels, "text") else []
                for name, buffers in (("full", kept), ("draft", own)):
                    seen[name] = sum(part.nbytes for buffer in buffers for part in buffer)
                return stepped

        monkeypatch.setattr(decoder.decoder, "Engine", Watched)
        folder = None if heads is None else str(data / heads)
        dec = decoder.load(str(data / "reference-model"), heads=folder, bitwise=bitwise)
        dec.generate(list(range(100)), 20, method, options=options, ignore_eos=True)
        return dec, seen

    return held


@pytest.mark.parametrize("bitwise", [False, True])
def test_caches_are_as_large_as_the_decoders_own(held, bitwise):
    options = decoder.TokenSwiftOptions(tree=(1, 2), ngrams=2, budget=70)
    dec, seen = held("tokenswift", "heads-chained", options, bitwise)
    shape = ModelShape.of(dec.model)
    made = plan.plan_method("tokenswift", shape, 100, 20, options)
    # 1 + (1 + 2) nodes of the tree, and 2 n-grams of 4 tokens.
    assert made.nodes == 4 + 8
    assert seen == {"full": made.full_cache + made.tree - made.nodes**2, "draft": made.draft_cache}
    dec, seen = held("eagle3", "heads-eagle3", options)
    [module] = dec.heads.values()
    kept = plan.heads_cache(module, 120)
    made = plan.plan_method("eagle3", ModelShape.of(dec.model), 100, 20, options, heads_cache=kept)
    assert made.nodes == 4
    assert seen == {"full": made.full_cache + made.tree - made.nodes**2, "draft": made.draft_cache}


SMALL = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8)
WINDOWS = {
    "gemma3_text": dict(num_hidden_layers=6, num_key_value_heads=2, sliding_window=100),
    "gemma4_text": dict(
        num_hidden_layers=2, num_key_value_heads=2, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
        vocab_size_per_layer_input=48, sliding_window=100,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_take_no_more_however_long_the_text(family):
    """Gemma 4's layers with windows have other heads than those that attend to the whole text."""
    config = AutoConfig.for_model(family, max_position_embeddings=10**5, **SMALL, **WINDOWS[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    shape, target = ModelShape.of(model), decoder.Decoder(model).target
    for tokens in (50, 5000, 50_000):
        assert shape.cache_bytes(tokens) == target.kv_bytes * tokens + target.beside_bytes(tokens)
    assert shape.cache_bytes(50_000) < shape.cache_bytes(5000) + 45_000 * target.kv_bytes + 1
    if family == "gemma4_text":
        assert (shape.kv_heads, shape.head_dim) == (1, 16) and shape.windows[0][1:] == (2, 8)


@pytest.mark.parametrize(
    ("method", "heads"),
    [
        ("auto", None),
        ("auto", "heads-gated"),
        ("auto", "heads-eagle3"),
        ("suffix", None),
        ("eagle3", "heads-eagle3"),
        ("medusa", "heads-gated"),
        ("medusa", "heads-dflash"),
        ("tokenswift", "heads-gated"),
        ("tokenswift-fused", "heads-gated"),
    ],
)
def test_methods_that_choose_their_trees_have_room_for_the_widest(held, method, heads):
    options = decoder.TokenSwiftOptions(budget=70)
    dec, seen = held(method, heads, options)
    module = next(iter(dec.heads.values()), None)
    made = plan.plan_method(
        method,
        ModelShape.of(dec.model),
        100,
        20,
        options,
        heads=0 if module is None else module.num_heads,
        heads_bytes=0 if module is None else sum(weight.nbytes for weight in module.parameters()),
        heads_cache=plan.heads_cache(module, 120),
    )
    assert made.nodes == WIDEST and (made.drafter > 0) == (heads is not None)
    assert seen == {"full": made.full_cache + made.tree - made.nodes**2, "draft": made.draft_cache}
    assert (made.draft_cache > 0) == (heads in ("heads-eagle3", "heads-dflash") or method == "tokenswift")
    assert (made.draft_reads > 0) == (heads is not None)


def test_floors_follow_from_bytes_and_bandwidth():
    made = plan_json("--model", "llama-3.1-8b", "--gpu", "A100", "--gpu", "H200",
                     "--acceptance", "0.5", "--acceptance", "1")  # fmt: skip
    ar, swift = made["methods"]["ar"], made["methods"]["tokenswift"]
    weights = (8030261248 - 128256 * 4096) * 2
    cache = 2 * 32 * 102400 * 8 * 128 * 2
    assert ar["bytes_read_per_step"] == {"mean": weights + cache / 2, "end": weights + cache}
    assert ar["ms_per_step"]["A100"]["end"] == pytest.approx(1000 * (weights + cache) / 2.039e12)
    assert ar["ms_per_step"]["H200"]["mean"] == pytest.approx(1000 * (weights + cache / 2) / 4.8e12)
    # One pass more over the weights, the heads and the partial cache, for four drafted tokens.
    step = 2 * weights + 2 * 3 * (4096**2 + 2 * 4096) + cache * 4097 / 102400 + cache / 2
    assert swift["bytes_read_per_step"]["mean"] == pytest.approx(step)
    tokens = 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16
    assert swift["speedup"]["0.5"] == pytest.approx(tokens * (weights + cache / 2) / step)
    assert swift["speedup"]["1"] == pytest.approx(5 * (weights + cache / 2) / step)
    assert ar["speedup"] == {"0.5": 1.0, "1": 1.0}
    # auto has heads without a pass of their own; ten tokens copied from the text are two at most if half are right.
    assert made["methods"]["auto"]["depth"] == 3 and made["methods"]["auto"]["bytes"]["drafter"]
    assert 1.9 < made["methods"]["prompt-lookup"]["speedup"]["0.5"] < 2
    assert "triforce" not in made["methods"]


def test_triforce_is_planned_with_its_small_model():
    made = plan_json("--model", "qwen2.5-7b", "--draft-model", "qwen2.5-1.5b")
    small = read_shape("qwen2.5-1.5b")
    assert made["methods"]["triforce"]["bytes"]["drafter"] == small.weight_bytes


def test_given_and_measured_bandwidths_stand_beside_named_ones(data, monkeypatch):
    monkeypatch.setattr(planning, "measured_bandwidth", lambda device: 50e9)
    made = plan_json("--data-dir", str(data), "--bandwidth", "100", "--measure", "--gpu", "H100")
    assert made["bandwidths"] == {"H100": floors.GPUS["H100"].bandwidth, "given": 100e9, "measured": 50e9}
    read = made["methods"]["ar"]["bytes_read_per_step"]["mean"]
    assert made["methods"]["ar"]["ms_per_step"]["measured"]["mean"] == pytest.approx(1000 * read / 50e9)


def test_measured_bandwidth_reads_the_whole_tensor(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(planning.time, "perf_counter", lambda: next(ticks))
    assert planning.measured_bandwidth(torch.device("cpu"), gigabytes=0.001) == pytest.approx(1e6)


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_tables_fit_the_terminal(width):
    result = run("--model", "llama-3.1-8b", width=width)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= int(width)
    assert "A100 H100 H200" in result.stdout and "16.1 GB" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--model", "nope.json"], "nope.json"),
        (["--draft-model", "nope"], "nope"),
        (["--gpu", "B300"], "B300"),
        (["--max-new-tokens", "0"], "--max-new-tokens must"),
        (["--acceptance", "1.5"], "--acceptance must"),
        (["--bandwidth", "0"], "--bandwidth must"),
        (["--budget", "3"], "--budget must"),
        (["--tree", "x"], "--tree"),
        (["--dtype", "float3"], "float3"),
    ],
)
def test_wrong_input_is_one_sentence(data, arguments, culprit):
    result = run("--data-dir", str(data), *arguments)
    assert result.exit_code == 2, result.output
    assert culprit in result.stderr and result.stderr.count("\n") == 1


def test_a_text_beyond_the_models_positions_is_said_to_be_refused():
    """QwQ-32B as published ends at 40,960 positions, Llama-3.1 at 131,072."""
    for name, ends in (("qwq-32b", True), ("llama-3.1-8b", False)):
        output = " ".join(run("--model", name, "--max-new-tokens", "102400").output.split())
        assert ("ends at 40,960 positions: a text of this length is refused" in output) == ends
    assert "refused" not in run("--model", "qwq-32b", "--max-new-tokens", "40960").output


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    for name, text in (("story.txt", "It was a dark night."), ("list.json", "[1]"), ("other.json", '{"a": 1}')):
        (tmp_path / name).write_text(text)
        result = run("--model", str(tmp_path / name))
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        assert name in result.stderr


def test_a_comparison_plans_its_rows_by_the_same_arithmetic(data):
    dec = decoder.load(str(data / "reference-model"))
    shape = ModelShape.of(dec.model)
    model = AutoModelForCausalLM.from_pretrained(data / "reference-model", dtype=torch.float32)
    assert shape.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(ValueError, match="no plan is known"):
        plan.plan_method("hf", shape, 10, 10, decoder.TokenSwiftOptions())
    with pytest.raises(ValueError, match="small model"):
        plan.plan_method("triforce", shape, 10, 10, decoder.TokenSwiftOptions())


@pytest.mark.parametrize("name", ["deepseek-r1-distill-qwen-32b", "qwq-32b"])
def test_a_32b_model_and_its_cache_fit_80_gb_where_two_devices_share_it(name):
    one, two = (plan_json("--model", name, "--tensor-parallel-size", str(size)) for size in (1, 2))
    whole, half = (made["methods"]["tokenswift"]["bytes"] for made in (one, two))
    # Norms, two in each layer and a last one, are whole in both.
    norms = 2 * (2 * 64 + 1) * 5120
    assert half["weights"] == (whole["weights"] - norms) // 2 + norms
    assert 2 * half["full_cache"] == whole["full_cache"] and 2 * half["draft_cache"] == whole["draft_cache"]
    assert (half["drafter"], half["logits"]) == (whole["drafter"], whole["logits"])
    assert half["total"] < 80e9 < whole["total"]
    # An embedding of its own is read by the row.
    read = (2 * read_shape(name).read_parameters - norms) // 2 + norms
    assert two["methods"]["ar"]["bytes_read_per_step"]["end"] == read + half["full_cache"]
    assert "each of 2 processes" in " ".join(run("--model", name, "--tensor-parallel-size", "2").stdout.split())


def test_numbers_of_processes_that_cannot_share_a_model_are_refused():
    told = run("--model", "qwq-32b", "--tensor-parallel-size", "3")
    assert told.exit_code == 2
    assert "3 processes cannot share the 40 query and 8 KV heads of this qwen2 evenly: start 1 or 2" in told.stderr
    told = run("--model", "qwq-32b", "--tensor-parallel-size", "0")
    assert told.exit_code == 2 and "--tensor-parallel-size must be at least 1" in told.stderr
