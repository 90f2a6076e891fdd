"""The server: its texts are those of `Decoder.generate`, and whatever a client does costs the others nothing."""

import gc
import json
import logging
import re
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from decoder import Decoder, SamplingParams
from decoder.engine import Engine
from decoder.prefix_reuse import PrefixReuse
from decoder.sequence import Sequence
from decoder.serve import reading as reading_
from decoder.serve import service
from decoder.serve.worker import Worker

from .serving import CHAT, name_of, served, served_by, speaking_decoder, within

dec, server = served_by(speaking_decoder, max_tokens=2000)


def seeded(seed, **fields):
    return SamplingParams(seed=seed, **fields)


@pytest.mark.parametrize("method", [None, "ar", "tokenswift"])
def test_a_completion_is_the_text_of_generate(server, dec, method):
    fields = dict(temperature=0.8, top_p=0.9)
    ours = dict(min_p=0.02, repetition_penalty=1.1, top_k=40, penalty_window=64, eta_cutoff=1e-4)
    asked = dict(model="tiny", prompt="Call me Ishmael", max_tokens=60, seed=7, n=2, **fields)
    got = server.openai.completions.create(
        **asked, logprobs=0, extra_body=ours | ({"method": method} if method else {})
    )
    assert [choice.index for choice in got.choices] == [0, 1]
    for choice in got.choices:
        sampling = seeded(7 + choice.index, **fields, **ours)
        expected = dec.generate("Call me Ishmael", 60, "ar", sampling, return_logprobs=True)
        assert choice.text == expected.text and choice.finish_reason == expected.finish_reason == "length"
        assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs)
        assert choice.logprobs.tokens == [name_of(dec, token) for token in expected.token_ids]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (15, 120, 135)


def test_a_streamed_chat_is_the_whole_one_in_pieces(server, dec):
    asked = dict(model="tiny", messages=CHAT, max_completion_tokens=50, seed=3, n=2, logprobs=True)
    whole = server.openai.chat.completions.create(**asked)
    texts, reasons, logprobs = ["", ""], [None, None], [[], []]
    usage = None
    for chunk in server.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            logprobs[choice.index] += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
    for index, choice in enumerate(whole.choices):
        expected = dec.generate(CHAT, 50, sampling=seeded(3 + index), return_logprobs=True)
        assert choice.message.role == "assistant"
        assert choice.message.content == texts[index] == expected.text
        assert choice.finish_reason == reasons[index] == "length"
        assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.logprobs)
        assert logprobs[index] == pytest.approx(expected.logprobs)
    assert usage.prompt_tokens == whole.usage.prompt_tokens and usage.completion_tokens == 100
    # How much is drafted follows the clock.
    drafts = usage.completion_tokens_details
    assert 0 <= drafts.accepted_prediction_tokens < 100 and drafts.rejected_prediction_tokens >= 0


def test_prompts_may_be_many_and_token_ids(server, dec):
    ids = [dec.tokenizer(text)["input_ids"] for text in ("Call me", "It was")]
    for prompt in (["Call me", "It was"], ids):
        got = server.openai.completions.create(model="tiny", prompt=prompt, max_tokens=12, seed=1, n=2)
        expected = [dec.generate(one, 12, sampling=seeded(1 + i)).text for one in ids for i in range(2)]
        assert [choice.text for choice in got.choices] == expected
    alone = server.openai.completions.create(model="tiny", prompt=ids[0], max_tokens=12, seed=1)
    assert alone.choices[0].text == expected[0]


def test_stops_and_content_parts(server, dec):
    text = dec.generate("Call me", 200, sampling=seeded(5)).text
    stop = next(text[i] for i in range(20, 200) if text[i].isalnum() and text[i] not in text[:20])
    got = server.openai.completions.create(model="tiny", prompt="Call me", max_tokens=200, seed=5, stop=[stop])
    assert got.choices[0].text == text[: text.index(stop)] and got.choices[0].finish_reason == "stop"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Call "}, {"type": "text", "text": "me"}]}]
    got = server.openai.chat.completions.create(model="tiny", messages=parts, max_tokens=9, temperature=0)
    expected = dec.generate([{"role": "user", "content": "Call me"}], 9, sampling=SamplingParams(temperature=0))
    assert got.choices[0].message.content == expected.text


