"""The command `python -m decoder serve`: SIGTERM, and wrong usage in one sentence."""

import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import decoder.__main__ as command_line
from decoder import Decoder, SamplingParams
from decoder.serve import command
from decoder.serve.metrics import Metrics
from decoder.serve.service import Service
from decoder.serve.settings import Settings

from ..tiny import byte_tokenizer
from .conftest import random_heads, tiny_llama
from .serving import Running, within


@pytest.fixture(scope="module")
def dec():
    model = tiny_llama(vocab_size=256)
    return Decoder(model, byte_tokenizer(), random_heads(model))


@pytest.mark.parametrize("grace", [0.0, 30.0], ids=["at once", "with time"])
def test_sigterm_finishes_or_fails_running_requests_in_words(dec, grace):
    service = Service(dec, Settings("tiny", grace=grace, max_batch=2), Metrics())
    tokens = 2000 if not grace else 200
    answers, done = [], threading.Event()

    def client(url):
        server = Running(service, url)
        body = dict(prompt="Call me", max_tokens=tokens, ignore_eos=True, method="ar", seed=1)
        try:
            with ThreadPoolExecutor(4) as pool:
                sent = [pool.submit(server.post, {**body, "stream": index % 2 == 1}) for index in range(4)]
                within(10, lambda: service.worker.running == 2)
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGTERM)
                answers.extend(one.result() for one in sent)
        finally:
            done.set()

    with command._listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=client, args=(listener.getsockname()[1],))
        thread.start()
        command._run(service, listener)
    thread.join(20)
    assert done.is_set() and len(answers) == 4 and not service.worker.alive
    ends = [answer.text.strip().split("\n\n")[-1].removeprefix("data: ") for answer in answers]
    if grace:
        assert [answer.status_code for answer in answers] == [200] * 4
        assert ends[1] == ends[3] == "[DONE]"
        expected = dec.generate("Call me", tokens, "ar", SamplingParams(seed=1), ignore_eos=True).text
        assert json.loads(ends[0])["choices"][0]["text"] == expected
    else:
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert all(json.loads(end)["error"]["code"] == "stopping" for end in ends)


MODEL = ["--model", "data/reference-model"]
USAGE = {
    "port in use": (lambda port, tmp: [*MODEL, "--port", str(port)], "choose another --port"),
    "no such port": (lambda port, tmp: [*MODEL, "--port", "70000"], "--port must be between"),
    "no end of grace": (lambda port, tmp: [*MODEL, "--grace", "inf"], "--grace must be a finite number of seconds"),
    "no end of time": (lambda port, tmp: [*MODEL, "--timeout", "1e400"], "--timeout must be a finite number"),
    "digits": (lambda port, tmp: [*MODEL, "--max-queue", "1" * 401], "--max-queue must be a number that a float holds"),
    "surrogate": (lambda port, tmp: [*MODEL, "--api-key-file", "\udce9"], "--api-key-file is not valid Unicode"),
    "long host": (
        lambda port, tmp: [*MODEL, "--host", "x" * 70],
        "no address of this machine: it is no name of a host",
    ),
    "no such host": (lambda port, tmp: [*MODEL, "--host", "no.such.host.invalid"], "no address of this machine"),
    "no model": (lambda port, tmp: ["--model", str(tmp / "none")], "there is no model folder"),
    "no key file": (lambda port, tmp: [*MODEL, "--api-key-file", str(tmp / "none")], "there is no key file"),
    "empty key": (lambda port, tmp: [*MODEL, "--api-key-file", str(tmp / "empty")], "must hold one key"),
    "no batch": (lambda port, tmp: [*MODEL, "--max-batch", "0"], "--max-batch must be at least 1"),
    "no time": (lambda port, tmp: [*MODEL, "--timeout", "nan"], "--timeout must be at least 1"),
    "no bytes": (lambda port, tmp: [*MODEL, "--prefix-cache-bytes", "-1"], "--prefix-cache-bytes must be at least 0"),
    "no origin": (lambda port, tmp: [*MODEL, "--allow-origin", "example.org"], "--allow-origin 'example.org' is no"),
    "a path": (lambda port, tmp: [*MODEL, "--allow-origin", "https://example.org/"], "is no origin"),
    "capitals": (lambda port, tmp: [*MODEL, "--allow-origin", "https://Example.org"], "is no origin"),
    "two lines": (lambda port, tmp: [*MODEL, "--allow-origin", "https://a.b\nc"], "is no origin"),
    "biased": (lambda port, tmp: [*MODEL, "--verification", "independent"], "exact verification"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_ends_in_one_sentence(name, tmp_path, capsys):
    arguments, words = USAGE[name]
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status = command_line.main(["serve", *arguments(taken.getsockname()[1], tmp_path)])
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "prometheus_client"])
def test_a_missing_extra_is_named(package, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.startswith("decoder.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert command_line.main(["serve", *MODEL]) == 2
    assert f"needs {package}, which is not installed: pip install" in capsys.readouterr().err
