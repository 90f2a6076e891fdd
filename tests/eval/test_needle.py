"""`ts-eval needle`: the sentence stands where it should, scores are the model's own, and answers are compared."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from tiny_reference import BOOKS
from transformers import AutoTokenizer

import decoder
from ts_eval import metrics, needle
from ts_eval.cli import main

SHORT = ["--lengths", "150,260", "--depths", "0,0.5,1", "--max-new-tokens", "6"]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, ["needle", *map(str, arguments)])


def asked(data, output, *arguments):
    result = run(*arguments, "--data-dir", data, *SHORT, "--output", output)
    assert result.exit_code == 0, result.output
    return json.loads((output / "needle.json").read_text()), result


@pytest.fixture(scope="module")
def dec(data):
    return decoder.load(str(data / "reference-model"))


def test_a_sentence_is_hidden_between_sentences_at_its_depth():
    text = 'One is here. Two is "there." Three is gone! Four'
    assert needle.hide(text, "X.", 0) == f"X. {text}"
    assert needle.hide(text, "X.", 1) == f"{text} X."
    assert needle.hide(text, "X.", 0.3) == 'One is here. X. Two is "there." Three is gone! Four'
    assert needle.hide(text, "X.", 0.55) == 'One is here. Two is "there." X. Three is gone! Four'
    assert needle.hide("", "X.", 0.5) == "X."
    long = "A sentence of some words. " * 1000
    for depth in (0.1, 0.25, 0.9):
        at = needle.hide(long, "X.", depth).index("X.")
        assert abs(at / len(long) - depth) < 0.001


def test_phrases_depend_on_the_seed_alone():
    assert needle.pass_phrase(3) == needle.pass_phrase(3) != needle.pass_phrase(4)
    assert len(set(needle.pass_phrase(3).split())) == 4


def test_the_score_is_the_perplexity_of_the_phrase(data, dec):
    tokenizer = AutoTokenizer.from_pretrained(data / "reference-model")
    prompt = tokenizer(BOOKS["The Mill"][:200])["input_ids"]
    phrase = tokenizer(" amber river")["input_ids"]
    score = needle.phrase_logprob(dec, prompt, phrase)
    assert score == pytest.approx(-math.log(metrics.perplexity(dec.model, phrase, prompt)), abs=1e-5)
    quantised = needle.phrase_logprob(dec, prompt, phrase, decoder.TokenSwiftOptions(kv_dtype="int8"))
    assert quantised != score and quantised == pytest.approx(score, abs=0.1)


def test_command_asks_at_each_length_and_depth(data, dec, tmp_path):
    results, shown = asked(data, tmp_path, "auto", "suffix")
    phrase, tokenizer = needle.pass_phrase(0), dec.tokenizer
    assert [(cell["length"], cell["depth"]) for cell in results["cells"]] == [
        (length, depth) for length in (150, 260) for depth in (0, 0.5, 1)
    ]
    for cell in results["cells"]:
        assert list(cell["answers"]) == ["ar", "auto", "suffix"]
        assert all(answer["identical_to_ar"] for answer in cell["answers"].values())
        # The tiny tokenizer's tokens are bytes; spaces stand where texts meet.
        assert abs(cell["prompt_tokens"] - cell["length"]) <= 4
    # By hand: the last one.
    book = f"{BOOKS['The Lighthouse']}\n\n{BOOKS['The Mill']}"
    around = f"The pass phrase is: {phrase}.\n\nThe pass phrase is:"
    haystack = book[: 260 - len(around)]
    prompt = tokenizer(f"{haystack.rstrip()} {around}")["input_ids"]
    answer = dec.generate(prompt, 6, "ar", decoder.SamplingParams(temperature=0))
    cell = results["cells"][-1]
    assert cell["answers"]["ar"]["token_ids"] == list(answer.token_ids) and cell["prompt_tokens"] == len(prompt)
    ids = tokenizer(f" {phrase}")["input_ids"]
    without = tokenizer(f"{haystack}\n\nThe pass phrase is:")["input_ids"]
    for name, before in (("logprob", prompt), ("logprob_without", without)):
        assert cell[name] == pytest.approx(-math.log(metrics.perplexity(dec.model, ids, before)), abs=1e-5)
    row = next(line for line in shown.stdout.splitlines() if line.split()[:2] == ["260", "1"])
    assert row.split()[2:6] == ["no", "no", "no", "yes"]
    assert float(row.split()[-1]) == pytest.approx(cell["logprob"] - cell["logprob_without"], abs=0.006)


def test_a_phrase_that_is_answered_is_found_and_a_method_that_differs_is_told(data, tmp_path, monkeypatch):
    said = {"ar": f"  {needle.pass_phrase(0).replace(' ', chr(10)).upper()}, I think", "auto": "amber"}

    def answers(self, prompt, max_new_tokens, method, *rest, **named):
        return type("Output", (), {"text": said[method], "token_ids": said[method].encode()})

    monkeypatch.setattr(decoder.Decoder, "generate", answers)
    monkeypatch.setattr(needle, "phrase_logprob", lambda *arguments: -1.0)
    results, shown = asked(data, tmp_path)
    cell = results["cells"][0]["answers"]
    assert cell["ar"]["found"] and not cell["auto"]["found"]
    assert cell["ar"]["identical_to_ar"] and not cell["auto"]["identical_to_ar"]
    assert ["found", "no", "NO"] in [line.split()[2:5] for line in shown.stdout.splitlines()]


def test_several_phrases_are_counted_at_each_place(data, tmp_path, monkeypatch):
    phrases = [needle.pass_phrase(seed) for seed in (5, 6, 7)]

    def answers(self, prompt, max_new_tokens, method, *rest, **named):
        text = self.tokenizer.decode(prompt)
        hidden = next(phrase for phrase in phrases if phrase in text)
        said = hidden if method == "ar" or hidden == phrases[1] else "amber"
        return type("Output", (), {"text": said, "token_ids": said.encode()})

    def scores(dec, prompt, phrase, options):
        text = dec.tokenizer.decode(prompt)
        return -1.0 - any(phrase in text for phrase in phrases) * phrases.index(dec.tokenizer.decode(phrase)[1:])

    monkeypatch.setattr(decoder.Decoder, "generate", answers)
    monkeypatch.setattr(needle, "phrase_logprob", scores)
    flags = ("--phrases", "3", "--seed", "5")
    results, shown = asked(data, tmp_path, *flags)
    assert [cell["phrase"] for cell in results["cells"]] == phrases * 6
    assert results["settings"]["pass_phrases"] == phrases and results["settings"]["phrases"] == 3
    assert [cell["logprob"] for cell in results["cells"][:3]] == [-1, -2, -3]
    assert all(cell["logprob_without"] == -1 for cell in results["cells"])
    # No text is longer than its length, whichever the phrase.
    assert all(cell["prompt_tokens"] <= cell["length"] + 4 for cell in results["cells"])
    row = next(line for line in shown.stdout.splitlines() if line.split()[:2] == ["260", "0.5"])
    assert row.split()[2:] == ["100%", "(3/3)", "33%", "(1/3)", "NO", "-2.00", "-1.00", "-1.00"]
    assert "of all phrases" in " ".join(shown.stdout.split())
    again, taken = asked(data, tmp_path, *flags)
    assert again == results and "18 of 18 taken over" in taken.stderr


def test_more_phrases_are_added_to_those_that_are_there(data, tmp_path):
    first, _ = asked(data, tmp_path / "grown", "auto")
    more, told = asked(data, tmp_path / "grown", "auto", "--phrases", "3")
    assert "6 of 18 taken over" in told.stderr and more["settings"]["phrases"] == 3
    assert more["cells"][:6] == first["cells"]
    whole, _ = asked(data, tmp_path / "whole", "auto", "--phrases", "3")
    assert whole["settings"] == more["settings"]

    def place(cell):
        return cell["length"], cell["depth"], cell["phrase"]

    assert sorted(whole["cells"], key=place) == sorted(more["cells"], key=place)
    # Fewer phrases lose none of those that are there.
    again, told = asked(data, tmp_path / "grown", "auto", "--phrases", "2")
    assert again["cells"] == more["cells"] and again["settings"] == more["settings"]
    assert "12 of 12 taken over" in told.stderr and told.stdout.count("(0/3)") == 12


def test_a_chat_model_is_asked_through_its_template(data):
    tokenizer = AutoTokenizer.from_pretrained(data / "reference-model")
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<a>"
    shown = tokenizer.decode(needle.question_ids("A text.", tokenizer))
    assert shown == f"<user>A text.\n\n{needle.QUESTION}<a>{needle.CUE}"


def test_what_is_asked_already_is_not_asked_again(data, tmp_path, monkeypatch):
    whole, _ = asked(data, tmp_path / "whole", "auto")
    ask, calls = needle.Needle._ask, []

    def cut(self, *arguments):
        calls.append(arguments[2:4])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ask(self, *arguments)

    monkeypatch.setattr(needle.Needle, "_ask", cut)
    assert run("--data-dir", data, *SHORT, "--output", tmp_path / "cut").exit_code == 130
    again, result = asked(data, tmp_path / "cut")
    assert calls == [(150, 0), (150, 0.5), (150, 1), (150, 1), (260, 0), (260, 0.5), (260, 1)]
    assert again["cells"] == whole["cells"]
    assert "2 of 6 taken over" in result.stderr
    other = run("--data-dir", data, *SHORT, "--seed", "1", "--output", tmp_path / "cut")
    assert other.exit_code == 2 and "other settings (seed)" in other.stderr
    fresh, _ = asked(data, tmp_path / "cut", "--seed", "1", "--overwrite")
    assert fresh["settings"]["pass_phrases"] == [needle.pass_phrase(1)]


def test_the_cache_of_the_flag_is_the_one_that_is_asked(data, tmp_path):
    plain, _ = asked(data, tmp_path / "plain")
    int8, _ = asked(data, tmp_path / "int8", "--kv-dtype", "int8")
    for one, other in zip(plain["cells"], int8["cells"], strict=True):
        assert one["logprob"] != other["logprob"] and one["logprob_without"] != other["logprob_without"]
        assert other["answers"]["auto"]["identical_to_ar"]


def test_a_stretched_model_is_the_one_that_is_asked(data, tmp_path):
    plain, _ = asked(data, tmp_path / "plain", "--depths", "1")
    longer, _ = asked(data, tmp_path / "longer", "--depths", "1", "--yarn", "4")
    assert longer["settings"] == plain["settings"] | {"yarn": 4.0}
    for one, other in zip(plain["cells"], longer["cells"], strict=True):
        assert one["logprob"] != other["logprob"] and other["answers"]["auto"]["identical_to_ar"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--yarn", "1"], "yarn must be a number above 1, not 1.0"),
        (["hf"], "hf is not decoded here"),
        (["--depths", "0,1.5"], "--depths must be between 0 and 1, not 1.5"),
        (["--depths", "0,x"], "not a list of numbers"),
        (["--lengths", "20"], "--lengths must be above"),
        (["--lengths", "500"], "--lengths must be at most 474 with this model and answer, not 500"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--phrases", "0"], "--phrases must be at least 1, not 0"),
        (["--prompts", "short.txt"], "all that short.txt has"),
        (["--prompts", "chat.jsonl"], "chat.jsonl is a chat"),
        (["--prompts", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--output", "short.txt"], "short.txt is a file"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(data, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Too little.")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
    result = run("--data-dir", data, *SHORT, "--output", tmp_path / "out", *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_hook_forces_each_token_once(dec):
    seen = []
    logits = torch.zeros(300)
    phrase = dec.tokenizer(" a phrase")["input_ids"]

    def generate(prompt, count, method, sampling, options, ignore_eos, logits_hook):
        for place in range(count):
            forced = logits_hook([*prompt, *phrase[:place]], logits)
            assert forced.isfinite().nonzero().flatten().tolist() == [phrase[place]]
            seen.append(place)

    stand_in = type("Decoder", (), {"generate": staticmethod(generate)})
    assert needle.phrase_logprob(stand_in, [1, 2, 3], phrase) == pytest.approx(-math.log(300))
    assert seen == list(range(len(phrase)))
