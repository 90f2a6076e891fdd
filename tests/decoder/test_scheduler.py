"""Long work is done in parts: between two of them texts join, leave, time out, stop and get their tokens."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.arguments import check_arguments
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.engine import Engine
from decoder.model.target import Target
from decoder.prefix_reuse import prefix_reuse
from decoder.request import GenerationRequest
from decoder.serve.worker import Worker

from ..tiny import byte_tokenizer
from .conftest import all_heads, tiny_llama
from .serving import served, within

GREEDY = SamplingParams(temperature=0)
LONG = [(7 * index + index // 5) % 48 for index in range(900)]
SHORT = [3, 1, 4, 1, 5]
SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)

READERS = ["ar", "eagle3", "triforce"]
"""Methods whose prompts are read by the model alone, by an EAGLE-3 layer beside it, and by a small model behind it."""


@pytest.fixture(scope="module")
def dec():
    model = tiny_llama(vocab_size=256)
    small = tiny_llama(seed=2, vocab_size=256, **SMALL)
    return Decoder(model, byte_tokenizer(), all_heads(model), small)


@pytest.fixture
def small_parts(monkeypatch):
    """Each part of long work is small: 8 tokens of a prompt, a layer of a cache, a pass that is measured."""
    monkeypatch.setattr("decoder.model.target._SHORT_CHUNK", 8)
    monkeypatch.setattr("decoder.drafters.triforce._CHUNK", 8)
    monkeypatch.setattr("decoder.cache.full._COPIED_AT_ONCE", 1)
    monkeypatch.setattr("decoder.drafters.tuning.verify_costs._SHORTEST", 16)


@pytest.fixture
def parts(monkeypatch, small_parts):
    """The parts of prompts that were read, as (whose: "model" or "small", how many tokens)."""
    done = []
    prefill, draft = Target.prefill, Target.draft

    def prefilled(self, tokens, *given):
        done.append(("model", len(tokens)))
        return prefill(self, tokens, *given)

    def drafted(self, tokens, *given):
        if len(tokens) == 8:
            done.append(("small", len(tokens)))
        return draft(self, tokens, *given)

    monkeypatch.setattr(Target, "prefill", prefilled)
    monkeypatch.setattr(Target, "draft", drafted)
    return done


def added(dec, engine, prompt, new, method="ar"):
    one = check_arguments(dec, GenerationRequest(prompt, new, method, GREEDY, ignore_eos=True))
    sequence = dec.sequence(engine, one)
    engine.add(sequence)
    return sequence


def plain(dec, prompt, new):
    return dec.generate(prompt, new, "ar", GREEDY, ignore_eos=True).token_ids


def run(engine):
    while engine.busy:
        engine.step()


# In a server.


def body(prompt, new, method="ar", **more):
    return dict(prompt=prompt, max_tokens=new, method=method, temperature=0, ignore_eos=True, **more)


def text(dec, prompt, new):
    return dec.tokenizer.decode(plain(dec, prompt, new))


def text_in(answer):
    return answer.json()["choices"][0]["text"]


def sent(server, asked):
    """A socket that has sent a request and waits for no answer."""
    data = json.dumps(asked).encode()
    raw = socket.create_connection(("127.0.0.1", server.http.base_url.port))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return raw


@pytest.mark.parametrize("method, beside", [*((method, True) for method in READERS), (READERS[0], False)])
def test_a_short_request_does_not_wait_for_a_long_prompt(dec, parts, method, beside):
    expected = [text(dec, *asked) for asked in ((SHORT, 150), (LONG, 20), (SHORT[::-1], 2))]
    parts.clear()
    with served(dec) as server, ThreadPoolExecutor(2) as pool:
        if beside:
            decoded = pool.submit(server.post, body(SHORT, 150))
            assert within(20, lambda: server.service.worker.running == 1)
        reader = "small" if method == "triforce" else "model"
        long = pool.submit(server.post, body(LONG, 20, method))
        assert within(20, lambda: parts.count((reader, 8)) > 5)
        before = len(parts)
        answer = server.post(body(SHORT[::-1], 2))
        between = len(parts) - before
        assert not long.done()
        # Those that were read while the request and its answer were under way, of some 110 or 220.
        assert between < 60
        assert text_in(answer) == expected[2]
        assert text_in(long.result()) == expected[1]
        if beside:
            assert text_in(decoded.result()) == expected[0]


@pytest.mark.parametrize("how", ["leaves", "times out", "stops"])
@pytest.mark.parametrize("method", READERS)
def test_a_request_that_ends_while_its_prompt_is_read_ends_within_a_part(dec, parts, monkeypatch, method, how):
    ended, cancel, stop = [], Worker.cancel, Worker.stop
    monkeypatch.setattr(Worker, "cancel", lambda self, job: (ended.append(len(parts)), cancel(self, job))[1])
    monkeypatch.setattr(Worker, "stop", lambda self, grace: (ended.append(len(parts)), stop(self, grace))[1])
    timeout = dict(timeout=0.5) if how == "times out" else {}
    prefill = Target.prefill
    monkeypatch.setattr(Target, "prefill", lambda *given: (time.sleep(0.005), prefill(*given))[1])
    with served(dec, **timeout) as server, ThreadPoolExecutor(1) as pool:
        worker = server.service.worker
        if how == "leaves":
            raw = sent(server, body(4 * LONG, 20, method))
            assert within(20, lambda: len(parts) > 5)
            raw.close()
        else:
            long = pool.submit(server.post, body(4 * LONG, 20, method))
            if how == "stops":
                assert within(20, lambda: len(parts) > 5)
                worker.stop(0)
            assert long.result().json()["error"]["code"] == {"times out": "timeout", "stops": "stopping"}[how]
        assert server.idle(20)
        assert ended and len(parts) <= ended[0] + 1 < 450
        if how == "stops":
            worker.join(20)
            assert not worker.alive
        elif how == "leaves":
            assert server.post(body(SHORT, 2)).status_code == 200


def test_many_long_prompts_hold_no_short_request(dec, parts):
    """Three that are read, one whose client leaves: the order of the others does not change a text."""
    prompts = [LONG[start:] + LONG[:start] for start in (0, 100, 200)]
    expected = [text(dec, prompt, 5) for prompt in prompts]
    of_short = [text(dec, SHORT[:count], 2) for count in (1, 2, 3)]
    parts.clear()
    with served(dec) as server, ThreadPoolExecutor(4) as pool:
        long = [pool.submit(server.post, body(one, 5, method)) for one, method in zip(prompts, READERS, strict=True)]
        raw = sent(server, body(2 * LONG, 5))
        assert within(20, lambda: server.service.worker.running == 4 and len(parts) > 20)
        raw.close()
        assert [text_in(server.post(body(SHORT[:count], 2))) for count in (1, 2, 3)] == of_short
        assert not any(one.done() for one in long)
        assert [text_in(one.result()) for one in long] == expected


# Of one engine.


@pytest.mark.parametrize("method", READERS)
def test_no_step_reads_more_than_a_part(dec, parts, method):
    engine = dec.engine(short_steps=True)
    long = added(dec, engine, LONG, 10, method)
    while not long.token_ids:
        before = len(parts)
        engine.step()
        assert len(parts) <= before + 2  # the last part of the prompt, and the first of what the drafter reads
    run(engine)
    assert long.token_ids == plain(dec, LONG, 10)


@pytest.mark.parametrize("method", READERS)
def test_a_text_that_joins_in_the_middle_of_long_work_is_done_before_it(dec, small_parts, method):
    engine = dec.engine(short_steps=True)
    long = added(dec, engine, LONG, 10, method)
    for _ in range(140 if method == "triforce" else 50):
        engine.step()
    assert not long.token_ids
    short = added(dec, engine, SHORT, 4)
    steps = 0
    while not short.done:
        engine.step()
        steps += 1
    assert steps <= 6 and not long.token_ids
    run(engine)
    assert short.token_ids == plain(dec, SHORT, 4) and long.token_ids == plain(dec, LONG, 10)


def test_texts_go_on_while_costs_are_measured_for_one(dec, small_parts):
    """When it begins, and again whenever it is twice as long."""
    fresh = Decoder(dec.model)
    engine = fresh.engine(short_steps=True)
    first = added(fresh, engine, SHORT, 200)
    engine.step()
    measured = added(fresh, engine, LONG[:20], 60, "auto")
    waited = []
    while not measured.done:
        before = len(measured.token_ids)
        got = dict(engine.step())
        assert got.get(first)
        if measured not in got:
            waited.append(before)
    # The widths 1 to 64 take more than a step each time.
    assert {0} < set(waited) and len(waited) > 2 * len(set(waited))
    run(engine)
    for sequence, prompt, new in ((first, SHORT, 200), (measured, LONG[:20], 60)):
        assert sequence.token_ids == plain(fresh, prompt, new)
    assert measured.statistics.decode_seconds > 0


def test_a_text_that_leaves_while_it_is_measured_leaves_its_cache_as_it_was(dec, small_parts, monkeypatch):
    fresh, lengths, timed = Decoder(dec.model), [], VerifyCosts._time
    monkeypatch.setattr(VerifyCosts, "_time", lambda *given: (lengths.append(1), timed(*given))[1])
    engine = fresh.engine(short_steps=True)
    sequence = added(fresh, engine, LONG[:20], 60, "auto")
    while not sequence.token_ids:
        engine.step()
    seen = len(lengths)
    while len(lengths) == seen:  # until it is twice as long
        engine.step()
    length, tokens = sequence.cache.length, len(sequence.token_ids)
    engine.cancel(sequence)
    assert length == 20 - 1 + tokens and not engine.busy
    assert fresh.generate(LONG[:20], 60, "auto", GREEDY).token_ids == plain(fresh, LONG[:20], 60)


def test_caches_are_copied_while_others_go_on(dec, small_parts):
    """And what is being copied still counts where another would join."""
    together, reuse = [], prefix_reuse(dec.target, 10**7)
    fits = lambda running, candidate: (together.append(set(running)), True)[1]  # noqa: E731
    engine = Engine(dec.target, fits, reuse, short_steps=True)
    first = added(dec, engine, LONG[:40], 1)
    while not first.done:
        engine.step()
    assert engine.busy and not engine.running and reuse.nbytes == 0
    second = added(dec, engine, LONG[:41], 5)
    engine.step()
    assert together[-1] == {first} and reuse.nbytes == 0
    run(engine)
    assert second.statistics.reused_tokens == 0 and reuse.nbytes
    third = added(dec, engine, LONG[:50], 5)
    run(engine)
    assert third.statistics.reused_tokens > 30
    for sequence, prompt in ((second, LONG[:41]), (third, LONG[:50])):
        assert sequence.token_ids == plain(dec, prompt, 5)


def test_what_was_copied_of_another_model_is_not_kept(small_parts):
    dec = Decoder(tiny_llama(vocab_size=256))
    reuse = prefix_reuse(dec.target, 10**7)
    engine = Engine(dec.target, prefixes=reuse, short_steps=True)
    first = added(dec, engine, LONG[:40], 1)
    while not first.done:
        engine.step()
    engine.step()  # a layer is copied
    with torch.no_grad():
        dec.model.lm_head.weight.mul_(2)
    run(engine)
    assert reuse.nbytes == 0


def test_weights_that_changed_are_taken_in_between_steps(small_parts):
    """A request may leave meanwhile; the texts of those that stay are of the new weights."""
    dec = Decoder(tiny_llama(torch.float32, vocab_size=256, num_hidden_layers=12))
    before = plain(dec, SHORT, 20)
    with torch.no_grad():
        for layer in dec.model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    engine = dec.engine(short_steps=True)
    gone, stays = added(dec, engine, SHORT[::-1], 5), added(dec, engine, SHORT, 20)
    assert engine.step() == [] and not stays.cache.length
    engine.cancel(gone)
    steps = 0
    while not stays.token_ids:
        engine.step()
        steps += 1
    assert steps > 5
    run(engine)
    assert stays.token_ids == plain(Decoder(dec.model), SHORT, 20) != before and not gone.token_ids


def test_a_model_that_nobody_can_run_fails_all_that_wait_for_it(dec, small_parts, monkeypatch):
    engine = dec.engine(short_steps=True)
    sequences = [added(dec, engine, prompt, 5) for prompt in (SHORT, LONG)]
    with monkeypatch.context() as patch:
        patch.setattr(dec.target, "vocab_size", 7)
        assert dict(engine.step()) == {sequence: [] for sequence in sequences}
    assert all("make a new Decoder" in str(sequence.error) for sequence in sequences) and not engine.busy
    again = added(dec, engine, SHORT, 5)
    run(engine)
    assert again.token_ids == plain(dec, SHORT, 5)


# Of the library's own batches, which nobody joins: steps need not be short.


@pytest.mark.parametrize("method", [*READERS, "auto"])
def test_in_a_batch_the_short_text_is_done_before_the_long_prompt_is_read(dec, parts, monkeypatch, method):
    monkeypatch.setattr("decoder.model.target._PREFILL_CHUNK", 8)
    monkeypatch.setattr("decoder.scheduler._TOKENS", 8)
    order = []
    for index, chunk in dec.stream_batch([LONG, SHORT], [20, 16], method, GREEDY):
        order += [index] * bool(chunk.token_ids)
        if chunk.output is not None:
            assert chunk.output.token_ids == plain(dec, [LONG, SHORT][index], [20, 16][index])
        if index == 0 and order.count(0) == 1:
            assert order.count(1) == len(order) - 1 > 0
    assert order.index(0) > max(place for place, index in enumerate(order) if index)
