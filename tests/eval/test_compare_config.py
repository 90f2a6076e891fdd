"""A comparison as a YAML file, and rows with heads of their own."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from decoder import DraftHeads
from ts_eval import compare as experiment
from ts_eval.cli import main
from ts_eval.comparing.method_spec import MethodSpec

SHORT = ["--prompt-tokens", "40", "--max-new-tokens", "8", "--runs", "1", "--tree", "1,2", "--ngrams", "2"]


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["compare", *map(str, arguments)])


def load(output: Path) -> dict:
    return json.loads((output / "results.json").read_text())


def settings_of(output: Path) -> dict:
    return load(output)["settings"]


def test_every_run_leaves_a_file_that_repeats_it(data, tmp_path):
    methods = ["tokenswift", "tokenswift:tree=1,1:ngrams=0", "prompt-lookup"]
    flags = [*SHORT, "--seed", "3", "--min-p", "0.05", "--marks", "4,8", "--batch", "2", "--check-lossless"]
    heads = f"tokenswift={data / 'heads-chained'}"
    first = run(*methods, "--data-dir", data, *flags, "--heads", heads, "--output", tmp_path / "a")
    assert first.exit_code == 0, first.output
    again = run("--config", tmp_path / "a/run.yaml", "--output", tmp_path / "b")
    assert again.exit_code == 0, again.output
    assert settings_of(tmp_path / "a") == settings_of(tmp_path / "b")
    a, b = load(tmp_path / "a")["methods"], load(tmp_path / "b")["methods"]
    assert {name: row["runs"][0]["token_ids"] for name, row in a.items()} == {
        name: row["runs"][0]["token_ids"] for name, row in b.items()
    }
    assert "audits" in b["ar"]
    files = [yaml.safe_load((tmp_path / name / "run.yaml").read_text()) for name in "ab"]
    assert files[0] == files[1] and files[0]["methods"] == methods and files[0]["tree"] == [1, 2]


def test_what_is_typed_comes_before_the_file(data, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"methods: prompt-lookup\nmax-new-tokens: 8\nruns: 1\nprompt_tokens: 30\nseed: 5\ndata_dir: {data}\ntree: 1,2\n"
    )
    assert run("--config", config, "--seed", "6", "--output", tmp_path / "out").exit_code == 0
    settings = settings_of(tmp_path / "out")
    assert settings["methods"] == ["ar", "prompt-lookup"]
    assert (settings["seed"], settings["max_new_tokens"], settings["prompt_tokens"]) == (6, 8, 30)
    assert settings["options_for_all"]["tree"] == [1, 2]
    assert run("suffix", "--config", config, "--output", tmp_path / "typed").exit_code == 0
    assert settings_of(tmp_path / "typed")["methods"] == ["ar", "suffix"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("methods: [ar]\nmax_tokens: 8", "has an unknown key 'max_tokens': keys are methods, "),
        ("methods: [ar]\nruns: many", "runs: 'many' is not a valid integer"),
        ("methods: [ar]\ntree: [x, y]", "tree: "),
        ("methods: [ar]\nmarks: {a: 1}", "marks: "),
        ("methods: [ar]\nsink: -1", "sink: sink must be "),
        ("methods: [ar]\nsuppress_tokens: 7", "suppress_tokens: "),
        ("- ar", "is no YAML mapping such as methods: [ar, tokenswift]"),
        ("methods: [ar", "is not YAML: "),
        (None, "No such file or directory"),
    ],
)
def test_a_wrong_file_is_told_with_its_key(tmp_path, content, reason):
    config = tmp_path / "wrong.yaml"
    if content is not None:
        config.write_text(content)
    result = run("--config", config, "--output", tmp_path / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"ts-eval: {config}") and reason in result.stderr
    assert not (tmp_path / "out").exists()


def test_two_checkpoints_stand_side_by_side(data, tmp_path):
    shutil.copytree(data / "heads-chained", tmp_path / "mine")
    rows = [f"tokenswift:heads={tmp_path / 'mine'}", "tokenswift", f"auto:heads={data / 'heads-gated'}"]
    result = run(*rows, "--data-dir", data, *SHORT, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    results = load(tmp_path / "out")
    heads = [str(tmp_path / "mine"), str(data / "heads-chained"), str(data / "heads-gated")]
    assert [results["settings"]["heads"][row] for row in rows] == heads
    assert all(results["methods"][row]["identical_to_ar"] for row in rows)
    assert set(heads) < set(results["settings"]["weights"])


def test_heads_of_a_row_are_refused_where_there_are_none_to_use(data, tmp_path):
    assert MethodSpec.parse("auto:heads=a/b:budget=64").heads == "a/b"
    for row, reason in (
        ("ar:heads=x", "ar drafts without heads: leave out 'heads=x' in 'ar:heads=x'"),
        ("auto:heads=", "unknown option 'heads='"),
        ("sufix", "unknown method 'sufix' (is suffix meant?)"),
        ("auto:tre=1,2", "unknown option 'tre=1,2' in 'auto:tre=1,2' (is tree meant?)"),
        ("hf:heads=x", "takes no options"),
        ("tokenswift:heads=nowhere", "there is no heads folder nowhere"),
    ):
        result = run(row, "--data-dir", data, *SHORT, "--output", tmp_path / "out")
        assert result.exit_code == 2 and reason in result.stderr, result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "tree", "ngrams"),
    [
        ((), None, None),
        (("--preset", "paper"), [1, 3, 3, 3], 20),
        (("--preset", "paper", "--tree", "1,2"), [1, 2], 20),
        (("--ngrams", "0"), None, 0),
    ],
)
def test_the_papers_tree_is_a_preset_and_none_is_chosen_by_cost(data, tmp_path, flags, tree, ngrams):
    brief = ("--prompt-tokens", "20", "--max-new-tokens", "4", "--runs", "1", "--data-dir", data)
    done = run("tokenswift", *brief, *flags, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    options = settings_of(tmp_path)["options"]["tokenswift"]
    assert (options["tree"], options["ngrams"]) == (tree, ngrams)
    row = load(tmp_path)["methods"]["tokenswift"]
    assert row["nodes_per_step"] == sum(each["nodes"] for each in row["runs"]) / sum(e["steps"] for e in row["runs"])
    words = " ".join(done.output.split())
    assert (f"tokenswift {row['nodes_per_step']:.1f} (--preset paper takes the paper's)" in words) is (tree is None)
    assert ("draft pass is made where it pays" in words) is (tree is None)
    assert ("tree by what pays here" in words) is (tree is None)


def test_the_papers_preset_has_the_sampler_of_the_model_by_name(data, tmp_path):
    """Table 10; what is typed comes first."""
    shutil.copytree(data / "reference-model", tmp_path / "Qwen2.5-7B")
    brief = ("--prompt-tokens", "20", "--max-new-tokens", "4", "--runs", "1", "--data-dir", data)
    command = ("ar", "--model", tmp_path / "Qwen2.5-7B", "--preset", "paper", *brief)
    assert run(*command, "--output", tmp_path / "a").exit_code == 0
    assert run(*command, "--min-p", "0.1", "--output", tmp_path / "b").exit_code == 0
    found = [settings_of(tmp_path / name)["sampling"] for name in "ab"]
    assert [each["min_p"] for each in found] == [0.05, 0.1]
    assert [each["repetition_penalty"] for each in found] == [1.15, 1.15]
    refused = run("ar", "--preset", "nobody", *brief, "--output", tmp_path / "c")
    assert refused.exit_code == 2 and "nobody" in refused.stderr and not (tmp_path / "c").exists()


def test_heads_beside_the_models_folder_are_its_own(data, tmp_path):
    shutil.copytree(data / "reference-model", tmp_path / "models/tiny")
    brief = ("--prompt-tokens", "20", "--max-new-tokens", "4", "--runs", "1", "--data-dir", data)
    command = ("tokenswift", "--model", tmp_path / "models/tiny", *brief)
    refused = run(*command, "--output", tmp_path / "a")
    assert refused.exit_code == 2 and "tokenswift needs draft heads" in refused.stderr
    shutil.copytree(data / "heads-gated", tmp_path / "models/heads-tiny")
    assert run(*command, "--output", tmp_path / "b").exit_code == 0
    assert settings_of(tmp_path / "b")["heads"]["tokenswift"] == str(tmp_path / "models/heads-tiny")
    assert run(*command, "--heads", data / "heads-chained", "--output", tmp_path / "c").exit_code == 0
    assert settings_of(tmp_path / "c")["heads"]["tokenswift"] == str(data / "heads-chained")


def test_a_data_folders_model_has_its_heads_by_path_too(data, tmp_path):
    shutil.copytree(data / "reference-model", tmp_path / "reference-model")
    for kind in ("chained", "gated"):
        DraftHeads(32, kind=kind).save_pretrained(tmp_path / f"heads-{kind}", base_model="data/reference-model")
    brief = ("auto", "tokenswift", "--prompt-tokens", "20", "--max-new-tokens", "4", "--runs", "1")
    wanted = {"auto": str(tmp_path / "heads-gated"), "tokenswift": str(tmp_path / "heads-chained"), "ar": None}
    shutil.copytree(data / "pg19", tmp_path / "pg19")
    for place, model in enumerate(
        ([], ["--model", tmp_path / "reference-model"], ["--model", f"{tmp_path}/reference-model/"])
    ):
        result = run(*brief, *model, "--data-dir", tmp_path, "--output", tmp_path / str(place))
        assert result.exit_code == 0, result.output
        assert settings_of(tmp_path / str(place))["heads"] == wanted and "without draft heads" not in result.stderr


def test_rows_that_run_without_heads_are_named(data, tmp_path):
    shutil.copytree(data / "reference-model", tmp_path / "lonely")
    brief = ("auto", "suffix", "--prompt-tokens", "20", "--max-new-tokens", "4", "--runs", "1", "--data-dir", data)
    result = run(*brief, "--model", tmp_path / "lonely", "--output", tmp_path / "out")
    assert result.exit_code == 0
    assert f"auto: without draft heads, as none for it lie beside {tmp_path / 'lonely'}; --heads" in result.stderr


def test_what_only_python_can_set_is_repeated_from_the_file_too(data, tmp_path):
    """Options without a flag, such as sink, are written to run.yaml as well."""
    fields = {"options": {"tree": (1, 2), "ngrams": 2, "sink": 3, "cache": "static"}}
    brief = {"max_new_tokens": 6, "prompt_tokens": 30, "runs": 1, "data_dir": data}
    experiment.compare(["tokenswift"], output=tmp_path / "a", sampling={"suppress_tokens": (5, 7)}, **fields, **brief)
    again = run("--config", tmp_path / "a/run.yaml", "--output", tmp_path / "b")
    assert again.exit_code == 0, again.output
    assert settings_of(tmp_path / "a") == settings_of(tmp_path / "b")
    assert settings_of(tmp_path / "b")["options_for_all"]["sink"] == 3
    files = [yaml.safe_load((tmp_path / name / "run.yaml").read_text()) for name in "ab"]
    assert [file["suppress_tokens"] for file in files] == [[5, 7], [5, 7]]
    assert [file["cache"] for file in files] == ["static", "static"]
