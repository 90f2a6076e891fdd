"""`--kv-dtype` and `--offload`: compared with ar's text with the same cache, and planned."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import decoder
from decoder.cache.form import CacheForm
from decoder.cache.stored import full_cache
from decoder.model.quantising import dtype_around
from ts_eval.cli import main
from ts_eval.planning import command as planning
from ts_eval.planning import plan
from ts_eval.planning.model_shape import ModelShape, read_shape

SHORT = ["--prompt-tokens", "40", "--max-new-tokens", "24", "--runs", "1"]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, list(map(str, arguments)))


def compared(data, output, *arguments, methods=("ar", "tokenswift", "auto")):
    result = run("compare", *methods, "--data-dir", data, *SHORT, "--output", output, *arguments)
    assert result.exit_code == 0, result.output
    return json.loads((output / "results.json").read_text()), result.stdout


def test_rows_are_compared_with_ar_with_the_same_cache(data, tmp_path):
    texts = {}
    for name, flags in {
        "plain": [],
        "offload": ["--offload"],
        "int8": ["--kv-dtype", "int8"],
        "both": ["--kv-dtype", "int8", "--offload"],
    }.items():
        results, shown = compared(data, tmp_path / name, *flags, "--check-lossless")
        assert all(row["identical_to_ar"] for row in results["methods"].values())
        assert results["methods"]["ar"]["audits"][0]["index"] is None
        assert results["settings"]["options_for_all"]["kv_dtype"] == (None if name in ("plain", "offload") else "int8")
        assert ("another model" in shown) == (name in ("int8", "both"))
        assert ("cache in host memory" in shown) == (name in ("offload", "both"))
        run_of = results["methods"]["ar"]["runs"][0]
        texts[name] = run_of["token_ids"], run_of["logprobs"]
    assert texts["plain"] == texts["offload"] and texts["int8"] == texts["both"]
    assert texts["plain"][1] != texts["int8"][1]


def test_rows_are_compared_with_ar_with_weights_of_four_bits(data, tmp_path):
    greedy = ["--temperature", "0", "--min-p", "0", "--repetition-penalty", "1"]
    methods = ("ar", "tokenswift", "auto", "hf")
    results, _ = compared(data, tmp_path, *greedy, "--dtype", "int4", "--check-lossless", methods=methods)
    assert results["settings"]["dtype"] == "int4" and results["settings"]["bitwise"]
    assert all(row["identical_to_ar"] for row in results["methods"].values())
    around = dtype_around()
    plain, _ = compared(data, tmp_path / "plain", *greedy, "--dtype", around, methods=("ar",))
    texts = [made["methods"]["ar"]["runs"][0]["logprobs"] for made in (results, plain)]
    assert texts[0] != texts[1]
    # The plan counts what is read of the weights: 5 bits of each of these, and 8.5 of the head's.
    short, whole = (made["methods"]["ar"]["planned_memory_bytes"] for made in (results, plain))
    layers = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 64 * 32 * 3)
    head = 32 * json.loads((data / "reference-model" / "config.json").read_text())["vocab_size"]
    assert short == whole - (layers + head) * getattr(torch, around).itemsize + layers * 5 // 8 + head * 17 // 16


def test_transformers_rows_are_not_said_to_be_the_same_model(data, tmp_path):
    greedy = ["--temperature", "0", "--min-p", "0", "--repetition-penalty", "1"]
    plain, _ = compared(data, tmp_path / "plain", *greedy, methods=("ar", "hf"))
    assert plain["methods"]["hf"]["identical_to_ar"] is True
    quantised, shown = compared(data, tmp_path / "int8", *greedy, "--kv-dtype", "int8", methods=("ar", "hf"))
    assert quantised["methods"]["hf"]["identical_to_ar"] is None
    assert "they keep keys and values as computed" in " ".join(shown.split())


def test_a_row_cannot_have_another_cache_than_ar(data, tmp_path):
    result = run("compare", "ar", "auto:kv_dtype=int8", "--data-dir", data, *SHORT, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "give --kv-dtype for all rows" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("form", list(planning.FORMS.values()), ids=list(planning.FORMS))
def test_a_plan_holds_what_a_cache_holds(data, form):
    dec = decoder.load(str(data / "reference-model"))
    shape = ModelShape.of(dec.model)
    cache = full_cache(form, 120)
    with torch.inference_mode(), dec.target.patched():
        dec.target.prefill(list(range(20)), cache)
    assert sum(shape.full_cache(120, form, torch.device("cpu"))) == cache.nbytes
    # On CUDA an offloaded cache has two layers there, one being copied while the other is used.
    device, host = shape.full_cache(120, form)
    layer = shape.cache_bytes(120) // shape.layers
    if not form.offload:
        assert (device, host) == (cache.nbytes, 0)
    else:
        arriving = 2 * (cache.nbytes - layer) // shape.layers if form.kv_dtype else 0
        assert (device, host) == (2 * layer + arriving, cache.nbytes - layer)


def test_an_offloaded_step_takes_as_long_as_its_copies():
    flags = ["--model", "llama-3.1-8b", "--acceptance", "0.5", "--json"]
    plain, offloaded, both = (
        json.loads(run("plan", *flags, *more).stdout)
        for more in ([], ["--offload"], ["--offload", "--kv-dtype", "int8"])
    )
    cache = 2 * 32 * 102400 * 8 * 128 * 2
    held = offloaded["methods"]["ar"]["bytes"]
    assert held["host_cache"] == cache and held["full_cache"] == cache * 2 // 32
    assert held["total"] == plain["methods"]["ar"]["bytes"]["total"] - cache + cache * 2 // 32
    for place, link in (("A100", 32e9), ("H100", 64e9)):
        assert offloaded["methods"]["ar"]["ms_per_step"][place]["end"] == pytest.approx(1000 * cache / link)
    # As many bytes are copied for one token as for a tree, so what is accepted is gained.
    assert offloaded["methods"]["tokenswift"]["speedup"]["0.5"] == pytest.approx(sum(0.5**level for level in range(5)))
    codes = 2 * 32 * 102400 * 8 * (128 + 2)
    assert both["methods"]["ar"]["bytes"]["host_cache"] == codes
    assert both["methods"]["ar"]["bytes_copied_per_step"] == {"mean": codes / 2, "end": codes}
    assert plain["methods"]["ar"]["bytes_copied_per_step"] == {"mean": 0, "end": 0}


def test_the_longest_text_is_the_longest_that_fits():
    shape = read_shape("llama-3.1-8b")
    options = decoder.TokenSwiftOptions(budget=4096)
    longest = planning.longest_texts(shape, 131072, 1000, options, heads=3)
    for name, form in planning.FORMS.items():
        own = replace(options, offload=form.offload, kv_dtype=form.kv_dtype)
        for memory, tokens in longest[name].items():
            room = 0.9 * int(memory) * 1e9

            def held(count, own=own):
                prompt = min(1000, count)
                return plan.plan_method("tokenswift", shape, prompt, count - prompt, own).total

            assert tokens == 0 or held(tokens) <= room
            assert tokens == 131072 or held(tokens + 1) > room
    assert longest["on the device"] == {"16": 0, "24": pytest.approx(37_000, rel=0.01), "48": 131072, "80": 131072}
    assert longest["in host memory"]["24"] == 131072


def test_the_plan_says_how_the_cache_is_kept():
    shown = run("plan", "--model", "llama-3.1-8b", "--offload", "--kv-dtype", "fp8").stdout
    assert "cache in fp8; cache in host memory" in " ".join(shown.split())
    assert "longest text, cache" in shown and "copied" in shown
    assert "copied" not in run("plan", "--model", "llama-3.1-8b").stdout


def test_forms_have_the_bytes_of_their_name():
    shape = read_shape("llama-3.1-8b")
    assert shape.kept_bytes(10, CacheForm("int8")) == shape.kept_bytes(10, CacheForm("fp8"))
    assert shape.kept_bytes(10, CacheForm()) == shape.cache_bytes(10)