def test_end_tokens_end_a_text_unless_they_are_ignored(server, dec, monkeypatch):
    tokens = dec.generate("Call me", 40, sampling=seeded(2)).token_ids
    end = next(token for token in tokens[5:] if token not in tokens[:5])
    monkeypatch.setattr(dec.model.generation_config, "eos_token_id", end)
    body = dict(prompt="Call me", max_tokens=40, seed=2)
    choice = server.post(body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    ignored = server.post({**body, "ignore_eos": True}).json()
    assert ignored["choices"][0]["finish_reason"] == "length" and ignored["usage"]["completion_tokens"] == 40


def test_a_chat_without_a_length_goes_as_far_as_the_server_allows(dec):
    with served(dec, max_tokens=70) as server:
        got = server.openai.chat.completions.create(model="tiny", messages=CHAT, seed=1)
        assert got.usage.completion_tokens == 70
        assert got.choices[0].message.content == dec.generate(CHAT, 70, sampling=seeded(1)).text


def test_chats_without_a_length_wait_again_where_they_outgrow_memory(dec, monkeypatch):
    """One request asks for three texts; there is room for two of them at their end."""
    preempt, preempted = Sequence.preempt, []
    monkeypatch.setattr(Sequence, "preempt", lambda sequence: (preempted.append(sequence), preempt(sequence)))
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    prompt = len(dec.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))
    room = dec.target.kv_bytes * 2.2 * (prompt + 300 + 64) / 0.6
    monkeypatch.setattr("decoder.admission.available_memory", lambda device: room)
    with served(dec, max_tokens=300, method="ar") as server:
        got = server.openai.chat.completions.create(model="tiny", messages=CHAT, seed=1, n=3)
    texts = [dec.generate(CHAT, 300, "ar", seeded(seed)).text for seed in (1, 2, 3)]
    assert [choice.message.content for choice in got.choices] == texts
    assert len(preempted) == 1


def test_no_seed_is_another_text_each_time(server):
    asked = dict(model="tiny", prompt="Call me", max_tokens=20)
    assert len({server.openai.completions.create(**asked).choices[0].text for _ in range(3)}) == 3


