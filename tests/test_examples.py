"""The scripts in docs/examples, run on the reference model with so few tokens that their figures mean nothing."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from openai import OpenAI

import decoder

from .decoder.serving import served, speaking_decoder

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
REFERENCE = str(ROOT / "data" / "reference-model")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a script by its name as the command line does, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def start(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return start


def test_every_script_is_tried():
    tried = Path(__file__).read_text(encoding="utf-8")
    others = {"bigram_drafter"}  # by tests/decoder/test_example_drafter.py
    assert [script.stem for script in EXAMPLES.glob("*.py") if f'"{script.stem}"' not in tried] == []
    assert all((EXAMPLES / f"{name}.py").is_file() for name in others)


def test_a_long_story_is_the_one_of_plain_decoding(run, tmp_path, capsys):
    run("long_story", "--model", REFERENCE, "--max-new-tokens", 40, "--output", "story.txt")
    sampling = decoder.SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2, penalty_window=1024, seed=7)
    opening = "The lighthouse had been dark for eleven years when the lamp began to turn again. "
    plain = decoder.load(REFERENCE).generate(opening, 40, "ar", sampling, ignore_eos=True)
    assert (tmp_path / "story.txt").read_text(encoding="utf-8") == opening + plain.text
    assert "40 tokens, " in capsys.readouterr().out


def test_facts_come_as_json_that_holds_to_the_schema(run, capsys):
    run("extract_json", "--model", REFERENCE, "--text", "Ada Lovelace was born in London in 1815.")
    told, answer = capsys.readouterr().out.split("\n", 1)
    facts = json.loads(answer)
    assert list(facts) == ["name", "born", "place"] and isinstance(facts["born"], int)
    tokens, steps = (int(word) for word in told.split() if word.isdigit())
    assert steps < tokens - 10  # names and punctuation are forced


def test_a_chat_sends_the_turns_before(capsys):
    chat = runpy.run_path(str(EXAMPLES / "chat.py"))["chat"]
    with served(speaking_decoder(), max_tokens=200) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        messages = chat(client, ["Call me", "Go on"], max_tokens=5)
        client.close()
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert all(message["content"] for message in messages)
    assert messages[1]["content"] in capsys.readouterr().out


def test_methods_are_compared_on_the_lines_of_a_file(run, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("It was a dark night, and\n\nThe captain said that\n", encoding="utf-8")
    run("compare_prompts", "--model", REFERENCE, "--prompts", "mine.txt", "--methods", "suffix", "--max-new-tokens", 8)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-3:-1]] == ["ar", "suffix"]
    assert all(line.endswith("the same text") for line in lines[-3:-1])
    results = json.loads((tmp_path / "runs/my-prompts/comparison/results.json").read_text())
    assert len(results["methods"]["suffix"]["runs"]) == 2


def test_heads_are_trained_on_a_folder_of_texts_and_draft(run, tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number:02}.txt").write_text(
            f"It was night number {number}, and the rain fell. " * 30, encoding="utf-8"
        )
    small = [
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1",
        "--data.chunk_tokens=64",
        "--model.draft_vocab_size=512",
        f"--data.cache_dir={tmp_path / 'cache'}",
    ]
    run("train_heads", "--model", REFERENCE, "--texts", "texts", "--output", "heads", "--steps", 2, *small)
    assert decoder.load_heads("heads/best").num_heads == 3
    assert "tokens per step: " in capsys.readouterr().out
