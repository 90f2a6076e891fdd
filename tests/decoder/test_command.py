"""``python -m decoder``: what it prints and keeps, what it refuses, and that a cut run goes on as if it never was."""

import errno
import io
import json
import os
import pty
import resource
import runpy
import signal
import sys
import termios
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import decoder.__main__ as command
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.cache.partial import PartialCache
from decoder.cli import run as running
from decoder.cli.continuation import stream_on
from decoder.cli.flags import from_flags
from decoder.cli.parsers import run_parser
from decoder.cli.terminal import StatusLine
from decoder.cli.transcript import Transcript

from ..forked import forked
from ..tiny import byte_tokenizer
from .conftest import random_heads, tiny_llama

DATA = Path(__file__).parents[2] / "data"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAMPLED = SamplingParams(seed=3, repetition_penalty=1.3, penalty_window=24)
GREEDY = SamplingParams(temperature=0, repetition_penalty=1.3, penalty_window=24)


@pytest.fixture(scope="module")
def speaking():
    model = tiny_llama(vocab_size=256, num_hidden_layers=1)
    return Decoder(model, byte_tokenizer(), random_heads(model))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    for name, seed in (("model", 0), ("other", 1)):
        tiny_llama(torch.float32, seed, vocab_size=256, num_hidden_layers=1).save_pretrained(root / name)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(root / name)
    plain = tiny_llama(torch.float32, vocab_size=256, num_hidden_layers=1)
    plain.save_pretrained(root / "plain")
    byte_tokenizer().save_pretrained(root / "plain")
    random_heads(plain).save_pretrained(root / "heads")
    (root / "prompt.txt").write_text("Call me Ishmaël.", encoding="utf-8")
    return root


@pytest.fixture
def common(folders):
    """The arguments that every run of these tests needs."""
    names = ("model", "heads", "prompt.txt")
    model, heads, prompt = (str(folders / name) for name in names)
    return ["--model", model, "--heads", heads, "--prompt-file", prompt, "--dtype", "float64", "--seed", "5"]


def tokens_in(path):
    steps = [json.loads(line) for line in Path(f"{path}.tokens").read_text().splitlines()[1:]]
    return [token for step in steps for token in step["tokens"]]


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Chat messages


