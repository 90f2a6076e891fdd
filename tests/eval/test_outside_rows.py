"""Rows that are not decoded here: a server by OpenAI's protocol, and transformers' assisted generation."""

import json
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, pairwise

import pytest
from click.testing import CliRunner
from tests.decoder.serving import served

import decoder
from ts_eval import compare as experiment
from ts_eval.cli import main

SHORT = ["--prompt-tokens", "40", "--max-new-tokens", "12", "--runs", "1", "--tree", "1,2", "--ngrams", "2"]


def compare(data, output, *arguments, methods=("ar",)):
    command = ["compare", *methods, "--data-dir", str(data), *SHORT, "--output", str(output), *map(str, arguments)]
    return CliRunner(env={"COLUMNS": "120"}).invoke(main, command)


def load(output):
    return json.loads((output / "results.json").read_text())


class StandIn(ThreadingHTTPServer):
    """A server whose answers are ``pieces`` of text, of which request number ``fails_at`` is refused."""

    def __init__(self, model="reference-model", pieces=("a", "b", "", "c"), tokens=12, fails_at=None, usage=True):
        super().__init__(("127.0.0.1", 0), Answers)
        self.model, self.pieces, self.tokens, self.fails_at, self.usage = model, pieces, tokens, fails_at, usage
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def reply(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def do_GET(self):
        self.reply(200, b"<html>" if self.server.model is None else {"data": [{"id": self.server.model}]})

    def do_POST(self):
        server = self.server
        server.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        if len(server.asked) == server.fails_at:
            self.reply(400, {"error": {"message": "no more room"}})
            return
        usage = {"choices": [], "usage": {"completion_tokens": server.tokens}}
        events = [*({"choices": [{"text": piece}]} for piece in server.pieces), *([usage] if server.usage else [])]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.reply(200, "".join([": a comment\n", *lines, "data: [DONE]\n\n"]).encode())


@contextmanager
def standing_in(**named):
    with StandIn(**named) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_our_own_server_is_timed_beside_the_rows(data, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(data / "reference-model", folder)
    with served(decoder.load(folder)) as running:
        flags = ("--model", folder, "--endpoint", running.url + "/v1/", "--runs", 2, "--marks", "6,12")
        result = compare(data, tmp_path / "out", *flags, "--check-lossless")
        assert result.exit_code == 0, result.output
    rows = load(tmp_path / "out")["methods"]
    assert list(rows) == ["ar", "endpoint"]
    assert rows["ar"]["bitwise"] is True and rows["endpoint"]["bitwise"] is False
    row = rows["endpoint"]
    assert row["identical_to_ar"] is None and row["distinct"]["mean"] is None and row["tokens_per_step"] is None
    for run, of_ar in zip(row["runs"], rows["ar"]["runs"], strict=True):
        assert run["new_tokens"] == 12 and run["text"] == ""
        assert run["speedup"] == pytest.approx(of_ar["ms_per_token"] / run["ms_per_token"])
        assert run["prefill_seconds"] > 0 and run["decode_seconds"] > 0
    assert [mark["tokens"] for mark in row["along_length"]] == [6, 12]
    words = " ".join(result.stdout.split())
    assert f"endpoint is the server at {running.url}/v1/, timed from its first piece" in words
    assert "transformers' own rows" not in words and "continued by ar:" in words
    assert CliRunner().invoke(main, ["report", str(tmp_path / "out")]).exit_code == 0
    assert "a server, whose speed alone is compared" in (tmp_path / "out/report.html").read_text()


def test_a_server_is_asked_for_the_same_text(data, tmp_path):
    with standing_in() as server:
        result = compare(data, tmp_path, "--endpoint", server.url, "--seed", 4, "--top-k", 9, "--temperature", 0.7)
    assert result.exit_code == 0, result.output
    (path, warm_up), (_, asked) = server.asked
    assert path == "/v1/completions" and warm_up["max_tokens"] == 2
    expected = load(tmp_path)["settings"]["sampling"]
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert {name: asked[name] for name in fields} == {name: expected[name] for name in fields}
    assert (asked["seed"], asked["max_tokens"], asked["ignore_eos"], len(asked["prompt"])) == (4, 12, True, 40)
    run = load(tmp_path)["methods"]["endpoint"]["runs"][0]
    # Twelve tokens in three pieces that are not empty.
    assert list(accumulate(run["step_tokens"])) == [4, 8, 12]
    assert run["step_seconds"][0] == 0 and all(a <= b for a, b in pairwise(run["step_seconds"]))
    assert run["ms_per_token"] == pytest.approx(1000 * run["step_seconds"][-1] / 8)


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"model": "owner/Other-7B"}, "has owner/Other-7B and not reference-model: start it with the model that is"),
        ({"model": None}, "does not speak OpenAI's protocol"),
        ({"usage": False}, "did not count its tokens"),
        ({"pieces": ("",)}, "gave no text"),
    ],
)
def test_a_server_that_does_not_serve_is_one_sentence(data, tmp_path, named, reason):
    with standing_in(**named) as server:
        result = compare(data, tmp_path / "out", "--endpoint", server.url)
    assert result.exit_code == 2 and result.stderr.strip().count("\n") == 0, result.output
    assert server.url in result.stderr and reason in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--endpoint", "127.0.0.1:8000"), "the endpoint 127.0.0.1:8000 is no address such as http://"),
        (("--endpoint", "http://127.0.0.1:9"), "the server at http://127.0.0.1:9 does not answer ("),
        (("--endpoint", "http://127.0.0.1:9", "--processes", "2"), "leave out --processes, or --endpoint"),
        (("endpoint",), "endpoint is the row of a server: name it with --endpoint URL"),
        (("hf-assisted:tree=1,2",), "hf-assisted is not decoded here and takes no options"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(data, tmp_path, arguments, reason):
    result = compare(data, tmp_path / "out", *arguments)
    assert result.exit_code == 2 and reason in result.stderr and result.stderr.count("\n") == 1, result.output
    assert not (tmp_path / "out").exists()


def test_what_was_finished_before_the_server_failed_is_kept(data, tmp_path):
    with standing_in(fails_at=3) as server:
        flags = ("--endpoint", server.url, "--runs", 2)
        cut = compare(data, tmp_path, *flags)
        assert cut.exit_code == 2 and cut.stderr.strip().count("\n") == 0
        assert "refused the request (400): no more room; what was generated is kept in" in cut.stderr
        # The first run of both rows and, as rows take turns, nothing or ar's of the second.
        done = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()[1:]]
        assert [(each["method"], each["run"]) for each in done] == [("ar", 0), ("endpoint", 0)]
        again = compare(data, tmp_path, *flags)
        assert again.exit_code == 0 and "2 finished generations taken over" in again.stderr
    assert len(load(tmp_path)["methods"]["endpoint"]["runs"]) == 2


