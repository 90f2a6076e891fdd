"""Prompts that are chats: their answers end where the model ends them, alone, in a batch and after a cut."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_reference import BOOKS, save_model
from transformers import AutoTokenizer, GenerationConfig

import decoder
from ts_eval.cli import main
from ts_eval.comparing import setup
from ts_eval.comparing.progress import Progress
from ts_eval.comparing.prompts import read_prompts

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
CHAT = [{"role": "user", "content": "Who climbed the stairs?"}]
LENGTH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model with a chat template, whose answer to the chat has 7 tokens, the last one the end of text."""
    folder = tmp_path_factory.mktemp("chat-model")
    save_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    dec = decoder.load(folder, dtype="float64")
    answer = dec.generate(CHAT, LENGTH, "ar", SAMPLING, ignore_eos=True).token_ids
    assert answer[6] not in answer[:6]
    GenerationConfig(eos_token_id=answer[6]).save_pretrained(folder)
    return folder


SAMPLING = decoder.SamplingParams(temperature=0, repetition_penalty=1.2)


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"messages": CHAT, "title": "stairs"}, {"text": BOOKS["The Mill"][:60], "title": "mill"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compare(model: Path, prompts: Path, output: Path, *arguments: str, methods=("ar", "suffix", "hf")):
    command = ["compare", *methods, "--model", str(model), "--prompts", str(prompts), "--dtype", "float64", "--runs",
               "1", "--max-new-tokens", str(LENGTH), "--temperature", "0", "--output", str(output)]  # fmt: skip
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, [*command, *arguments])


def test_control_tokens_of_a_chat_are_text_where_that_is_asked_for(model, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Who climbed<end> the stairs?"}]}))
    plain, sanitized = (read_prompts(path, tokenizer, None, None, asked)[0].token_ids for asked in (False, True))
    assert tokenizer.eos_token_id in plain and tokenizer.eos_token_id not in sanitized
    assert tokenizer.decode(plain) == tokenizer.decode(sanitized)

    asked = []
    read = setup.read_prompts
    monkeypatch.setattr(setup, "read_prompts", lambda *arguments: asked.append(arguments[-1]) or read(*arguments))
    output = tmp_path / "out"
    for flags in ([], ["--sanitize-control-tokens"], ["--config", str(output / "run.yaml")]):
        result = compare(model, path, output, *flags, methods=["ar"])
        assert result.exit_code == 0, result.output
    assert asked == [False, True, True]


def rows(output: Path) -> dict:
    return json.loads((output / "results.json").read_text())["methods"]


def test_an_answer_ends_and_a_book_goes_on(model, prompts, tmp_path):
    result = compare(model, prompts, tmp_path / "out", "--prompt-tokens", "20", "--check-lossless")
    assert result.exit_code == 0, result.output
    dec = decoder.load(model, dtype="float64")
    expected = [
        dec.generate(CHAT, LENGTH, "ar", SAMPLING).token_ids,
        dec.generate(BOOKS["The Mill"][:20], LENGTH, "ar", SAMPLING, ignore_eos=True).token_ids,
    ]
    assert list(map(len, expected)) == [7, LENGTH]
    for row in rows(tmp_path / "out").values():
        assert [run["token_ids"] for run in row["runs"]] == expected
        assert row["identical_to_ar"]
        # A chat is not cut: its template would be torn.
        assert [run["prompt_tokens"] for run in row["runs"]] == [len(dec.tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True)["input_ids"]), 20]  # fmt: skip
        assert row["tokens_per_step"] == 31 / sum(run["steps"] for run in row["runs"])
        # Marks that the answer did not reach are told of the book alone.
        assert [mark["tokens"] for mark in row["along_length"]] == [4, 9, 14, 19, 24]
        long = row["runs"][1]["along_length"]
        assert [mark["ms_per_token"] for mark in row["along_length"][1:]] == [m["ms_per_token"] for m in long[1:]]


def test_answers_of_a_batch_end_one_by_one(model, prompts, tmp_path):
    for name, batch in (("1", "1"), ("2", "2")):
        result = compare(model, prompts, tmp_path / name, "--batch", batch, methods=("ar", "suffix"))
        assert result.exit_code == 0, result.output
    one, two = ({name: [run["token_ids"] for run in row["runs"]] for name, row in rows(tmp_path / folder).items()}
                for folder in ("1", "2"))  # fmt: skip
    assert one == two


def test_an_answer_that_was_complete_when_it_was_cut_is_not_gone_on_with(model, prompts, tmp_path, monkeypatch):
    class Stopped(RuntimeError):
        pass

    honest = Progress.add

    def cut(self, tokens, counts, logprobs):
        honest(self, tokens, counts, logprobs)
        if len(self.token_ids) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "add", cut)
    assert compare(model, prompts, tmp_path / "out", methods=("ar",)).exit_code == 130
    monkeypatch.setattr(Progress, "add", honest)
    assert compare(model, prompts, tmp_path / "out", methods=("ar",)).exit_code == 0
    assert compare(model, prompts, tmp_path / "whole", methods=("ar",)).exit_code == 0
    texts = [[run["token_ids"] for run in rows(tmp_path / name)["ar"]["runs"]] for name in ("out", "whole")]
    assert texts[0] == texts[1] and len(texts[0][0]) == 7


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"title": "x"}, "line 1 of .* has no field 'text' that is a string, and no 'messages'"),
        ({"text": "a", "messages": CHAT}, "line 1 of .* has both 'text' and 'messages'"),
        ({"messages": "hello"}, "'messages' of line 1 of .* are no list of objects with a role and a content"),
        ({"messages": []}, "'messages' of line 1 of .* are no list of objects with a role and a content"),
        ({"messages": [{"role": "user"}], "title": "x"}, 'the prompt x: a chat message is {"role"'),
    ],
)
def test_rows_that_are_neither_text_nor_chat_are_refused(model, tmp_path, row, sentence):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    with pytest.raises(ValueError, match=sentence):
        read_prompts(path, tokenizer, None)


def test_a_chat_needs_a_template(data, prompts):
    tokenizer = AutoTokenizer.from_pretrained(data / "reference-model")
    with pytest.raises(ValueError, match=r"the prompt stairs: .*no chat template"):
        read_prompts(prompts, tokenizer, None)
