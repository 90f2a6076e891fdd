"""What `heads-train` answers before Lightning is imported."""

import re
import subprocess
import sys

import pytest

from heads_train import command, keep_help

FLAG = re.compile(r"--[\w.]+")
SLOW_IMPORTS = ("torch", "lightning", "transformers", "datasets")


def kept():
    return {file.name: file.read_text(encoding="utf-8") for file in command.KEPT.iterdir()}


def test_the_kept_help_of_a_training_run_has_its_flags(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    made = dict(keep_help.made(["fit", "export", "push"]))
    for name, text in made.items():
        assert set(FLAG.findall(kept()[name])) == set(FLAG.findall(text)), "run python -m heads_train.keep_help"


@pytest.mark.slow
def test_the_kept_help_is_what_the_parser_writes(tmp_path):
    subprocess.run([sys.executable, "-m", "heads_train.keep_help", str(tmp_path)], check=True, timeout=300)
    written = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert kept() == written, "run python -m heads_train.keep_help"


@pytest.mark.parametrize("args", [[], ["--help"], ["fit", "--help"], ["export", "-h"], ["--version"], ["ft"]])
def test_nothing_slow_is_imported_for_help_or_a_typing_error(args):
    told = f"print([name for name in {SLOW_IMPORTS} if name in sys.modules])"
    words = f"import sys; from heads_train.command import main; main({args}); {told}"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_mistyped_command_is_told_with_the_one_that_is_near(capsys):
    assert command.main(["ft", "--config", "smollm2-gated.yaml"]) == 2
    assert capsys.readouterr().err == "heads-train: there is no command ft: is fit meant?\n"
    assert command.main(["learn"]) == 2
    assert capsys.readouterr().err.endswith("use one of fit, validate, test, push, export\n")


def test_another_lightning_has_its_own_parser_asked(monkeypatch):
    assert command.kept_help(["fit", "--help"]).startswith("usage: heads-train")
    monkeypatch.setattr(command, "version", lambda name: "2.7.0")
    assert command.kept_help(["fit", "--help"]) is None
    assert command.kept_help(["fit", "--config", "x", "--help"]) is None


def test_a_mistyped_configuration_is_told_with_the_one_that_is_near(capsys):
    assert command.main(["fit", "--config", "smollm2-gatd.yaml"]) == 2
    assert "there is no configuration smollm2-gatd.yaml (is smollm2-gated meant?)" in capsys.readouterr().err