def test_requests_at_the_same_time_are_each_the_text_they_would_be_alone(server, dec):
    bodies = [
        dict(prompt="Call me " * (i % 5 + 1), max_tokens=10 + 17 * i, seed=i, min_p=0.05 * (i % 3), stream=False)
        for i in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        texts = [answer.json()["choices"][0]["text"] for answer in pool.map(server.post, bodies)]
    for body, text in zip(bodies, texts, strict=True):
        sampling = seeded(body["seed"], min_p=body["min_p"])
        assert text == dec.generate(body["prompt"], body["max_tokens"], "ar", sampling).text


REFUSED = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("top_k", -1),
    ("n", 0),
    ("n", 1.5),
    ("seed", -1),
    ("seed", 2**63),
    ("max_tokens", -1),
    ("max_tokens", 2001),
    ("stop", [""]),
    ("stop", 7),
    ("stop", ["x"] * 17),
    ("stream", "yes"),
    ("stream_options", 3),
    ("logprobs", -1),
    ("logprobs", 6),
    ("logprobs", True),
    ("logprobs", "3"),
    ("prompt", None),
    ("prompt", []),
    ("prompt", [1, "x"]),
    ("prompt", {"text": "x"}),
    ("best_of", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", "1"),
    ("logit_bias", {"5": -101}),
    ("suffix", "end"),
    ("echo", "yes"),
    ("tools", [{"type": "function"}]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_field_that_cannot_be_honoured_is_named(server, name, value):
    answer = server.post({"prompt": "Call me", name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"] and "\n" not in error["message"]


def test_penalties_and_biases_are_those_of_generate(server, dec):
    values = dict(presence_penalty=0.5, frequency_penalty=1.5, min_tokens=3, temperature=0.0)
    answer = server.post({"prompt": "Call me", "max_tokens": 12, "logit_bias": {"101": 3}, **values})
    sampling = SamplingParams(**values, logit_bias={101: 3.0})
    expected = dec.generate("Call me", 12, sampling=sampling).text
    assert answer.json()["choices"][0]["text"] == expected
    plain = server.post({"prompt": "Call me", "max_tokens": 12, "temperature": 0}).json()["choices"][0]["text"]
    assert expected != plain


MALFORMED = [
    (b"{", "JSON"),
    (b"\xff\xfe", "JSON"),
    (b"[" * 100_000, "JSON"),
    (b"[1]", "object"),
    (b'{"prompt": "\\ud800"}', "Unicode"),
    (b'{"prompt": ""}', "empty"),
    (b'{"prompt": [999]}', "vocabulary"),
    (b'{"prompt": "x", "method": "faster"}', "method"),
    (b'{"prompt": "x", "method": "triforce"}', "draft_model"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": ["x", "y"], "n": 100}', "n may be at most"),
    (b'{"prompt": "%s"}' % (b"x" * 5000), "positions"),
]


@pytest.mark.parametrize(("content", "words"), MALFORMED, ids=[words for _, words in MALFORMED])
def test_a_malformed_body_is_a_400_in_words(server, content, words):
    answer = server.http.post("/v1/completions", content=content)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [3],
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
    ],
    ids=str,
)
def test_messages_that_are_none_are_a_400(server, messages):
    answer = server.post({"messages": messages}, "/v1/chat/completions")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


def test_paths_models_and_methods(server):
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        server.openai.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.NotFoundError, match="no such model"):
        server.openai.models.retrieve("a/b")
    assert server.http.get("/v2").status_code == 404 and server.http.get("/v2").json()["error"]["message"]
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/metrics", "GET, HEAD"),
    ):
        answer = server.http.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == allowed, path
        assert allowed in answer.json()["error"]["message"]
    assert server.http.get("/health").json() == {"status": "ok"}


def test_a_body_that_is_too_large_is_a_413_and_the_others_go_on(server):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, dict(prompt="Call me", max_tokens=500, seed=1, ignore_eos=True))
        answer = server.post({"prompt": "x" * (30 * 2**20)})
        assert answer.status_code == 413 and "bytes" in answer.json()["error"]["message"]
        assert other.result().status_code == 200


def test_a_chat_needs_a_template(dec, monkeypatch):
    monkeypatch.setattr(dec.tokenizer, "chat_template", None)
    with served(dec) as server, pytest.raises(openai.BadRequestError, match="no chat template"):
        server.openai.chat.completions.create(model="tiny", messages=CHAT)


def test_the_key_is_checked(dec):
    with served(dec, api_key="se\u00e7ret") as server:
        body = dict(prompt="x", max_tokens=1)
        wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic se\u00e7ret".encode()}]
        for headers in wrong:
            answer = server.post(body, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/health").status_code == 200
    with served(dec, api_key="secret") as server:
        assert server.openai.completions.create(model="tiny", prompt="x", max_tokens=1).usage.completion_tokens == 1


def long_stream(server, **more):
    """An open stream of a long text, of which the first piece has come."""
    stream = server.openai.completions.create(
        model="tiny",
        prompt="Call me",
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True, "method": "ar"},
        **more,
    )
    next(iter(stream))
    return stream


def test_a_full_queue_is_a_429(dec):
    with served(dec, max_batch=1, max_queue=1) as server:
        stream = long_stream(server)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.post, dict(prompt="It was", max_tokens=3, seed=1))
            assert within(20, lambda: server.service.worker.waiting == 1)
            with pytest.raises(openai.RateLimitError, match="room for 1 running and 1 waiting") as error:
                server.openai.completions.create(model="tiny", prompt="x")
            assert error.value.response.headers["retry-after"]
            assert server.post(dict(prompt="x", n=2)).status_code == 429
            never = server.post(dict(prompt="x", n=3))
            assert never.status_code == 400 and "never room for more than 2" in never.text
            assert never.json()["error"]["param"] == "n"
            stream.close()
            assert waiting.result().json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_sequence(dec, monkeypatch, whole):
    made, steps = [], []
    init, step = Sequence.__init__, Engine.step
    monkeypatch.setattr(
        Sequence, "__init__", lambda self, *args, **kw: (made.append(weakref.ref(self)), init(self, *args, **kw))[1]
    )
    monkeypatch.setattr(Engine, "step", lambda self: (steps.append(len(self.running)), step(self))[1])
    with served(dec, max_batch=2) as server:
        if whole:
            body = json.dumps(dict(prompt="Call me", max_tokens=2000, ignore_eos=True, n=3, method="ar")).encode()
            raw = socket.create_connection(("127.0.0.1", server.http.base_url.port))
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert within(20, lambda: server.service.worker.running == 2)
            raw.close()
        else:
            long_stream(server, n=3).close()
        assert server.idle()
        # Far fewer steps than the texts would have taken, and nothing remembers them.
        assert len(steps) < 1500 and len(made) == 2
        gc.collect()
        assert within(20, lambda: not any(one() for one in made))
        assert server.post(dict(prompt="x", max_tokens=2)).status_code == 200