def test_transformers_drafts_with_the_small_model(data, tmp_path):
    model = str(data / "reference-model")
    greedy = ("--temperature", "0", "--max-new-tokens", "30", "--check-lossless")
    # A model is its own best assistant.
    result = compare(data, tmp_path / "own", "--draft-model", model, *greedy, methods=("hf", "hf-assisted"))
    assert result.exit_code == 0, result.output
    rows = load(tmp_path / "own")["methods"]
    assert rows["hf-assisted"]["identical_to_ar"] is True and rows["hf-assisted"]["tokens_per_step"] > 1.5
    assert rows["hf"]["tokens_per_step"] == 1.0 and "[transformers]" not in result.stderr
    refused = compare(data, tmp_path / "none", "--model", model, methods=("hf-assisted",))
    assert refused.exit_code == 2
    assert "hf-assisted needs a small model with the same vocabulary: give --draft-model" in refused.stderr


def test_transformers_rows_suppress_the_same_tokens(data, tmp_path):
    """Greedy, tokens that plain decoding would choose are left out in both."""
    fields = {"data_dir": data, "max_new_tokens": 12, "prompt_tokens": 30, "runs": 1}
    greedy = {"temperature": 0, "repetition_penalty": 1.0, "min_p": 0.0}
    free = experiment.compare(["ar"], output=tmp_path / "free", sampling=greedy, **fields)
    chosen = free["methods"]["ar"]["runs"][0]["token_ids"]
    without = greedy | {"suppress_tokens": tuple(sorted(set(chosen[:3])))}
    rows = experiment.compare(["ar", "hf"], output=tmp_path / "without", sampling=without, **fields)["methods"]
    assert rows["hf"]["identical_to_ar"] is True
    assert not set(without["suppress_tokens"]) & set(rows["hf"]["runs"][0]["token_ids"])
