"""Prompt files and run files as others write them: marks in front, and numbers and texts that nothing here can hold."""

import gzip
import json

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ts_eval.cli import main
from ts_eval.commands.run_file import read_run_file
from ts_eval.comparing.prompts import read_texts

MARK = "\ufeff"
surrogates = st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)
LONG = "9" * 401


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("text", ["Call me Ishmael.", "\u2581\u20ac\n\nline", MARK + "its own"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path, name, text):
    record = json.dumps({"text": text, "title": "B"}) + "\n\n"
    # A second file with a mark may have been put behind the first.
    content = MARK + (text if not name.startswith("a.jsonl") else record + MARK + record + MARK)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt", encoding="utf-8", newline="") as file:
        file.write(content)
    found = read_texts(tmp_path / name)
    assert found == [("B", text)] * 2 if name.startswith("a.jsonl") else found == [(name, text)]


@given(st.builds("a{}b".format, surrogates), st.sampled_from(["text", "title", "name", "role", "content"]))
def test_a_lone_surrogate_is_told_with_its_line_and_field(tmp_path_factory, broken, field):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    record = {"text": "a"} if field in ("text", "title", "name") else {"messages": [{"role": "user", "content": "a"}]}
    if field in record:
        record[field] = broken
    elif "messages" in record:
        record["messages"][0][field] = broken
    else:
        record[field] = broken
    path.write_text("\n".join(map(json.dumps, [{"text": "good"}, record])))
    place = f"messages[0].{field}" if "messages" in record else field
    with pytest.raises(ValueError) as error:
        read_texts(path)
    told = str(error.value)
    assert told.startswith(f"{place} in line 2 of {path} is not valid Unicode: character 2") and told.encode()
    # What is not read does no harm.
    path.write_text(json.dumps({"text": "a", "other": broken, "number": int(LONG)}))
    assert read_texts(path) == [("p.jsonl:1", "a")]


@pytest.mark.parametrize(
    "line", ['{"text": "a", "n": ' + "1" * 5000 + "}", "[" * 99_999, '{"text": "a"', "\ud800"], ids=range(4)
)
def test_lines_that_cannot_be_read_are_told_by_their_number(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"p\.jsonl") as error:
        read_texts(path)
    assert len(str(error.value)) < 300 and "line 2 of" in str(error.value)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (f"temperature: 1{LONG}", "temperature"),
        (f"options:\n  - a: [1, -1{LONG}]", "options[0].a[1]"),
        ('model: "a\\ud800"', "model"),
        ('"a\\udfff": 1', "has a key"),
        (f"seed: {'1' * 5000}", "not YAML"),
        ("seed: 2024-99-99", "not YAML"),
        ("[" * 9999, "not YAML"),
        ("options:\n  - {a: 1, b: 2, a: 1}", "'a' in line 2 of"),
        ("max-new-tokens: 1\nmax_new_tokens: 2", "max_new_tokens in"),
    ],
    ids=lambda text: text[:20],
)
def test_a_run_file_is_checked_as_a_whole(tmp_path, content, place):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"run\.yaml") as error:
        read_run_file(str(path))
    assert place in str(error.value)


def test_a_run_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "run.yaml").write_text(f"{MARK}seed: 3\nmax-new-tokens: 5\n", encoding="utf-8")
    assert read_run_file(str(tmp_path / "run.yaml")) == {"seed": 3, "max_new_tokens": 5}


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--temperature", value] for value in ("1" + LONG, "1e999", "nan", "-inf")),
        *(["--top-k", value] for value in (LONG, "9" * 5000)),
        *(["--penalty-window", value] for value in (str(2**63), str(2**64))),
        *(["--seed", value] for value in (str(2**63), LONG)),
        *([flag, LONG] for flag in ("--max-new-tokens", "--ngrams", "--budget", "--tree")),
        ["--config"],
        ["--prompts"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1][:5]}",
)
def test_flags_that_nothing_can_hold_are_one_sentence_and_status_2(data, tmp_path, arguments):
    """Status 1 would mean that a method is not lossless."""
    from click.testing import CliRunner

    if arguments == ["--config"]:
        (tmp_path / "run.yaml").write_text("max_new_tokens: .inf")
        arguments = ["--config", str(tmp_path / "run.yaml")]
    if arguments == ["--prompts"]:
        (tmp_path / "p.jsonl").write_text('{"text": "a\\ud83d"}')
        arguments = ["--prompts", str(tmp_path / "p.jsonl")]
    asked = ["compare", "ar", "--data-dir", str(data), "--max-new-tokens", "4", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(main, [*asked, *arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1 and result.stdout == "" and result.stderr.startswith("ts-eval: ")
    assert isinstance(result.exception, SystemExit | click.ClickException)


def test_a_generations_text_begins_with_its_first_words_space(tmp_path):
    """With a tokenizer like SentencePiece; measures count words, and a word that is glued to none is the same word."""
    from click.testing import CliRunner

    words = ["<unk>", "<s>", "</s>", *(f"\u2581{letter}" for letter in "abcdefgh"), *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "model")
    config = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **config)).save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("a b c d")
    asked = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompt.txt"), "--no-bitwise"]
    asked += ["--max-new-tokens", "6", "--runs", "16", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["compare", "ar", *asked])
    assert result.exit_code == 0, result.output
    prompt = fast("a b c d")["input_ids"]
    runs = [json.loads(line) for line in (tmp_path / "out" / "generations.jsonl").read_text().splitlines()]
    runs = [run for run in runs if "token_ids" in run]
    assert len(runs) == 16 and any(run["text"].startswith(" ") for run in runs)
    for run in runs:
        whole, before = (fast.decode(ids, skip_special_tokens=True) for ids in ([*prompt, *run["token_ids"]], prompt))
        assert before + run["text"] == whole and run["token_ends"][-1] == len(run["text"])