def test_chat_messages_go_through_the_tokenizers_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    dec = Decoder(tiny_llama(vocab_size=256), tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    expected = dec.generate("<system>Be brief.\n<user>Who?\n<assistant>", 20).token_ids
    assert dec.generate(messages, 20).token_ids == expected
    for bad, words in (
        ([{"role": "tool", "content": "x"}], "does not take these messages: no tools here"),
        ([{"role": "user"}], "a chat message is"),
        ([{"role": "user", "content": 3}], "a chat message is"),
        ({"role": "user", "content": "x"}, "a prompt is text, chat messages"),
    ):
        with pytest.raises(ValueError, match=words):
            dec.generate(bad, 3)


def test_chat_messages_without_a_template_or_tokenizer_are_refused(speaking):
    messages = [{"role": "user", "content": "Who?"}]
    with pytest.raises(ValueError, match="no chat template"):
        speaking.generate(messages, 3)
    with pytest.raises(ValueError, match="need a tokenizer"):
        Decoder(speaking.model).generate(messages, 3)


# Going on where a generation was cut


def go_on(dec, prompt, token_ids, *arguments, **options):
    """All tokens, the streamed text and the output of a generation that goes on behind ``token_ids``."""
    chunks = list(stream_on(dec, dec.tokenizer(prompt)["input_ids"], token_ids, *arguments, **options))
    assert all(chunk.output is None for chunk in chunks[:-1])
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return [*token_ids, *tokens], "".join(chunk.text for chunk in chunks), chunks[-1].output


@pytest.mark.parametrize("method", ["ar", "tokenswift"])
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_cut_generation_goes_on_as_if_it_never_was(speaking, method, sampling):
    whole = speaking.generate("Call me", 40, method, sampling)
    if sampling is SAMPLED:
        assert any("\ufffd" != letter > "\x7f" for letter in whole.text), "no character of several bytes to be cut"
    for cut in (0, 1, *range(2, 40, 9), 39, 40):
        tokens, text, output = go_on(speaking, "Call me", whole.token_ids[:cut], 40, method, sampling)
        assert tokens == output.token_ids == whole.token_ids
        assert text == output.text == whole.text
        assert output.finish_reason == "length"
        assert output.stats.generated == 40 - cut
    assert speaking.audit(output).checked == 40 and speaking.audit(output).equal


def test_every_cut_of_a_split_character_gives_the_same_text(speaking):
    whole = speaking.generate("Call me", 30, "ar", SAMPLED)
    assert any("\ufffd" != letter > "\x7f" for letter in whole.text), "no character of several bytes to be cut"
    for cut in range(30):
        assert go_on(speaking, "Call me", whole.token_ids[:cut], 30, "prompt-lookup", SAMPLED)[1] == whole.text


@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_a_stop_string_across_the_cut_ends_the_text_before_it(speaking, method):
    free = speaking.generate("Call me", 80, "ar", SAMPLED)
    start = next(i for i in range(30, 70) if free.text[i : i + 3].isascii())
    stop = ["never", free.text[start : start + 3]]
    whole = speaking.generate("Call me", 80, "ar", SAMPLED, stop=stop)
    assert whole.finish_reason == "stop" and len(whole.token_ids) < 80
    for cut in range(len(whole.token_ids) - 8, len(whole.token_ids)):
        tokens, text, output = go_on(speaking, "Call me", whole.token_ids[:cut], 80, method, SAMPLED, stop=stop)
        assert (tokens, text, output.finish_reason) == (whole.token_ids, whole.text, "stop")


def test_a_stopped_generation_does_not_go_on_and_a_short_one_does(speaking):
    whole = speaking.generate("Call me", 60, sampling=SAMPLED)
    tokens, text, output = go_on(speaking, "Call me", whole.token_ids, 90, sampling=SAMPLED, finish_reason="stop")
    assert (tokens, text, output.finish_reason) == (whole.token_ids, whole.text, "stop")
    longer = speaking.generate("Call me", 90, sampling=SAMPLED)
    tokens, text, _ = go_on(speaking, "Call me", whole.token_ids, 90, sampling=SAMPLED, finish_reason="length")
    assert (tokens, text) == (longer.token_ids, longer.text)


def test_the_partial_cache_does_not_grow_with_what_is_there_already(speaking, monkeypatch):
    """The default budget is the prompt's length, at least 64, and not the whole text's."""
    made, init = [], PartialCache.__init__
    monkeypatch.setattr(
        PartialCache, "__init__", lambda self, n, *args, **kw: made.append(n) or init(self, n, *args, **kw)
    )
    token_ids = speaking.generate("Call me", 200, "ar", SAMPLED).token_ids
    budgets = []
    for options in (TokenSwiftOptions(), TokenSwiftOptions(budget=207)):
        made.clear()
        go_on(speaking, "Call me", token_ids, 220, "tokenswift", SAMPLED, options)
        budgets.append(set(made))
    assert budgets == [{64}, {207}]


def test_what_cannot_go_on_exactly_is_refused(speaking):
    with pytest.raises(ValueError, match="independent verification cannot be continued"):
        stream_on(speaking, [1], [2], 5, options=TokenSwiftOptions(verification="independent"))
    with pytest.raises(ValueError, match="3 tokens already, more than the 2"):
        stream_on(speaking, [1], [2, 3, 4], 2)


# The command


def test_flags_are_the_settings_and_their_defaults():
    args = run_parser(command.Parser, "decoder").parse_args(["--model", "m", "--max-new-tokens", "1"])
    for settings in (SamplingParams, TokenSwiftOptions):
        assert from_flags(settings, args) == settings()
    given = ["--tree", "1,2", "--no-coupled", "--budget", "99", "--cache", "static", "--min-p", "0.1", "--top-k", "7"]
    args = run_parser(command.Parser, "decoder").parse_args(["--model", "m", "--max-new-tokens", "1", *given])
    assert from_flags(TokenSwiftOptions, args) == TokenSwiftOptions(
        tree=(1, 2), coupled=False, budget=99, cache="static"
    )
    assert from_flags(SamplingParams, args) == SamplingParams(min_p=0.1, top_k=7)
    given = ["--logit-bias", "3:2.5,17:-100", "--bad-words", "one", "--bad-words", "two", "--min-tokens", "4"]
    args = run_parser(command.Parser, "decoder").parse_args(["--model", "m", *given])
    expected = SamplingParams(logit_bias={17: -100, 3: 2.5}, bad_words=["one", "two"], min_tokens=4)
    assert from_flags(SamplingParams, args) == expected


def test_help_explains_every_flag(run):
    status, text, _ = run("run", "--help")
    assert status == 0
    for settings in (SamplingParams, TokenSwiftOptions):
        for field in fields(settings):
            # The constraint has flags of its own; how much of the output there was follows from what is resumed.
            assert (f"--{field.name.replace('_', '-')}" in text) == (
                field.name not in ("constraint", "continued_tokens")
            )
    assert all(flag in text for flag in ("--json-schema", "--regex", "--grammar", "--choice"))
    assert "the highest penalised" in text
    words = " ".join(text.split())
    assert "--tree TREE branching per depth" in words and "1,3,3,3" in words and "'0.0.0 0.1 1'" in words
    assert "(1, 3" not in words and "(0," not in words
    for choices in (
        "--cache {dynamic,static,full}",
        "--draft-cache {streaming,snapkv}",
        "--verification {exact,independent}",
    ):
        assert choices in words


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decoder", "--model", "nowhere", "--max-new-tokens", "5", "--prompt", "x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("decoder", run_name="__main__", alter_sys=True)
    assert ended.value.code == 2
    assert "there is no model folder at nowhere" in capsys.readouterr().err


def test_prompts_of_every_kind(run, folders, common, monkeypatch):
    model, rest = ["--model", folders / "model", "--max-new-tokens", 12], common[6:]
    written = (folders / "prompt.txt").read_text(encoding="utf-8")
    expected = run(*model, *rest, "--prompt-file", folders / "prompt.txt")[1]
    assert expected == run(*model, *rest, "--prompt", written)[1] != ""
    for arguments in ([], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written.encode())))
        assert run(*model, *rest, *arguments)[1] == expected
    chat = run(*model, *rest, "--chat", "Who?", "--system", "Be brief.")[1]
    assert chat == run(*model, *rest, "--prompt", "<system>Be brief.\n<user>Who?\n<assistant>")[1] != ""


