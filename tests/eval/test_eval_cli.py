"""The command as installed, the demo, and the data folder's whereabouts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tiny_reference import save_model
from transformers import AutoTokenizer

import decoder
from ts_eval import demo
from ts_eval.cli import main
from ts_eval.comparing import data_dir
from ts_eval.comparing.method_spec import LLAMA


def test_methods_lists_the_decoders_transformers_and_llama_cpps_own():
    names = CliRunner().invoke(main, ["methods"]).stdout.split()
    assert names == [*decoder.methods(), "hf", "hf-assisted", "hf-prompt-lookup", *LLAMA]


@pytest.mark.parametrize(("command", "flag"), [("compare", "--check-lossless"), ("bench", "--widths")])
def test_help_does_not_wait_for_torch(command, flag):
    code = f"import sys; from ts_eval.cli import main; main(['{command}', '--help'], standalone_mode=False); "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert flag in done.stdout


NEEDED = {"compare": ["ar"], "metrics": ["text.txt"], "reproduce": ["table-1"], "report": ["folder"]}
NO_NUMBERS = ("1" * 401, "inf", "1e400", "nan")
FLAGS = [
    (name, parameter.opts[0], value)
    for name, command in main.commands.items()
    for parameter in command.params
    if isinstance(parameter, click.Option) and not parameter.is_flag and not parameter.is_eager
    for value in ("caf\udce9", *([] if isinstance(parameter.type, click.types.StringParamType) else NO_NUMBERS))
]


@pytest.mark.parametrize(("command", "flag", "value"), FLAGS, ids=lambda one: one if len(one) < 20 else "digits")
def test_a_flag_that_no_float_or_utf8_holds_is_refused_in_a_sentence(command, flag, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [command, *NEEDED.get(command, []), flag, value])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1 and flag in result.stderr and not result.stdout


def test_no_command_shows_the_help():
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert "compare" in result.output


def test_demo_writes_both_comparisons_and_runs_twice(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--data-dir", str(data), "--prompt-tokens", "40", "--max-new-tokens", "12", "--runs", "1"]
    assert demo.main(arguments) == 0
    for name, temperature in (("demo", 1.0), ("demo-greedy", 0.0)):
        results = json.loads(Path(f"runs/{name}/results.json").read_text())
        assert results["settings"]["sampling"]["temperature"] == temperature
        assert list(results["methods"]) == ["ar", "auto", "tokenswift"][: 2 + (name == "demo")]
        assert all(row["identical_to_ar"] for row in results["methods"].values())
    assert demo.main(arguments) == 0
    shown = capsys.readouterr()
    assert "3 finished generations taken over" in shown.err
    assert "make smollm2" in shown.out and "-- " not in shown.out


def test_demo_shows_what_the_chat_model_answers(data, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "data"
    save_model(folder / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder / "smollm2")
    shutil.copytree(data / "heads-gated", folder / "heads-smollm2")
    shutil.copytree(Path(__file__).parents[2] / "data/prompts", folder / "prompts")
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--data-dir", str(folder), "--max-new-tokens", "12"]) == 0
    shown = capsys.readouterr().out
    for name in ("demo", "demo-greedy"):
        results = json.loads(Path(f"runs/{name}/results.json").read_text())
        assert all(row["identical_to_ar"] for row in results["methods"].values())
        assert [run["prompt"] for run in results["methods"]["ar"]["runs"]] == ["a question", "a story"]
    assert shown.count("-- a question\n") == shown.count("-- a story\n") == 2
    assert " ".join(shown.split()).count(demo.ABOUT_PAPER) == 1
    for command in (line for line in shown.splitlines() if line.startswith("$ ")):
        flags = [word for word in command.split() if word.startswith("--")]
        assert len(flags) == len(set(flags)) and "--model data/smollm2 " in command


def of_rows(*runs):
    """Results of rows whose texts took so many seconds for so many tokens."""
    rows = zip(("ar", "auto", "tokenswift"), runs, strict=False)
    return {
        "methods": {
            name: {"runs": [{"decode_seconds": took, "new_tokens": tokens} for took, tokens in texts]}
            for name, texts in rows
        }
    }


@pytest.mark.parametrize(
    ("seconds", "took", "left", "length"),
    [
        (4, 20, 26, 96),  # 2 rows of 2 texts at 1/24 s a token, and 8 s around them
        (2, 14, 20, 128),
        (1, 11, 100, 192),
        (4, 20, 8, 48),
        (40, 200, 60, 48),
        (4, 0.1, 17, 96),  # what was taken over took no time
    ],
)
def test_demo_gives_a_slow_machine_shorter_texts(seconds, took, left, length):
    results = of_rows(*[[(seconds / 2, 48), (seconds / 2, 48)]] * 3)
    assert demo.affordable(results, took, left) == length


def test_demo_takes_over_the_length_of_the_one_before(tmp_path):
    assert demo.length_before(str(tmp_path)) is None
    for found, expected in ((64, 64), (12, None), (None, None)):
        (tmp_path / "results.json").write_text(json.dumps({"settings": {"max_new_tokens": found}}))
        assert demo.length_before(str(tmp_path)) == expected
    (tmp_path / "results.json").write_text("{")
    assert demo.length_before(str(tmp_path)) is None


def test_demo_finds_the_data_folder_as_compare_does(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert demo.main([f"--data-dir={tmp_path / 'nowhere'}"]) == 2
    refused = capsys.readouterr()
    assert "nowhere does not exist" in refused.err and not refused.out
    monkeypatch.setenv("TS_DATA_DIR", str(data))
    assert demo.main(["--prompt-tokens", "20", "--max-new-tokens", "4", "--runs", "1"]) == 0


class Record:
    """An installed distribution with pip's record of where it came from."""

    def __init__(self, record: dict | None):
        self.record = record

    def read_text(self, name: str) -> str | None:
        return json.dumps(self.record) if self.record else None


@pytest.mark.parametrize("extra", [{"dir_info": {"editable": True}}, {"dir_info": {}}])
def test_data_is_found_in_the_checkout_it_was_installed_from(tmp_path, monkeypatch, extra):
    checkout = tmp_path / "a check-out"
    (checkout / "data").mkdir(parents=True)
    record = Record({"url": (checkout / "packages/eval").as_uri(), **extra})
    monkeypatch.setattr(data_dir.metadata, "distribution", lambda name: record)
    assert data_dir.find_data_dir() == checkout / "data"


@pytest.mark.parametrize("record", [None, {"url": "https://example.org/eval.whl"}, {"url": "file:///nowhere/at/all"}])
def test_without_a_checkout_it_says_how_to_get_the_data(tmp_path, monkeypatch, record):
    monkeypatch.setattr(data_dir.metadata, "distribution", lambda name: Record(record))
    with pytest.raises(FileNotFoundError, match="--data-dir or TS_DATA_DIR"):
        data_dir.find_data_dir()
    monkeypatch.delenv("TS_DATA_DIR", raising=False)
    result = CliRunner().invoke(main, ["compare", "ar", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2 and "TS_DATA_DIR" in result.stderr and result.stderr.count("\n") == 1


def test_the_data_folder_may_come_from_the_environment(data, tmp_path):
    arguments = ["compare", "ar", "--prompt-tokens", "20", "--max-new-tokens", "4", "--output", str(tmp_path)]
    result = CliRunner(env={"TS_DATA_DIR": str(data)}).invoke(main, [*arguments, "--runs", "1"])
    assert result.exit_code == 0, result.output
