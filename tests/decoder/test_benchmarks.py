"""Every benchmark script runs to its end, with settings so small that its figures mean nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "decoder" / "benchmarks"
REFERENCE = ["--model", "data/reference-model", "--heads", "data/heads-gated"]
SMALL = {
    "acceptance_at_length": [*REFERENCE, "--method=medusa", "--contexts", "32", "64", "--new-tokens=8", "--books=1"],
    "bitwise same": [*REFERENCE, "--new-tokens=8", "--tokens=40", "--methods=1", "--lengths", "16"],
    "bitwise same, several": [
        *REFERENCE,
        "--new-tokens=6",
        "--tokens=40",
        "--methods=1",
        "--batch=3",
        "--lengths",
        "16",
    ],
    "bitwise price": ["--new-tokens=8", "--length=32", "--rounds=1"],
    "chat_turns": ["--model", "{chatting}", "--turns=2", "--max-new-tokens=4"],
    "kv_cache perplexity": ["--tokens=70", "--texts=2"],
    "kv_cache speed": ["--length=100", "--new-tokens=8", "--rounds=1", "--heads", "data/heads-gated"],
    "length": ["--lengths", "64", "128", "--steps=3", "--output", "{output}"],
    "linear": ["--passes=1"],
    "long_run": ["--tiny", "--prompt-tokens=32", "--new-tokens=40", "--output", "{output}"],
    "node_budget": [*REFERENCE, "--prompts={prompts}", "--prompt-tokens=32", "--new-tokens=16", "--books=1"],
    "policies": ["--length=32", "--rounds=1", "--new-tokens=16"],
    "serving": ["--model", "{chatting}", "--max-tokens=4"],
}


def test_every_script_is_tried():
    assert {name.split()[0] for name in SMALL} == {script.stem for script in SCRIPTS.glob("*.py")}


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """The reference model with a chat template."""
    folder = tmp_path_factory.mktemp("model") / "chatting"
    shutil.copytree(ROOT / "data" / "reference-model", folder)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_script_runs_to_its_end(name, tmp_path, chatting):
    script, *command = name.split(",")[0].split()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "Call me Ishmael."}\n')
    arguments = [one.format(output=tmp_path, chatting=chatting, prompts=prompts) for one in SMALL[name]]
    run = [sys.executable, str(SCRIPTS / f"{script}.py"), *command, *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