def test_standard_output_is_the_text_alone_and_the_file_is_the_same(run, common, tmp_path):
    file = tmp_path / "out.txt"
    status, text, told = run(*common, "--max-new-tokens", 50, "--output", file, "--audit")
    assert status == 0
    assert file.read_bytes().decode() == text != ""
    assert told.count("\n") == 1
    assert told.startswith("50 tokens, ") and "acceptance" in told and "all 50 tokens are" in told
    assert len(tokens_in(file)) == 50
    plain = run(*common, "--max-new-tokens", 50, "--method", "ar")
    assert plain[1] == text and "acceptance" not in plain[2]


def test_stop_strings_end_the_text_and_what_is_written(run, common, tmp_path):
    free = run(*common, "--max-new-tokens", 60)[1]
    start = next(i for i in range(20, 50) if free[i : i + 2].isascii())
    stop = free[start : start + 2]
    status, text, _ = run(*common, "--max-new-tokens", 60, "--stop", stop, "--stop", "zzz", "--output", tmp_path / "o")
    assert status == 0
    assert text == free[: free.index(stop)] == (tmp_path / "o").read_text(encoding="utf-8")


# The record does not know what the temperature is; `test_a_cut_generation_goes_on_as_if_it_never_was` has all four.
@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        ("ar", 1),
        ("tokenswift", 0),
        pytest.param("ar", 0, marks=pytest.mark.slow),
        pytest.param("tokenswift", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_cut_at_any_byte_resumes_exactly(run, common, tmp_path, method, temperature):
    """What a kill leaves: some bytes of the record, and text of no more steps than it holds."""
    arguments = [*common, "--max-new-tokens", 60, "--repetition-penalty", "1.2", "--temperature", temperature]
    whole = run(*arguments, "--method", method, "--output", tmp_path / "whole")[1]
    record = (tmp_path / "whole.tokens").read_bytes()
    header = record.index(b"\n") + 1
    for cut in (0, 10, header, header + 5, (header + len(record)) // 2, len(record) - 2, len(record)):
        file = tmp_path / f"cut{cut}"
        Path(f"{file}.tokens").write_bytes(record[:cut])
        kept = tokens_in(file) if record[:cut].endswith(b"\n") else []
        file.write_bytes(whole.encode()[: len(kept) // 4])
        status, text, told = run(*arguments, "--method", method, "--output", file, "--resume")
        assert (status, text, file.read_bytes()) == (0, whole, whole.encode()), told
        assert Path(f"{file}.tokens").read_bytes()[:header] == record[:header]
        assert tokens_in(file) == tokens_in(tmp_path / "whole")


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "words": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4}},
    "required": ["ok", "words"],
    "additionalProperties": False,
}


def test_the_output_has_the_shape_that_was_asked_for_also_when_resumed(run, common, tmp_path):
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")
    arguments = [*common, "--max-new-tokens", 200, "--json-schema", file]
    whole = run(*arguments, "--method", "ar", "--output", tmp_path / "whole")[1]
    assert set(json.loads(whole)) == {"ok", "words"}
    record = (tmp_path / "whole.tokens").read_bytes()
    lines = record.splitlines(keepends=True)
    for cut in (2, len(lines) // 2, len(lines) - 1):
        Path(tmp_path / "cut.tokens").write_bytes(b"".join(lines[:cut]))
        status, text, told = run(*arguments, "--output", tmp_path / "cut", "--resume")
        assert (status, text) == (0, whole), told
    other = [*common, "--max-new-tokens", 200, "--choice", "yes", "--choice", "no"]
    status, _, told = run(*other, "--output", tmp_path / "cut", "--resume")
    assert status == 2 and "another constraint" in told
    assert run(*other)[1] in ("yes", "no")
    assert run(*common, "--regex", "x{3}y", "--max-new-tokens", 9)[1] == "xxxy"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--json-schema", "nowhere.json"], "nowhere.json"),
        (["--regex", "(a"], "unclosed group"),
        (["--regex", "a", "--choice", "b"], "not allowed with"),
        (["--logit-bias", "3=4"], "biases are written like"),
        (["--logit-bias", "3:400"], "logit_bias must be between"),
    ],
)
def test_a_shape_that_cannot_be_is_told_before_the_model_is_loaded(run, common, monkeypatch, flags, words):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(running, "load_from_flags", None)
    status, _, told = run(*common, "--max-new-tokens", 9, *flags)
    assert status == 2 and words in told and "Traceback" not in told


