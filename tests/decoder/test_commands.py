"""The command `decoder`: its commands and their names, help without waiting, completion, and a chat in the terminal."""

import subprocess
import sys

import pytest
import torch

import decoder.__main__ as command
from decoder import Decoder, SamplingParams

from ..tiny import byte_tokenizer
from .conftest import tiny_llama
from .test_command import TEMPLATE


@pytest.fixture(scope="module")
def speaking():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Decoder(tiny_llama(torch.float32, vocab_size=256), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory, speaking):
    folder = tmp_path_factory.mktemp("chat") / "model"
    speaking.model.save_pretrained(folder)
    speaking.tokenizer.save_pretrained(folder)
    return str(folder)


def test_help_imports_nothing_that_takes_seconds():
    """PyTorch and transformers alone take two seconds; both would come with a careless import."""
    calls = [["--help"], ["--version"], ["__complete", "r"], *([name, "--help"] for name in command.PARSERS)]
    code = f"""
import contextlib, sys
from decoder.__main__ import main
for call in {calls!r}:
    with contextlib.suppress(SystemExit):
        main(call)
heavy = {{"torch", "transformers", "numpy", "uvicorn", "huggingface_hub"}} & set(sys.modules)
sys.exit(f"{{heavy}} are imported" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in command.PARSERS) and "--max-batch" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], "there is no command srve: is serve meant?"),
        (["zzz"], "use one of run, chat, serve, batch, doctor"),
        (["run", "--model", "m", "--temprature", "1"], "is --temperature meant?"),
        (["serve", "--model", "m", "--max-bach=3"], "is --max-batch meant?"),
        (["--model", "m", "--zzzz"], "(--help lists the flags)"),
        (["completion", "tcsh"], "one of bash, zsh, fish"),
        (["run", "--model", "m", "a text", "--prompt", "another"], "not allowed with"),
    ],
)
def test_wrong_names_are_told_with_what_may_be_meant(run, arguments, words):
    status, text, told = run(*arguments)
    assert (status, text) == (2, "") and words in told and told.count("\n") == 1


def test_the_version_is_told(run):
    assert run("--version")[:2] == (0, "decoder 0.1.0\n")


def test_a_prompt_may_stand_by_itself(run, model):
    flags = ["--model", model, "--max-new-tokens", 9, "--seed", 4]
    expected = run(*flags, "--prompt", "Call me")
    assert expected[0] == 0 and expected[1]
    assert run("run", *flags, "Call me")[1] == run("run", "Call me", *flags)[1] == expected[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ru"], ["run"]),
        ([""], ["run", "chat", "serve", "batch", "doctor", "completion", "--help", "--version"]),
        (["run", "--model", "m", "--max-n"], ["--max-new-tokens"]),
        (["run", "--method", "tokensw"], ["tokenswift", "tokenswift-fused"]),
        (["serve", "--cache", ""], ["dynamic", "static", "full"]),
        (["run", "--model", "da"], []),
        (["unknown", "--m"], []),
    ],
)
def test_shells_complete_commands_flags_and_choices(run, words, expected):
    assert run("__complete", *words)[1].split() == expected


def test_bash_completes(run, tmp_path):
    script = run("completion", "bash")[1]
    (tmp_path / "decoder").write_text(f'#!/bin/sh\nexec {sys.executable} -m decoder "$@"\n')
    (tmp_path / "decoder").chmod(0o755)
    asked = f"{script}\nPATH={tmp_path}:$PATH COMP_WORDS=(decoder serve --max-b) COMP_CWORD=2\n_decoder\n"
    done = subprocess.run(["bash", "-c", asked + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--max-batch"]


def test_a_chat_is_answered_turn_by_turn(run, model, speaking):
    flags = ["--model", model, "--max-new-tokens", 12, "--seed", 3, "--system", "Be brief."]
    flags += ["--dtype", "float32"]
    status, text, told = run("chat", *flags, typed="Who?\n\nWhere?\n/new\nWho?\n/exit\nWhen?\n")
    assert status == 0, told
    sampling = SamplingParams(seed=3)
    messages = [{"role": "system", "content": "Be brief."}]
    expected = ""
    for line in ("Who?", "Where?"):
        messages.append({"role": "user", "content": line})
        answer = speaking.generate(messages, 12, sampling=sampling).text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    first = speaking.generate(messages[:2], 12, sampling=sampling).text
    assert text == expected + first + "\n"


def test_a_chat_needs_a_template(run, model, tmp_path, speaking):
    speaking.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    status, _, told = run("chat", "--model", tmp_path, typed="Who?\n")
    assert status == 2 and "no chat template" in told and told.count("\n") == 1