def test_a_request_that_takes_too_long_is_a_503(dec):
    with served(dec, timeout=0.3) as server:
        body = dict(prompt="Call me", max_tokens=3000, ignore_eos=True, method="ar")
        answer = server.post(body)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
        lines = server.post({**body, "stream": True}).text.strip().split("\n\n")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert server.idle()


@pytest.fixture
def reading(monkeypatch):
    """Large prompts are read to no end before the event, as by a slow tokenizer."""
    begun, let_go = threading.Event(), threading.Event()
    read = service.prompt_ids

    def slow(prompt, *arguments):
        if len(prompt) > 2**14:
            begun.set()
            assert let_go.wait(30)
        return read(prompt, *arguments)

    monkeypatch.setattr(service, "prompt_ids", slow)
    yield begun, let_go
    let_go.set()


LARGE = dict(prompt="Call me " * 2**12, max_tokens=2)


@pytest.mark.parametrize("prompt", ["Call me", [1, 2, 3], ["a", [1]]], ids=["text", "ids", "several"])
def test_a_small_prompt_does_not_wait_until_a_large_one_is_read(dec, reading, prompt):
    begun, let_go = reading
    with served(dec) as server, ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.post, LARGE)
        assert begun.wait(10)
        assert server.post(dict(prompt=prompt, max_tokens=2)).status_code == 200
        assert not large.done()
        let_go.set()


def test_the_time_in_which_a_prompt_is_read_counts(dec, reading):
    with served(dec, timeout=0.3) as server:
        answer = server.post(LARGE)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"


def test_a_server_that_stops_gives_up_what_it_reads(dec, reading):
    begun, _ = reading
    with served(dec) as server, ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.post, LARGE)
        assert begun.wait(10)
        server.loop.call_soon_threadsafe(server.service.stop)
        assert large.result(10).status_code == 503 and large.result().json()["error"]["code"] == "stopping"
        assert server.post(dict(prompt="a", max_tokens=2)).json()["error"]["code"] == "stopping"
        assert server.service.reading.busy