@pytest.mark.parametrize("tokens", ['["a", 5]', "[true]", "[1.5]", "[null]", "[[3]]", "3", '[1]}\n{"at": 5'])
def test_a_damaged_record_is_refused_and_left_as_it_is(run, common, tmp_path, tokens):
    file = tmp_path / "out"
    arguments = [*common, "--max-new-tokens", 8, "--output", file]
    run(*arguments)
    record = Path(f"{file}.tokens")
    header, *steps = record.read_text().splitlines(keepends=True)
    damaged = "".join([header, f'{{"at": 0, "tokens": {tokens}}}\n', *steps])
    record.write_text(damaged)
    status, text, told = run(*arguments, "--resume")
    assert (status, text, record.read_text()) == (2, "", damaged)
    assert f"of {record} is damaged: move that file away" in told and told.count("\n") == 1


def test_text_and_tokens_are_on_the_disk_at_the_end(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_ino))
    transcript = Transcript(tmp_path / "out", resume=False)
    transcript.open({}, "")
    transcript.append([1], "one", None)
    transcript.close()
    assert synced == [path.stat().st_ino for path in (transcript.tokens_path, transcript.path)]


def test_the_method_may_change_and_the_text_grow_behind_a_cut(run, common, tmp_path):
    file = tmp_path / "out"
    run(*common, "--max-new-tokens", 30, "--method", "ar", "--output", file)
    status, text, told = run(*common, "--max-new-tokens", 70, "--output", file, "--resume", "--audit")
    assert status == 0
    assert "70 tokens (30 of them before)" in told and "all 70 tokens are" in told
    assert text == run(*common, "--max-new-tokens", 70)[1] == file.read_bytes().decode()


def test_a_finished_run_says_so_and_prints_its_text(run, common, tmp_path):
    arguments = [*common, "--max-new-tokens", 30, "--output", tmp_path / "out"]
    first, again = run(*arguments, "--resume"), run(*arguments, "--resume")
    assert first[:2] == again[:2] == (0, (tmp_path / "out").read_text(encoding="utf-8"))
    assert again[2] == "30 tokens, complete before\n"
    status, _, told = run(*arguments[:-4], "--max-new-tokens", 20, *arguments[-2:], "--resume")
    assert status == 2 and "30 tokens already" in told


