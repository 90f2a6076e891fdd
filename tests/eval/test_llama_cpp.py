"""llama.cpp's rows, through a stand-in for its package and one for its server; one test is of the real package."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fake_llama_cpp import install

from decoder.parts import native

pytest.importorskip("gguf")
if not native.available():
    pytest.skip("needs the native library", allow_module_level=True)

from tests.decoder.test_quantised_model import write

import decoder
from ts_eval import compare as experiment
from ts_eval.cli import main
from ts_eval.comparing import llama_cpp
from ts_eval.comparing.method_spec import MethodSpec

PROMPT = "\x01\x02\x03\x04\x05\x06\x07\x08" * 3
FREE = {"repetition_penalty": 1.0, "min_p": 0.0}
ROWS = ("llama.cpp", "llama.cpp-prompt-lookup")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPT)
    return str(path)


def compare(methods, file, prompts, output, **named):
    sampling = FREE | named.pop("sampling", {})
    settings = {"max_new_tokens": 40, "runs": 2, "sampling": sampling, **named}
    return experiment.compare(methods, model=str(file), prompts=prompts, output=output, **settings)


@contextmanager
def server(file, build="b1-abc", tokens=tuple(range(10, 22)), drafted=None):
    """A llama-server's two addresses; yields its address and what it was asked for."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def reply(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            assert self.path == "/props"
            self.reply({"model_path": f"/elsewhere/{file}"} | ({"build_info": build} if build else {}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            timings = {"prompt_ms": 50.0, "predicted_ms": 110.0}
            if drafted is not None:
                timings |= {"draft_n": drafted, "draft_n_accepted": 4}
            self.reply({"tokens": tokens[: body["n_predict"]], "timings": timings})

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}", asked
        finally:
            running.shutdown()
            thread.join()


def test_the_package_is_timed_in_turn_on_the_same_file_and_tokens(file, prompts, tmp_path, monkeypatch):
    made = install(monkeypatch)
    results = compare(ROWS, file, prompts, tmp_path / "out", sampling={"temperature": 0.7, "top_k": 4}, seed=3)
    plain, drafting = made
    assert plain["path"] == drafting["path"] == str(file) and plain["draft_model"] is None
    assert plain["n_threads"] == plain["n_threads_batch"] == torch.get_num_threads()
    assert plain["last_n_tokens_size"] == 1024 and plain["n_ctx"] >= 24 + 40 + 10 and plain["n_gpu_layers"] == 0
    rows = results["methods"]
    assert list(rows) == ["ar", *ROWS]
    for name in ROWS:
        row = rows[name]
        assert row["identical_to_ar"] is None and row["first_divergence"] is None and row["bitwise"] is False
        assert row["speedup"] > 0 and row["prefill_seconds"] > 0 and row["perplexity"] > 1
        assert [len(run["token_ids"]) for run in row["runs"]] == [40, 40] and row["runs"][0]["text"]
        assert row["runs"][0]["token_ids"] != row["runs"][1]["token_ids"]
    assert rows["llama.cpp"]["tokens_per_step"] == 1 and rows["llama.cpp"]["own_plain"] is None
    row = rows["llama.cpp-prompt-lookup"]
    assert (row["own_plain"], row["identical_to_own_plain"], row["own_first_divergence"]) == ("llama.cpp", True, None)
    assert row["tokens_per_step"] > 1 and 0 < row["acceptance_rate"] < 1
    for run in row["runs"]:
        assert sum(run["step_tokens"]) == 40 and run["accepted"] == 40 - run["steps"]
    assert results["settings"]["llama_cpp"] == dict.fromkeys(ROWS, "llama-cpp-python 0.0.1")


def test_drafting_that_changes_the_text_is_told(file, prompts, tmp_path, monkeypatch):
    install(monkeypatch, biased=True)
    results = compare(ROWS, file, prompts, tmp_path, sampling={"temperature": 0.7, "top_k": 100})
    row = results["methods"]["llama.cpp-prompt-lookup"]
    assert row["identical_to_own_plain"] is False and row["own_first_divergence"] is not None
    page = CliRunner(env={"COLUMNS": "120"}).invoke(main, ["report", str(tmp_path)])
    assert page.exit_code == 0, page.output
    text = (tmp_path / "report.md").read_text()
    assert f"not own, at {row['own_first_divergence']}" in text and "with its own sampler" in text
    assert "another text than llama.cpp, its engine" in (tmp_path / "report.html").read_text()


def test_a_small_model_drafts_greedily_and_reads_the_prompt_before_the_clock(file, prompts, tmp_path, monkeypatch):
    made = install(monkeypatch)
    rows = ("llama.cpp", "llama.cpp-draft-model")
    results = compare(
        rows, file, prompts, tmp_path, draft_model=str(file), max_new_tokens=20, sampling={"temperature": 0}
    )
    assert [each["draft_model"] is None for each in made] == [True, True, False]
    row = results["methods"]["llama.cpp-draft-model"]
    # The same logits draft for themselves: behind the prompt's own token five of each pass.
    assert row["identical_to_own_plain"] is True and row["runs"][0]["step_tokens"] == [1, 5, 5, 5, 4]


def text_of(engine, prompt, tokens, stop_ids=()):
    """An engine's greedy text."""
    text = []
    engine.generate(prompt, tokens, decoder.SamplingParams(temperature=0), stop_ids, lambda step, *_: text.extend(step))
    return text


def test_an_answer_ends_where_the_model_ends_it(monkeypatch):
    install(monkeypatch)
    engine = llama_cpp.Loading("a.gguf", None, 1, 64, 1024, False).engine(MethodSpec.parse("llama.cpp"))
    whole = text_of(engine, [1, 2, 3], 12)
    assert len(whole) == 12 and text_of(engine, [1, 2, 3], 12, {whole[5]}) == whole[: whole.index(whole[5]) + 1]


def test_a_llama_server_is_asked_by_its_own_protocol(file, prompts, tmp_path):
    sampling = {"temperature": 0.7, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.1}
    with server("tiny.gguf") as (plain, asked), server("tiny.gguf", drafted=8) as (drafting, _):
        rows = [f"llama.cpp:endpoint={url}" for url in (plain, drafting)]
        results = compare(rows, file, prompts, tmp_path, sampling=sampling, max_new_tokens=12, seed=4)
    (path, warm_up), (_, body), *_ = asked
    assert path == "/completion" and warm_up["n_predict"] == 2 and len(body["prompt"]) == 24
    expected = {
        "seed": 4, "temperature": 0.7, "top_k": 9, "top_p": 1.0, "min_p": 0.05, "repeat_penalty": 1.1,
        "repeat_last_n": 1024, "n_predict": 12, "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    assert {name: body[name] for name in expected} == expected
    first, second = (results["methods"][row] for row in rows)
    run = first["runs"][0]
    assert run["token_ids"] == list(range(10, 22)) and run["prefill_seconds"] == 0.05
    # Eleven tokens behind the prompt's own one.
    assert run["ms_per_token"] == pytest.approx(10) and first["own_plain"] is None
    assert second["own_plain"] == rows[0] and second["identical_to_own_plain"] is True
    assert second["acceptance_rate"] == 0.5 and second["tokens_per_step"] == 12 / 8
    assert results["settings"]["llama_cpp"][rows[0]] == "llama.cpp b1-abc"


def refused(*arguments):
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)])
    assert result.exit_code == 2 and result.stderr.strip().count("\n") == 0, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("llama.cpp", "--eta-cutoff", "0.1"), "llama.cpp's rows have no eta_cutoff: leave it out"),
        (("llama.cpp-draft-model",), "llama.cpp-draft-model needs a small model with the same vocabulary: give"),
        (("llama.cpp:tree=1,2",), "take no options but a server's address, llama.cpp:endpoint=URL"),
        (("llama.cpp:endpoint=127.0.0.1:8080",), "the endpoint 127.0.0.1:8080 is no address such as http://"),
        (("llama.cpp:endpoint=http://127.0.0.1:9",), "the server at http://127.0.0.1:9 does not answer ("),
        (("llama.cpp:endpoint=http://127.0.0.1:9", "--processes", "2"), "a server is timed one request at a time"),
    ],
)
def test_wrong_input_is_one_sentence(file, prompts, tmp_path, monkeypatch, arguments, reason):
    install(monkeypatch)
    flags = ("--prompts", prompts, "--max-new-tokens", 4, "--output", tmp_path / "out")
    assert reason in refused(*arguments, "--model", file, *flags)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_before_anything_is_loaded(data, file, prompts, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    told = refused("llama.cpp", "--model", file, "--prompts", prompts)
    assert "needs the package llama-cpp-python" in told and "pip install 'tokenswift-eval[llama-cpp]'" in told
    told = refused("llama.cpp", "--model", data / "reference-model", "--prompts", prompts)
    assert "llama.cpp reads GGUF files, and" in told and "reference-model is none" in told


def test_another_server_or_file_is_one_sentence(file, prompts, tmp_path):
    flags = ("--model", file, "--prompts", prompts, "--output", tmp_path / "out")
    with server("tiny.gguf", build=None) as (url, _):
        assert f"what answers at {url} is no llama-server" in refused(f"llama.cpp:endpoint={url}", *flags)
    with server("other.gguf") as (url, _):
        assert f"the llama-server at {url} has other and not tiny" in refused(f"llama.cpp:endpoint={url}", *flags)


@pytest.mark.slow
def test_the_real_package_computes_the_same_model(file):
    """Logits beside ours up to rounding, and greedy texts that its own drafting keeps."""
    pytest.importorskip("llama_cpp")
    loading = llama_cpp.Loading(str(file), None, 1, 64, 1024, False)
    plain, drafting = (loading.engine(MethodSpec.parse(name)) for name in ROWS)
    prompt = [5, 6, 7, 8, 9] * 3
    ours = decoder.load(str(file)).model(torch.tensor([prompt])).logits[0, -1].double().detach().numpy()
    theirs = plain.logits(prompt).astype(np.float64)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.999
    texts = [text_of(engine, prompt, 20) for engine in (plain, drafting)]
    assert len(texts[0]) == 20 and texts[0] == texts[1]