def test_a_client_that_leaves_while_its_prompt_is_read_asks_for_nothing(dec, reading, monkeypatch):
    jobs, submit = [], Worker.submit
    monkeypatch.setattr(Worker, "submit", lambda self, job: (jobs.append(job), submit(self, job))[1])
    with served(dec) as server:
        data = json.dumps(LARGE).encode()
        with socket.create_connection(("127.0.0.1", server.http.base_url.port)) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            assert reading[0].wait(10)
        gone = 'tokenswift_requests_total{path="/v1/completions",status="499"} 1.0'
        assert within(20, lambda: gone in server.http.get("/metrics").text)
        assert server.post(dict(prompt="a", max_tokens=2)).status_code == 200 and len(jobs) == 1


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_text_that_is_seen_to_be_too_long_is_not_read_to_its_end(dec, monkeypatch, chat):
    """A token of `byte_tokenizer` is a byte."""
    read, positions = [], dec.model.config.max_position_embeddings
    tokenize = reading_.text_ids
    monkeypatch.setattr(reading_, "text_ids", lambda text, *rest: (read.append(len(text)), tokenize(text, *rest))[1])
    with served(dec) as server:
        text = "ab" * (9 * positions)
        asked = dict(messages=[dict(role="user", content=text)]) if chat else dict(prompt=text)
        answer = server.post(asked, "/v1/chat/completions" if chat else "/v1/completions")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if chat else "prompt") and read == [8 * positions]


def test_a_prompt_that_is_none_is_told_with_its_place(server):
    for prompt, place in (["a", ""], "prompt[1]"), ([[1], [2], [10**6]], "prompt[2]"):
        answer = server.post(dict(prompt=prompt, max_tokens=2))
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(place + ": ")


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [(RuntimeError("the whale"), 500, "generation_failed"), (MemoryError(), 503, "out_of_memory")],
    ids=["fault", "memory"],
)
@pytest.mark.parametrize("place", ["step", "sequence"])
def test_a_fault_fails_what_ran_and_no_more(dec, monkeypatch, caplog, fault, status, code, place):
    with served(dec) as server, caplog.at_level(logging.DEBUG):
        with monkeypatch.context() as broken:

            def failing(*args):
                raise fault

            broken.setattr(*((Engine, "step") if place == "step" else (Decoder, "sequence")), failing)
            answer = server.post(dict(prompt="white as snow", max_tokens=9))
            assert answer.status_code == status and answer.json()["error"]["code"] == code
        assert server.post(dict(prompt="white as snow", max_tokens=9)).status_code == 200
        assert server.idle()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("decoder")]
    assert ours and not any(word in "".join(ours) for word in ("whale", "snow"))


def test_metrics_count_what_was_done(dec):
    with served(dec) as server:
        server.post(dict(prompt="Call me", max_tokens=30, seed=1, n=2, method="tokenswift"))
        server.post(dict(prompt="Call me", n=0))
        lines = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
        path = 'path="/v1/completions"'
        assert float(lines[f'tokenswift_requests_total{{{path},status="200"}}']) == 1
        assert float(lines[f'tokenswift_requests_total{{{path},status="400"}}']) == 1
        assert float(lines["tokenswift_prompt_tokens_total"]) == 7
        assert float(lines["tokenswift_generated_tokens_total"]) == 60
        assert 0 < float(lines["tokenswift_steps_total"]) <= 60
        assert float(lines["tokenswift_drafted_tokens_total"]) >= float(lines["tokenswift_accepted_tokens_total"])
        assert float(lines["tokenswift_request_seconds_count"]) == 1
        assert float(lines["tokenswift_texts_running"]) == float(lines["tokenswift_texts_waiting"]) == 0


def test_the_next_turn_of_a_chat_prefills_what_is_new(dec, monkeypatch):
    monkeypatch.setattr(dec, "prefixes", PrefixReuse(dec.target, 2**24))
    messages, texts = list(CHAT), []
    with served(dec) as server:
        for turn in range(3):
            asked = dict(model="tiny", messages=messages, max_tokens=20, seed=turn)
            texts.append(server.openai.chat.completions.create(**asked).choices[0].message.content)
            messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "And then?"}]
        metrics = server.http.get("/metrics").text
        reused = float(re.search(r"^tokenswift_reused_tokens_total (\S+)$", metrics, re.MULTILINE)[1])
        # Of the second and third turn at least all that the one before had been asked.
        assert reused > 2 * len("system: Be brief.\nuser: Call me?\nassistant:")
    monkeypatch.setattr(dec, "prefixes", None)
    for turn, text in enumerate(texts):
        assert dec.generate(messages[: 2 + 2 * turn], 20, sampling=seeded(turn)).text == text


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