def test_a_lost_text_is_written_again_and_a_changed_one_is_not_touched(run, common, tmp_path):
    file = tmp_path / "out"
    arguments = [*common, "--max-new-tokens", 30, "--output", file, "--resume"]
    text = run(*arguments)[1]
    file.unlink()
    assert run(*arguments)[1] == text == file.read_bytes().decode()
    file.write_text("My own words.")
    status, shown, told = run(*arguments)
    assert (status, shown, file.read_text()) == (2, "", "My own words.")
    assert "was changed since" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "change, words",
    [
        (["--temperature", "0.5"], "begun with temperature 1.0, not 0.5"),
        (["--seed", "6"], "begun with seed 5, not 6"),
        (["--prompt", "Another"], "begun with another prompt"),
        (["--stop", "x"], "begun with stop [], not ['x']"),
        (["--ignore-eos"], "begun with ignore_eos False"),
        (["--dtype", "float32"], "begun with dtype 'float64', not 'float32'"),
        (["--model", "other"], "begun with another model"),
        (["--verification", "independent"], "cannot be resumed exactly"),
    ],
)
def test_another_request_is_not_resumed(run, common, folders, tmp_path, change, words):
    file = tmp_path / "out"
    run(*common, "--max-new-tokens", 10, "--output", file)
    before = file.read_bytes(), Path(f"{file}.tokens").read_bytes()
    if change[0] == "--model":
        change = ["--model", folders / "other"]
    arguments = [*common, "--max-new-tokens", 20, "--output", file, "--resume"]
    if change[0] == "--prompt":
        at = arguments.index("--prompt-file")
        del arguments[at : at + 2]
    status, text, told = run(*arguments, *change)
    assert (status, text) == (2, "")
    assert words in told and told.count("\n") == 1
    assert before == (file.read_bytes(), Path(f"{file}.tokens").read_bytes())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tree", "x"], "--tree"),
        (["--tree", "0"], "tree must be"),
        (["--temperature", "warm"], "--temperature"),
        (["--temperature", "-1"], "temperature must be 0, or at least 1e-6"),
        (["--cache", "x"], "--cache: invalid choice: 'x' (choose from"),
        (["--draft-cache", "x"], "--draft-cache: invalid choice: 'x' (choose from"),
        (["--verification", "x"], "--verification: invalid choice: 'x' (choose from"),
        (["--method", "triforce"], "--method triforce needs --draft-model"),
        (["--method", "draft-model"], "--method draft-model needs --draft-model"),
        (["--output", "/dev/null"], "/dev/null is no regular file"),
        (["--output", "piped"], "piped.tokens is no regular file"),
        (["--model", "folder/modle"], "there is no model folder at folder/modle"),
        (["--heads", "folder/haeds"], "there is no heads folder at folder/haeds"),
        (["--draft-model", "folder/drfat"], "there is no draft model folder at folder/drfat"),
        (["--model", "prompt.txt"], "prompt.txt is a file"),
        (["--method", "faster"], "--method"),
        (["--method", "sufix"], "(is suffix meant? --help lists the flags)"),
        (["--max-new-tokens", "-1"], "--max-new-tokens must be at least 0"),
        (["--max-new-tokens", "9999"], "beyond the 4096 positions"),
        (["--stop", ""], "--stop takes text"),
        (["--faster"], "--faster"),
        (["--system", "x"], "--system goes with --chat"),
        (["--sanitize-control-tokens"], "--sanitize-control-tokens goes with --chat"),
        (["--chat", "x"], "not allowed with"),
        (["--resume"], "--resume needs --output"),
        (["--verification", "independent", "--audit"], "--audit needs exact verification"),
        (["--output", "folder"], "folder is a folder"),
        (["--output", "nowhere/out"], "no folder nowhere"),
        (["--output", "prompt.txt"], "prompt.txt exists"),
        (["--output", "prompt.txt", "--resume"], "cannot be resumed, it has no record"),
        (["--output", "foreign", "--resume"], "not a record of format version"),
        (["--prompt-file", "none.txt"], "no prompt file none.txt"),
        (["--prompt-file", "latin.txt"], "not UTF-8"),
        (["--prompt-file", "empty.txt"], "is empty"),
        (["--model", "nowhere"], "no model folder at nowhere"),
        (["--model", "folder"], "folder"),
        (["--heads", "nowhere"], "no heads folder at nowhere"),
        (["--draft-model", "nowhere"], "no draft model folder at nowhere"),
    ],
)
def test_wrong_input_ends_in_one_sentence_before_the_model_is_loaded(
    run, common, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decoder.loader.load", lambda *a, **k: pytest.fail("the model was loaded"))
    Path("prompt.txt").write_text("Call me")
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    Path("empty.txt").touch()
    Path("folder").mkdir()
    os.mkfifo("piped.tokens")
    Path("foreign.tokens").write_text("a list of tokens\n")
    status, text, told = run(*common, "--max-new-tokens", 20, *arguments)
    assert (status, text) == (2, "")
    assert words in told and told.count("\n") == 1 and "Traceback" not in told


@pytest.mark.parametrize("text", ["Call me Ishmael.", "\ufeffCall", "\u00e9\n"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(run, common, tmp_path, monkeypatch, text):
    arguments = [*common, "--max-new-tokens", 8]
    monkeypatch.chdir(tmp_path)
    Path("plain.txt").write_bytes(text.encode())
    Path("marked.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    # Of two marks the second one is the text's own.
    expected = run(*(arg for arg in arguments if arg not in arguments[4:6]), "--prompt", text)[1]
    assert run(*arguments, "--prompt-file", "marked.txt")[1] == expected != ""
    if not text.startswith("\ufeff"):
        assert run(*arguments, "--prompt-file", "plain.txt")[1] == expected


@pytest.mark.parametrize("flag", ["--temperature", "--top-k", "--seed", "--ngrams", "--budget", "--max-new-tokens"])
@pytest.mark.parametrize("value", ["9" * 401, "9" * 5000, "-" + "9" * 401])
def test_numbers_that_nothing_can_hold_are_one_short_sentence(run, common, flag, value):
    status, text, told = run(*common, "--max-new-tokens", 8, flag, value)
    assert (
        (status, text) == (2, "")
        and flag[2:].replace("-", "_") in told.replace("-", "_")
        and len(told) < 700
        and told.count("\n") == 1
        and "Traceback" not in told
    )


def test_a_stop_string_that_is_not_unicode_is_told(run, common):
    status, text, told = run(*common, "--max-new-tokens", 8, "--stop", os.fsdecode(b"a\xff"))
    assert (status, text) == (2, "") and "[0] in --stop is not valid Unicode: character 2" in told


def test_what_a_prompt_lacks_is_told(run, folders, common, monkeypatch):
    plain = ["--model", folders / "plain", "--max-new-tokens", 5]
    status, _, told = run(*plain, "--chat", "Who?")
    assert status == 2 and "no chat template" in told
    status, _, told = run(*plain, "--prompt", "x", "--method", "tokenswift")
    assert status == 2 and "--method tokenswift needs --heads" in told
    surrogate = os.fsdecode(b"caf\xe9")
    status, _, told = run(*plain, "--prompt", surrogate)
    assert status == 2 and r"character 4 is the lone surrogate '\udce9'" in told and told.count("\n") == 1
    status, _, told = run("--model", folders / "model", "--max-new-tokens", 5, "--chat", surrogate)
    assert status == 2 and "--chat is not valid Unicode" in told
    reader, writer = pty.openpty()
    with open(writer) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        status, _, told = run(*plain)
    os.close(reader)
    assert status == 2 and "give a prompt" in told


def test_auto_runs_without_heads(run, folders):
    plain = ["--model", folders / "plain", "--max-new-tokens", 20, "--prompt", "Call me", "--dtype", "float64"]
    status, text, told = run(*plain, "--method", "auto")
    assert (status, text) == (0, run(*plain, "--method", "ar")[1]), told


def test_a_second_run_on_the_same_output_is_refused_and_touches_nothing(common, run, tmp_path):
    file = tmp_path / "out"
    arguments = [*common, "--max-new-tokens", 60, "--output", file]
    first = running.Run(run_parser(command.Parser, "decoder").parse_args([str(argument) for argument in arguments]))
    before = [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    status, text, told = run(*arguments, "--resume")
    assert (status, text) == (2, "")
    assert f"another run is writing {file}: wait for it" in told and told.count("\n") == 1
    assert before == [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    first.close()
    status, text, _ = run(*arguments, "--resume")
    assert (status, text) == (0, file.read_bytes().decode())


def test_of_two_runs_that_begin_together_one_is_refused(tmp_path):
    one, other = (Transcript(tmp_path / "out", resume) for resume in (False, True))
    one.open({"seed": 1}, "")
    one.append([3, 4], "ab", None)
    with pytest.raises(FileExistsError, match="another run has begun it meanwhile"):
        other.open({"seed": 2}, "")
    one.close()
    assert tokens_in(tmp_path / "out") == [3, 4] and (tmp_path / "out").read_text() == "ab"


def test_without_a_length_the_text_goes_to_the_models_last_position_and_resumes(run, folders, tmp_path):
    tiny_llama(torch.float32, vocab_size=256, max_position_embeddings=150).save_pretrained(tmp_path / "short")
    byte_tokenizer().save_pretrained(tmp_path / "short")
    arguments = ["--model", tmp_path / "short", "--dtype", "float64", "--prompt", "Call me", "--output"]
    status, text, told = run(*arguments, tmp_path / "whole")
    assert status == 0 and told.startswith("143 tokens, ")
    assert len(tokens_in(tmp_path / "whole")) == 143
    assert run(*arguments, tmp_path / "cut", "--max-new-tokens", 40)[0] == 0
    for told_before in ("(40 of them before)", "143 tokens"):
        resumed = run(*arguments, tmp_path / "cut", "--resume")
        assert resumed[:2] == (0, text) and told_before in resumed[2]
    status, _, told = run(*arguments[:-3], "--prompt", "x" * 151)
    assert status == 2 and "the prompt (151 tokens) goes beyond the 150 positions of the model: shorten it" in told


@pytest.mark.parametrize(
    "error, words",
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory."),
        (MemoryError(), "out of memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 4096000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "out of memory: 4,096,000 bytes could not be allocated",
        ),
    ],
    ids=["cuda", "python", "cpu"],
)
def test_memory_that_runs_out_is_one_sentence(run, common, monkeypatch, error, words):
    def failing(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("decoder.model.loading.AutoModelForCausalLM.from_pretrained", failing)
        status, text, told = run(*common, "--max-new-tokens", 5)
    assert (status, text, told) == (2, "", f"python -m decoder: {words}\n")
    monkeypatch.setattr("decoder.engine.Engine.step", failing)
    status, text, told = run(*common, "--max-new-tokens", 5)
    assert (status, text, told) == (1, "", f"python -m decoder: {words} after 0 tokens\n")


def test_a_fault_of_the_program_is_not_hidden(run, common, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr("decoder.engine.Engine.step", failing)
    with pytest.raises(RuntimeError, match="a fault"):
        run(*common, "--max-new-tokens", 5)


@pytest.mark.parametrize("bytes_each", [10**13, 10**18, 10**25])
def test_more_memory_than_can_be_is_one_sentence(run, common, monkeypatch, bytes_each):
    """What torch itself raises for a size beyond the memory, beyond 64 bits in all, and beyond 64 bits in one."""

    def step(_):
        torch.empty(64, bytes_each)

    monkeypatch.setattr("decoder.engine.Engine.step", step)
    status, text, told = run(*common, "--max-new-tokens", 5)
    assert (status, text) == (1, "")
    assert told.startswith("python -m decoder: out of memory") and told.endswith(" after 0 tokens\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_standard_stream_is_no_traceback(run, common, monkeypatch, closed):
    with monkeypatch.context() as patch:
        patch.setattr(sys, closed, None)
        status, text, told = run(*common, "--max-new-tokens", 5)
    if closed == "stdout":
        assert (status, text) == (2, "") and "standard output is closed" in told and told.count("\n") == 1
    else:
        assert (status, told) == (0, "") and text == run(*common, "--max-new-tokens", 5)[1] != ""


def test_a_run_killed_for_good_resumes_exactly(run, tmp_path):
    """kill -9 amid the reference model's generation."""
    arguments = ["--model", DATA / "reference-model", "--heads", DATA / "heads-chained", "--prompt", "Call me Ishmael."]
    arguments += ["--max-new-tokens", 90, "--ignore-eos", "--dtype", "float64", "--method", "tokenswift"]
    arguments += ["--tree", 1, "--ngrams", 0, "--device", "cpu", "--output"]
    file = tmp_path / "cut.txt"
    with open(tmp_path / "said", "wb") as said:
        process = forked(command.main, [*arguments, file], stderr=said.fileno())
    record = Path(f"{file}.tokens")
    wait_for(lambda: not process.is_alive() or (record.exists() and record.read_bytes().count(b"\n") > 12))
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "said").read_text()
    written = file.read_bytes().decode()
    status, text, told = run(*arguments, file, "--resume")
    assert status == 0 and "of them before" in told
    whole = run(*arguments, tmp_path / "whole.txt")[1]
    assert text == file.read_bytes().decode() == whole
    assert whole.startswith(written) and 0 < len(written) < len(whole)
    assert tokens_in(file) == tokens_in(tmp_path / "whole.txt")


def test_an_interrupt_on_a_terminal_says_how_to_go_on(run, common, tmp_path):
    """A terminal sees tokens, tokens/s and acceptance on its last row, which is given back."""
    file = tmp_path / "out"
    # Many small steps, which are not done before the signal.
    arguments = [*common, "--method", "magicdec", "--tree", 1, "--device", "cpu"]
    arguments += ["--max-new-tokens", 3000, "--output", file]
    reader, writer = pty.openpty()
    with open(tmp_path / "shown", "wb") as stdout:
        process = forked(command.main, arguments, stdout.fileno(), writer)
    os.close(writer)
    shown = b""
    while b"acceptance" not in shown:
        shown += os.read(reader, 4096)
    os.kill(process.pid, signal.SIGINT)
    while True:
        try:
            more = os.read(reader, 4096)
        except OSError:  # Linux: the other end is closed.
            break
        if not more:
            break
        shown += more
    os.close(reader)
    process.join()
    assert process.exitcode == 130, shown
    text = (tmp_path / "shown").read_bytes().decode()
    assert b" of 3,000 tokens, " in shown and b" tokens/s, " in shown
    region, given_back = shown.rindex(b"\x1b[1;23r"), shown.rindex(b"\x1b[r")
    assert region < given_back < shown.index(b"interrupted after")
    assert b"the same command with --resume goes on from there" in shown and b"Traceback" not in shown
    # The signal may come between the file and the standard output: one of them can be a step behind.
    written = file.read_bytes().decode()
    assert written.startswith(text) or text.startswith(written)
    assert abs(len(written) - len(text)) < 40
    count = len(tokens_in(file))
    arguments[arguments.index(3000)] = count + 20
    resumed = run(*arguments, "--resume")
    assert resumed[0] == 0 and f"({count} of them before)" in resumed[2]
    assert resumed[1] == run(*arguments[:-2])[1]


BREAKS = {
    "interrupt": (KeyboardInterrupt, 130, "interrupted after"),
    "full-disk": (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device after"),
    "out-of-memory": (torch.OutOfMemoryError("CUDA out of memory."), 1, "CUDA out of memory. after"),
}


# Each error and each number of steps; what breaks off a run does not ask after how many it does.
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("interrupt", 1),
        ("full-disk", 5),
        ("out-of-memory", 14),
        *(
            pytest.param(name, steps, marks=pytest.mark.slow)
            for name in BREAKS
            for steps in (1, 5, 14)
            if (name, steps) not in {("interrupt", 1), ("full-disk", 5), ("out-of-memory", 14)}
        ),
    ],
)
def test_a_run_that_breaks_off_says_how_to_go_on(run, common, tmp_path, monkeypatch, name, steps):
    error, status, words = BREAKS[name]

    def breaking(*arguments):
        for number, chunk in enumerate(stream_on(*arguments)):
            if number > steps:
                raise error
            yield chunk

    file = tmp_path / "out"
    arguments = [*common, "--max-new-tokens", 60, "--output", file]
    with monkeypatch.context() as patch:
        patch.setattr(running, "stream_on", breaking)
        broken = run(*arguments)
        independent = run(*arguments[:-1], tmp_path / "other", "--verification", "independent")
    count = len(tokens_in(file))
    assert broken[0] == independent[0] == status
    assert f"{words} {count} tokens; the same command with --resume goes on" in broken[2]
    assert "--resume" not in independent[2] and f"{tmp_path / 'other'} keeps" in independent[2]
    resumed = run(*arguments, "--resume")
    assert resumed[0] == 0 and f"({count} of them before)" in resumed[2]
    assert resumed[1] == run(*arguments[:-2])[1] == file.read_bytes().decode()


def test_a_full_disk_loses_no_step(run, common, tmp_path):
    """The limit on a file's size stands in for a full disk: a write takes a part, the next one fails."""
    file = tmp_path / "out"
    arguments = [*common, "--max-new-tokens", 60, "--output", file]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        status, _, told = run(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 1
    assert "File too large after" in told and "--resume goes on" in told and told.count("\n") == 1
    assert Path(f"{file}.tokens").stat().st_size == 1000
    status, text, _ = run(*arguments, "--resume")
    assert status == 0
    assert text == run(*arguments[:-2])[1] == file.read_bytes().decode()


def test_a_reader_that_leaves_ends_the_run_without_a_traceback(run, common, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        status, _, told = run(*common, "--max-new-tokens", 30)
    assert status == 1
    assert "standard output was closed after" in told and told.count("\n") == 1


def test_the_status_line_keeps_to_the_last_row(monkeypatch):
    reader, writer = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(writer, "w") as terminal:
        termios.tcsetwinsize(writer, (10, 20))
        with StatusLine(terminal) as status:
            status.show("a line that is longer than the terminal", now=True)
            status.show("too soon")
            termios.tcsetwinsize(writer, (8, 20))
            status.show("smaller", now=True)
        written = ""
        while "\x1b[r" not in written or not written.endswith("\x1b8"):
            written += os.read(reader, 4096).decode()
        monkeypatch.setenv("TERM", "dumb")
        with StatusLine(terminal) as status:
            status.show("nothing", now=True)
        terminal.write("end")
        terminal.flush()
        assert os.read(reader, 4096) == b"end"
    os.close(reader)
    assert "\x1b[1;9r" in written and "\x1b[10;1H\x1b[2Ka line that is long\x1b8" in written
    assert "\x1b[1;7r" in written and written.index("\x1b[8;1H\x1b[2Ksmaller") < written.rindex("\x1b[r")
    assert "too soon" not in written
    plain = io.StringIO()
    with StatusLine(plain) as status:
        status.show("nothing", now=True)
    assert plain.getvalue() == ""


def test_another_number_of_threads_is_refused_when_a_bitwise_run_is_resumed(common, folders, tmp_path, capsys):
    """Products may be summed in another order by another number of threads."""
    arguments = [
        *common,
        "--dtype",
        "float32",
        "--max-new-tokens",
        "9",
        "--ignore-eos",
        "--output",
        str(tmp_path / "text"),
    ]
    threads = torch.get_num_threads()
    assert command.main(arguments) == 0
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert command.main([*arguments, "--resume"]) == 2
    finally:
        torch.set_num_threads(threads)
    assert f"was begun with threads {threads}, not" in capsys.readouterr().err
    assert command.main([*arguments, "--resume"]) == 0


def test_other_products_are_refused_when_a_bitwise_run_is_resumed(common, tmp_path, capsys, monkeypatch):
    """Where packed weights do not fit into memory any more, others compute, and sum in another order."""
    length = ["--dtype", "float32", "--max-new-tokens", "9", "--ignore-eos", "--output", str(tmp_path / "text")]
    assert command.main([*common, *length]) == 0
    monkeypatch.setattr("decoder.backends.native.packed_linear.available_memory", lambda device: 0)
    assert command.main([*common, *length, "--resume"]) == 2
    assert "was begun with bitwise True, not False" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr("decoder.backends.native.library.library_name", lambda: "another library")
    assert command.main([*common, *length, "--resume"]) == 2
    assert "was begun with computed_by " in capsys.readouterr().err


def test_a_text_goes_on_with_the_cache_that_it_was_begun_with(folders, tmp_path, capsys):
    """In host memory or not does not matter; rounded or not is another model."""
    arguments = [
        "--model",
        str(folders / "plain"),
        "--prompt",
        "Call me",
        "--ignore-eos",
        "--seed",
        "4",
        "--output",
        str(tmp_path / "text"),
    ]
    assert command.main([*arguments, "--max-new-tokens", "9", "--kv-dtype", "int8"]) == 0
    for other in ([], ["--kv-dtype", "fp8"]):
        assert command.main([*arguments, "--max-new-tokens", "30", "--resume", *other]) == 2
        assert "was begun with kv_dtype 'int8', not" in capsys.readouterr().err
    more = ["--max-new-tokens", "30", "--kv-dtype", "int8", "--audit"]
    assert command.main([*arguments, *more, "--resume", "--offload"]) == 0
    assert "all 30 tokens are the model's own choices" in capsys.readouterr().err
    resumed = (tmp_path / "text").read_bytes()
    (tmp_path / "text").unlink()
    (tmp_path / "text.tokens").unlink()
    assert command.main([*arguments, *more]) == 0
    assert (tmp_path / "text").read_bytes() == resumed
