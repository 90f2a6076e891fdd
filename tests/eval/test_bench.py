"""`ts-eval bench` on a tiny random model: its figures fit together, and nothing it touches stays changed."""

import itertools
import json
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from click.testing import CliRunner

import decoder
from decoder.backends.native import library as native
from decoder.backends.native.levels import NativeLevels
from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHeads
from decoder.drafters import METHODS
from decoder.model.target import Target
from decoder.sampling.draft_context import DraftContext
from ts_eval.cli import main
from ts_eval.commands.terminal import show
from ts_eval.measuring import bench, bench_page, figures, measurement, stopwatch
from ts_eval.planning.model_shape import ModelShape

LENGTHS, WIDTHS, REPEATS, NEW_TOKENS = (50, 200), (1, 3, 8), 2, 12
SHORT = ["--prompt-tokens", "40", "--new-tokens", str(NEW_TOKENS), "--repeats", str(REPEATS), "--lengths", "200,50",
         "--widths", "8,3", "--tree", "1,2", "--ngrams", "2"]  # fmt: skip
NEED_NO_HEADS = ["ar", "magicdec", "prompt-lookup", "suffix", "auto"]


def hurry(patch):
    """Let a bench measure less often than times that are to be believed need."""
    patch.setattr(measurement, "COPIED_BYTES", {"cpu": 2**16, "cuda": 2**16})
    patch.setattr(measurement, "CALLS", 2)
    patch.setattr(measurement, "POSITIONS", 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    # To draw takes longer than to measure; the bench of all methods is drawn.
    monkeypatch.setattr(bench_page, "plot", lambda results, path: path.write_bytes(b"a plot"))


@pytest.fixture
def pass_by(monkeypatch):
    """Lets seconds pass on a clock of the test's own, which goes on by a tenth of a millisecond when it is read."""
    now = [0.0]

    def add(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(time, "perf_counter", lambda: add(1e-4))
    return add


def run(data: Path, output: Path, *arguments: str, width: str = "120"):
    command = ["bench", "--data-dir", str(data), *SHORT, "--output", str(output), *arguments]
    return CliRunner(env={"COLUMNS": width}).invoke(main, command)


def load(output: Path) -> dict:
    return json.loads((output / "bench.json").read_text())


def all_parts(data: Path) -> list[str]:
    """Heads for every method that takes any, and a small model for triforce."""
    heads = ["--heads", str(data / "heads-chained"), "--heads", f"eagle3={data / 'heads-eagle3'}"]
    heads += ["--heads", f"medusa={data / 'heads-dflash'}"]
    return [*heads, "--draft-model", str(data / "reference-model")]


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory):
    """What was printed and written by a bench of all methods."""
    output = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        result = run(data, output, *all_parts(data))
    assert result.exit_code == 0, result.output
    return result.stdout, load(output), output


def statistics(content) -> list[dict]:
    """Every median in nested results."""
    if isinstance(content, list):
        return [found for value in content for found in statistics(value)]
    if not isinstance(content, dict):
        return []
    own = [content] if "median" in content else []
    return own + [found for value in content.values() for found in statistics(value)]


def test_the_report_has_every_figure_with_its_spread(measured):
    _, results, output = measured
    assert results["schema_version"] == 2
    assert results["environment"]["versions"]["torch"] == torch.__version__
    assert results["settings"]["prompt_tokens"] == 40
    assert set(results["sampling"]) == {"choose_ms", "score_ms"}
    assert [heads["kind"] for heads in results["heads"]] == ["chained", "dflash", "eagle3"]
    assert list(results["methods"]) == decoder.methods()
    found = statistics(results)
    # Sampling and heads; bandwidths, ar, draft and widths per length; steps, tokens, five parts and their sum per row.
    assert len(found) == 5 + len(LENGTHS) * (4 + len(WIDTHS)) + len(results["methods"]) * 9
    for figure in found:
        assert len(figure["values"]) == REPEATS
        assert figure["median"] == median(figure["values"])
        assert (figure["min"], figure["max"]) == (min(figure["values"]), max(figure["values"]))
    assert (output / "bench.png").read_bytes().startswith(b"\x89PNG")


def in_pairs(values: list[float], others: list[float]) -> float:
    return median(value / other for value, other in zip(values, others, strict=True))


def test_plain_decoding_is_held_against_the_time_that_its_bytes_take(measured, data):
    _, results, _ = measured
    shape = ModelShape.of(decoder.load(str(data / "reference-model")).model)
    for row, length in zip(results["lengths"], LENGTHS, strict=True):
        ar = row["ar"]
        assert row["length"] == length
        assert ar["bytes_read"] == shape.pass_bytes + shape.cache_bytes(length)
        assert ar["tokens_per_second"] == pytest.approx(1000 / ar["ms_per_token"]["median"])
        assert set(row["bandwidth"]) == {"copy", "read"}
        for name, bandwidth in row["bandwidth"].items():
            assert ar["floor_ms"][name] == pytest.approx(ar["bytes_read"] / bandwidth["median"] / 1e6)
            floors = [ar["bytes_read"] / speed / 1e6 for speed in bandwidth["values"]]
            assert ar["times_floor"][name] == pytest.approx(in_pairs(ar["ms_per_token"]["values"], floors))
            assert ar["bandwidth_share"][name] == pytest.approx(in_pairs(floors, ar["ms_per_token"]["values"]))
        assert row["draft"]["slots"] == max(64, length) if length > 64 else length
        plain = row["verify"][0]["ms"]["values"]
        for cell in (*row["verify"], row["draft"]):
            assert cell["times_plain"] == pytest.approx(in_pairs(cell["ms"]["values"], plain))


def heads_run_natively(method):
    """Whether scores of drafts are made where the heads run, in one call."""
    chained = method != "medusa" and "chained" in getattr(METHODS[method], "heads_kinds", ())  # it has DFlash's
    return native.available() and chained


def test_the_parts_of_a_step_add_up_to_it(measured):
    _, results, _ = measured
    for name, row in results["methods"].items():
        assert len(row["runs"]) == REPEATS
        for place, taken in enumerate(row["runs"]):
            assert taken["tokens"] == NEW_TOKENS
            assert list(taken["parts_ms"]) == list(stopwatch.PARTS)
            assert all(value >= 0 for value in taken["parts_ms"].values())
            assert sum(taken["parts_ms"].values()) == pytest.approx(taken["step_ms"])
            shares = {part: figure["values"][place] for part, figure in row["shares"].items()}
            assert sum(shares.values()) == pytest.approx(1)
            outside = shares["scoring"] + shares["sampling"] + shares["rest"]
            assert row["bookkeeping"]["values"][place] == pytest.approx(outside)
            assert shares["verify"] > 0 and shares["sampling"] > 0
            drafts_by_model = name not in ("ar", "prompt-lookup", "suffix")
            if name != "auto":  # which drafts where it pays
                assert (shares["draft"] > 0) == drafts_by_model, name
                assert (shares["scoring"] > 0) == (drafts_by_model and not heads_run_natively(name))
        assert row["ms_per_token"]["median"] <= row["step_ms"]["median"]
    assert results["methods"]["ar"]["tokens_per_step"] == 1.0


@pytest.mark.usefixtures("pass_by")  # where a call takes long, it is not repeated
def test_every_width_is_verified_at_every_length(data, tmp_path, monkeypatch):
    seen = []
    forward = Target.forward

    def watched(self, trees, caches, *rest, **named):
        seen.extend((len(tree), cache.length) for tree, cache in zip(trees, caches, strict=True))
        return forward(self, trees, caches, *rest, **named)

    monkeypatch.setattr(Target, "forward", watched)
    assert run(data, tmp_path, "ar").exit_code == 0
    for length, width in itertools.product(LENGTHS, WIDTHS):
        # Thrice in each round and in the warm-up; of one node plain decoding has passes at that length too.
        count = seen.count((width, length))
        assert count == 3 * (REPEATS + 1) if width > 1 else count > 3 * (REPEATS + 1)
    assert max(length for _, length in seen) == LENGTHS[-1] + measurement.AR_TOKENS - 2


def test_a_long_text_is_not_prefilled_but_attended_to(data):
    dec = decoder.load(str(data / "reference-model"))
    nothing = decoder.TokenSwiftOptions(), decoder.SamplingParams(), list(range(7)), 1, 1
    bench = measurement.Measurement({"ar": dec}, {"ar": "ar"}, {"ar": nothing[0]}, *nothing)
    pattern, cache = FullCache(7), FullCache(30)
    with dec.target.patched(), torch.inference_mode():
        dec.target.prefill(list(range(7)), pattern)
        bench._fill(cache, 30)
    assert cache.length == 30
    for filled, real in zip((*cache.keys, *cache.values), (*pattern.keys, *pattern.values), strict=True):
        assert torch.equal(filled[:, :, :30], torch.cat([real[:, :, :7]] * 5, dim=2)[:, :, :30])


def test_a_prompt_longer_than_the_text_is_cut(data, tmp_path):
    assert run(data, tmp_path, "ar", "--lengths", "1,10").exit_code == 0
    assert [row["length"] for row in load(tmp_path)["lengths"]] == [1, 10]


def test_a_slow_part_shows_as_that_part(data, tmp_path, monkeypatch, pass_by):
    def slowed(patch, owner, name):
        original = getattr(owner, name)

        def slow(*args, **kwargs):
            pass_by(0.02)
            return original(*args, **kwargs)

        patch.setattr(owner, name, slow)

    # draft_choice calls best_drafts: what took time once must not be counted twice.
    with monkeypatch.context() as patch:
        slowed(patch, DraftContext, "in_window")
        assert run(data, tmp_path / "a", "magicdec").exit_code == 0
    shares = load(tmp_path / "a")["methods"]["magicdec"]["shares"]
    assert max(shares, key=lambda part: shares[part]["median"]) == "scoring"
    assert shares["rest"]["min"] >= 0
    slowed(monkeypatch, FullCache, "keep")
    assert run(data, tmp_path / "b", "ar").exit_code == 0
    shares = load(tmp_path / "b")["methods"]["ar"]["shares"]
    assert max(shares, key=lambda part: shares[part]["median"]) == "rest"


def test_timing_changes_neither_the_text_nor_the_decoder(data, monkeypatch):
    tree = decoder.TokenSwiftOptions(tree=(1, 1))  # heads in every step, whatever the clock says
    dec = decoder.load(str(data / "reference-model"), heads=str(data / "heads-chained"))
    arguments = dict(max_new_tokens=20, method="tokenswift", options=tree, ignore_eos=True)
    plain = dec.generate(list(range(30)), **arguments).token_ids
    watch = stopwatch.Stopwatch(dec.target.wait, parts=True)
    with watch.watching():
        timed = dec.generate(list(range(30)), **arguments).token_ids
    assert timed == plain
    assert set(watch.seconds) == {"step", *stopwatch.PARTS} - {"rest"}
    # Nobody is told of what comes behind the block, whether it ended by itself or by an exception.
    told = watch.steps, dict(watch.seconds)
    dec.generate(list(range(30)), **arguments)
    assert (watch.steps, watch.seconds) == told

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(DraftHeads, "advance", fail)
    monkeypatch.setattr(NativeLevels, "fill", fail)
    failing = stopwatch.Stopwatch(dec.target.wait, parts=True)
    with pytest.raises(RuntimeError, match="no"), failing.watching():
        dec.generate(list(range(30)), **arguments)
    steps = failing.steps
    dec.generate(list(range(30)), 3, method="ar", ignore_eos=True)
    assert failing.steps == steps


def test_prefill_is_not_counted(data, monkeypatch, pass_by):
    dec = decoder.load(str(data / "reference-model"))
    prefill = Target.prefill

    def slow(*args):
        pass_by(0.5)
        return prefill(*args)

    monkeypatch.setattr(Target, "prefill", slow)
    watch = stopwatch.Stopwatch(dec.target.wait, parts=False)
    with watch.watching():
        dec.generate(list(range(30)), 2, method="ar", ignore_eos=True)
    assert 0 < watch.seconds["step"] < 0.5


def test_leading_steps_are_not_counted(data, monkeypatch, pass_by):
    dec = decoder.load(str(data / "reference-model"))
    verify, passes = Target.forward, []

    def slow_at_first(self, *args):
        passes.append(len(passes))
        pass_by(0.2 if len(passes) <= 2 else 0)
        return verify(self, *args)

    monkeypatch.setattr(Target, "forward", slow_at_first)
    watch = stopwatch.Stopwatch(dec.target.wait, parts=True, leading=2)
    with watch.watching():
        dec.generate(list(range(30)), 7, method="ar", ignore_eos=True)
    assert (watch.steps, watch.tokens, len(passes)) == (5, 5, 7)
    assert 0 < watch.seconds["verify"] < watch.seconds["step"] < 0.2
    watch = stopwatch.Stopwatch(dec.target.wait, parts=False, leading=9)
    with pytest.raises(ValueError, match="over before its step 10"), watch.watching():
        dec.generate(list(range(30)), 7, method="ar", ignore_eos=True)


def test_the_hosts_overhead_stands_beside_a_step_where_it_is_known(data, tmp_path, monkeypatch, capsys):
    assert run(data, tmp_path, "suffix").exit_code == 0
    results = load(tmp_path)
    # A CPU is no device that could wait for a host.
    assert all(row["host_overhead"] is None for row in results["methods"].values())
    monkeypatch.setenv("COLUMNS", "200")
    show(*bench_page.tables(results))
    assert "host overhead" not in capsys.readouterr().out
    taken = {"steps": 4, "tokens": 8, "seconds": {"step": 0.04}}
    traces = [{"steps": 2, "seconds": {"step": 0.02}, "busy_seconds": busy} for busy in (0.017, 0.019, None)]
    row = figures.summary([taken], [taken], traces)
    assert row["host_overhead"]["values"] == pytest.approx([0.15, 0.05])
    assert row["device_ms"]["values"] == pytest.approx([8.5, 9.5])
    results["methods"]["suffix"] |= {name: row[name] for name in ("host_overhead", "device_ms")}
    show(*bench_page.tables(results))
    shown = capsys.readouterr().out.splitlines()
    header = next(line for line in shown if line.startswith("method"))
    assert header.split()[-3:] == ["host", "overhead", "range"]
    assert next(line for line in shown if line.startswith("suffix ")).split()[-2:] == ["10.0%", "5.0-15.0%"]
    assert next(line for line in shown if line.startswith("ar  ")).split()[-2:] == ["-", "-"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_show_everything_and_fit_the_terminal(measured, data, width):
    _, results, output = measured
    shown = run(data, output, *all_parts(data), width=str(width)).stdout
    lines = shown.partition("\n\nAll of it:")[0].splitlines()
    assert max(map(len, lines)) <= width
    first = [line.split("  ")[0] for line in lines]
    for name in (
        *results["methods"],
        *(f"{length:,}" for length in LENGTHS),
        *(f"verify {w}" for w in WIDTHS),
        "draft",
    ):
        assert name in first
    assert "chained heads" in shown and "GB/s" in shown


def test_a_model_of_ones_own_without_heads_gets_the_methods_that_need_none(data, tmp_path):
    assert run(data, tmp_path, "--model", str(data / "reference-model")).exit_code == 0
    assert list(load(tmp_path)["methods"]) == NEED_NO_HEADS


def test_heads_that_read_tokens_are_timed_too_and_each_checkpoint_once(data, tmp_path):
    DraftHeads(32, kind="conditioned").save_pretrained(tmp_path / "conditioned")
    chained = str(data / "heads-chained")
    pairs = [f"tokenswift={chained}", f"medusa={chained}", f"tokenswift-fused={tmp_path / 'conditioned'}"]
    methods = ["tokenswift", "medusa", "tokenswift-fused"]
    arguments = [argument for pair in pairs for argument in ("--heads", pair)]
    result = run(data, tmp_path / "out", *methods, *arguments, "--tree", "0.0 0.1 1")
    assert result.exit_code == 0, result.output
    heads = load(tmp_path / "out")["heads"]
    assert [(row["kind"], row["checkpoint"]) for row in heads] == [
        ("chained", chained),
        ("conditioned", str(tmp_path / "conditioned")),
    ]


def test_methods_take_turns_and_the_order_rotates(data, tmp_path, monkeypatch):
    turns = []
    stream = decoder.Decoder.stream

    def watched(self, prompt, new_tokens, method, *arguments, **named):
        if len(prompt) == 40:
            turns.append(method)
        return stream(self, prompt, new_tokens, method, *arguments, **named)

    monkeypatch.setattr(decoder.Decoder, "stream", watched)
    assert run(data, tmp_path, "suffix").exit_code == 0
    # A generation as it is and one taken apart each; a warm-up round comes first.
    assert turns == ["ar", "ar", "suffix", "suffix"] * 2 + ["ar", "suffix", "suffix", "ar"]


def test_rows_carry_options_of_their_own(data, tmp_path):
    narrow = "tokenswift:tree=1:ngrams=0"
    assert run(data, tmp_path, narrow, *all_parts(data)[:2]).exit_code == 0
    results = load(tmp_path)
    assert list(results["methods"]) == ["ar", narrow]
    assert results["settings"]["options"][narrow]["tree"] == [1]


def test_the_same_bench_is_taken_over_and_another_is_refused(data, tmp_path):
    first = run(data, tmp_path, "ar")
    before = (tmp_path / "bench.json").read_bytes()
    again = run(data, tmp_path, "ar")
    assert again.exit_code == 0 and "measured before" in again.stderr
    assert again.stdout == first.stdout
    assert (tmp_path / "bench.json").read_bytes() == before

    other = run(data, tmp_path, "ar", "--seed", "5")
    assert other.exit_code == 2 and other.stderr.count("\n") == 1
    assert "(seed)" in other.stderr and "--overwrite" in other.stderr
    assert (tmp_path / "bench.json").read_bytes() == before

    assert run(data, tmp_path, "ar", "--seed", "5", "--overwrite").exit_code == 0
    assert load(tmp_path)["settings"]["seed"] == 5


def test_what_is_no_bench_is_refused(data, tmp_path):
    (tmp_path / "bench.json").write_text("[1]")
    result = run(data, tmp_path, "ar")
    assert result.exit_code == 2 and "no result of ts-eval bench" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--lengths", "50,600"], "--lengths must be at most 496"),
        (["--lengths", "0"], "--lengths must"),
        (["--widths", "0,4"], "--widths must"),
        (["--widths", "wide"], "'wide'"),
        (["--repeats", "0"], "--repeats must"),
        (["--new-tokens", "0"], "--new-tokens must"),
        (["--new-tokens", "500"], "512 positions"),
        (["--prompts", "nope.txt"], "nope.txt"),
        (["--model", "nope"], "nope"),
        (["--heads", "a", "--heads", "b"], "--heads"),
        (["medusa", "--model", "MODEL"], "medusa needs draft heads"),
        (["hf"], "hf is not decoded here and cannot be taken apart"),
        (["slow"], "slow"),
        (["--temperature", "-1"], "--temperature must"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_wrong_input_is_one_sentence(data, tmp_path, arguments, culprit):
    arguments = [str(data / "reference-model") if argument == "MODEL" else argument for argument in arguments]
    methods = [] if not arguments[0].startswith("--") else ["ar"]
    result = run(data, tmp_path / "out", *methods, *arguments)
    assert result.exit_code == 2, result.output
    assert culprit in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_of_the_usual_lengths_those_that_the_model_has_no_positions_for_are_left_out(data, tmp_path, monkeypatch):
    """A model of 32,768 positions has none for passes over as many tokens, and nobody has asked for these."""
    monkeypatch.setattr(bench.defaults, "BENCH_LENGTHS", (50, 600))
    result = run(data, tmp_path, "ar", "--lengths", "50,600")
    assert result.exit_code == 0 and "no passes over 600 tokens" in result.output, result.output
    assert load(tmp_path)["settings"]["lengths"] == [50]


def test_what_cannot_end_well_is_told_before_anything_is_measured(data, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("this was to be refused")

    monkeypatch.setattr(measurement.Measurement, "all", refuse)
    (tmp_path / "file").write_text("a file")
    result = run(data, tmp_path / "file/out", "ar")
    assert result.exit_code == 2 and "file/out" in result.stderr and result.stderr.count("\n") == 1
    # A mask of so many nodes is a terabyte.
    result = run(data, tmp_path, "ar", "--widths", "1000000")
    assert result.exit_code == 2 and "narrower --widths" in result.stderr and result.stderr.count("\n") == 1
    monkeypatch.setattr(bench, "available_memory", lambda device: 1000)
    result = run(data, tmp_path, "ar")
    assert result.exit_code == 2 and "shorter --lengths" in result.stderr and result.stderr.count("\n") == 1


def test_memory_that_ends_on_the_way_is_told_with_its_place(data, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(measurement, "PartialCache", fail)
    result = run(data, tmp_path, "ar")
    assert result.exit_code == 2 and "out of memory at 50 tokens" in result.stderr
    assert not (tmp_path / "bench.json").exists()


def test_an_output_that_is_a_file_is_refused(data, tmp_path):
    (tmp_path / "out").write_text("a file")
    result = run(data, tmp_path / "out", "ar")
    assert result.exit_code == 2 and "name a folder" in result.stderr


@pytest.mark.gpu
def test_on_a_gpu(data, tmp_path):
    long = ["--new-tokens", "64"]
    result = run(data, tmp_path, *all_parts(data), *long, "--device", "cuda", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    results = load(tmp_path)
    assert results["environment"]["device"] == "cuda" and list(results["methods"]) == decoder.methods()
    for row in results["methods"].values():
        assert 0 < row["host_overhead"]["median"] < 1
        assert row["device_ms"]["median"] > 0