def test_pages_of_other_origins_cannot_use_the_server_unless_they_are_let(server):
    asked = {"Origin": "https://example.org"}
    answer = server.post(dict(prompt="x", max_tokens=1), headers=asked)
    assert answer.status_code == 403 and not any(name.startswith("access-control") for name in answer.headers)
    # As a form of a page sends it.
    answer = server.http.post("/v1/completions", content='{"prompt": "x"}', headers={"Origin": "null"})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
    own = {"Origin": str(server.http.base_url).rstrip("/")}
    assert server.post(dict(prompt="x", max_tokens=1), headers=own).status_code == 200
    answer = server.http.options("/v1/completions", headers=asked | PREFLIGHT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


@pytest.mark.parametrize("origin", ["https://example.org", "http://[::1]:3000", "*"])
def test_pages_that_are_let_use_the_server_from_a_browser(dec, origin):
    asked = {"Origin": "https://anywhere.example" if origin == "*" else origin}
    with served(dec, api_key="secret", allow_origins=("https://other.example", origin)) as server:
        # A preflight has no key.
        answer = server.http.options("/v1/chat/completions", headers=asked | PREFLIGHT)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == (
            "*" if origin == "*" else origin
        )
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        key = {"Authorization": "Bearer secret"}
        for headers, body, status in (
            (asked, {"prompt": "x"}, 401),
            (asked | key, {"prompt": "x", "max_tokens": -1}, 400),
            (asked | key, {"prompt": "x", "max_tokens": 1}, 200),
            (asked | key, {"prompt": "x", "max_tokens": 1, "stream": True}, 200),
        ):
            answer = server.post(body, headers=headers)
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] in (origin, "*")
            assert "access-control-allow-credentials" not in answer.headers
        if origin != "*":
            other = {"Origin": "https://evil.example"}
            answer = server.post({"prompt": "x", "max_tokens": 1}, headers=other | key)
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
            answer = server.http.options("/v1/completions", headers=other | PREFLIGHT)
            assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
        assert server.http.options("/v1/completions", headers=asked).headers["allow"] == "POST"


def test_a_fault_in_a_body_is_told_while_other_texts_go_on(server):
    """Over HTTP, where an answer with half of a surrogate pair would be a fault of its own."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, dict(prompt="Call me", max_tokens=500, seed=1, ignore_eos=True))
        for path, text, place in (
            ("/v1/completions", '{"prompt": "a", "temperature": 1%s}' % ("0" * 400), "temperature"),
            ("/v1/completions", '{"prompt": ["a", "\\udc00"]}', "prompt[1]"),
            ("/v1/completions", '{"prompt": [1, 1e999]}', "prompt[1]"),
            ("/v1/completions", '{"\\ud800": "a"}', "the body"),
            ("/v1/completions", '{"prompt": "a", "stop": ["b", "\\udfff"]}', "stop[1]"),
            ("/v1/completions", '{"prompt": "a", "model": "\\ud83d"}', "model"),
            ("/v1/completions", '{"prompt": "a", "prompt": "b"}', "prompt"),
            ("/v1/completions", '{"prompt": "a", "user": -Infinity}', "user"),
            ("/v1/chat/completions", '{"messages": [{"role": "\\ud83d", "content": "a"}]}', "messages[0].role"),
            ("/v1/chat/completions", '{"messages": [], "metadata": {"a b": NaN}}', 'metadata["a b"]'),
            ("/v1/chat/completions", '{"messages": %s}' % ("[" * 90 + "]" * 90), "messages[0]"),
        ):
            answer = server.http.post(path, content=text)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["message"].startswith(place), text
        assert other.result().status_code == 200
