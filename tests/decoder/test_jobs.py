"""Files of requests: what is answered, in which order, and what survives a kill."""

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from decoder import Decoder
from decoder import __main__ as command
from decoder.jobs.answering import Answering, settled
from decoder.jobs.command import reuse_for
from decoder.jobs.job import Job
from decoder.jobs.lines import Requests
from decoder.jobs.on_ray import Cluster
from decoder.stats import Statistics

from ..forked import forked
from ..tiny import byte_tokenizer
from .conftest import tiny_llama
from .ranks import free_port
from .serving import TEMPLATE, served


def chat_decoder():
    """One whose log-probabilities are the same whatever shares a pass."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Decoder(tiny_llama(torch.float32, vocab_size=256), tokenizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Its folder."""
    folder, dec = tmp_path_factory.mktemp("model"), chat_decoder()
    dec.model.save_pretrained(folder)
    dec.tokenizer.save_pretrained(folder)
    return folder


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mixed(count):
    """Requests of several kinds, lengths and beginnings."""
    records = []
    for number in range(count):
        fields = {"max_tokens": 3 + number % 5, "seed": number}
        if number % 3 == 0:
            records.append({"id": f"p{number}", "prompt": "A boat " * (number % 4) + str(number), **fields})
        elif number % 3 == 1:
            body = {"messages": [{"role": "user", "content": f"Tell {number}"}], **fields, "logprobs": number % 2 == 0}
            records.append({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        else:
            records.append({"custom_id": number, "prompt": [5, 6, number % 256], **fields, "temperature": 0})
    return records


@pytest.fixture(scope="module")
def answering():
    return Answering(chat_decoder(), "tiny", 4)


def answered(answering, source, output, limit=None):
    """The rows of a file, or after ``limit`` answers the process ends."""
    requests = Requests(source, {})
    with Job(requests, output) as job:
        job.open()
        job.begin(answering.identity())

        def done(line, row):
            nonlocal limit
            if limit == 0:
                raise KeyboardInterrupt
            limit = None if limit is None else limit - 1
            job.record(line.number, row)

        answering.answer((requests[number] for number in job.rest()), job.created, done)
        assert job.finish() == sum(json.loads(line)["error"] is not None for line in output.open())
    return [json.loads(line) for line in output.open()]


def test_answers_are_the_servers_in_the_order_of_the_file(answering, tmp_path):
    records = mixed(12)
    rows = answered(answering, written(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in rows] == [str(record.get("custom_id", record.get("id"))) for record in records]
    assert not (tmp_path / "out.jsonl.journal").exists() and not (tmp_path / "out.jsonl.part").exists()
    with served(answering.service.dec) as server:
        for record, row in zip(records, rows, strict=True):
            body = record.get("body") or {k: v for k, v in record.items() if k not in ("id", "custom_id")}
            path = record.get("url", "/v1/completions")
            expected = server.post({**body, "model": "tiny"}, path).json()
            found = row["response"]["body"]
            assert row["error"] is None and row["response"]["status_code"] == 200
            key = found["id"].partition("-")[2]
            assert found == settled(expected, key, found["created"])


def test_a_request_that_cannot_be_answered_has_a_row_with_its_error(answering, tmp_path):
    records = [
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "a", "temprature": 1},
        {"prompt": "a", "temperature": float("inf")},
        {"prompt": "a" * 5000, "max_tokens": 2},
        {"prompt": "b", "max_tokens": 2},
        {
            "prompt": "b",
            "max_tokens": 2,
            "bad_words": ["y"],
            "guided_choice": ["yes"],
        },
    ]
    source = written(tmp_path / "in.jsonl", records)
    rows = answered(answering, source, tmp_path / "out.jsonl")
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 400, 400, 200, 400]
    assert "temprature" in rows[1]["error"]["message"]
    assert rows[3]["error"]["code"] == "context_length_exceeded"
    assert "no token is left" in rows[5]["error"]["message"]
    # None of them has a seed, and a file has the same answers another time.
    again = answered(answering, source, tmp_path / "again.jsonl")
    assert [row["response"]["body"].get("choices") for row in again] == [
        row["response"]["body"].get("choices") for row in rows
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 of .* is not JSON"),
        ('\n{"prompt": "a"}\n\n{"id": "1", "prompt": "b"}\n', "line 4 of .* has the custom_id of line 2 of .*: 1"),
        ('{"prompt": "a", "prompt": "b"}', "prompt in line 1 of .* is there twice"),
        ('{"max_tokens": 3}', "line 1 .* asks for nothing"),
        ("[1]", "line 1 .* is no JSON object"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "line 1 .*url must be"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}, "metod": "POST"}', "line 1 .*metod is no field"),
        ('{"url": "/v1/completions", "body": {"prompt": "a"}}', "line 1 .*has no custom_id"),
        ('{"prompt": "a", "stream": true}', "line 1 .*stream"),
        ('{"prompt": "a\\ud800"}', "prompt in line 1 of .*surrogate"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_any_work(tmp_path, text, words):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words):
        Requests(tmp_path / "in.jsonl", {})


def test_a_cut_job_goes_on_to_the_same_file(answering, tmp_path):
    source = written(tmp_path / "in.jsonl", mixed(14))
    whole = answered(answering, source, tmp_path / "whole.jsonl")
    cut = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answered(answering, source, cut, limit=5)
    assert not cut.exists()
    journal = tmp_path / "cut.jsonl.journal"
    kept = journal.read_bytes()
    assert kept.count(b"\n") == 6
    journal.write_bytes(kept[:-7])  # killed within a write
    rows = answered(answering, source, cut)
    for row, other in zip(rows, whole, strict=True):
        row["response"]["body"].pop("created"), other["response"]["body"].pop("created")
    assert rows == whole
    with pytest.raises(FileExistsError, match="is there already"):
        answered(answering, source, cut)


def test_a_journal_of_something_else_is_refused(answering, tmp_path):
    source, out = written(tmp_path / "in.jsonl", mixed(5)), tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answered(answering, source, out, limit=2)
    for defaults, other, words in (
        ({"seed": 5}, {}, "other requests or defaults"),
        ({}, {"model": "other"}, "belongs to another model"),
    ):
        with Job(Requests(source, defaults), out) as job:
            job.open()
            with pytest.raises(ValueError, match=words):
                job.begin({**answering.identity(), **other})
    with Job(Requests(source, {}), out) as job, Job(Requests(source, {}), out) as second:
        job.open()
        with pytest.raises(OSError, match="another run is answering"):
            second.open()


def test_answers_go_to_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path.relative_to(tmp_path)):
        with pytest.raises(IsADirectoryError, match="is a folder: choose a file"):
            Job(None, folder)


def test_prompts_that_begin_alike_follow_each_other(tmp_path):
    long = "This is a system prompt that many share. " * 20
    records = [{"prompt": (long if number % 2 else "") + f"{number}" * (number + 1)} for number in range(8)]
    requests = Requests(written(tmp_path / "in.jsonl", records), {})
    assert sorted(requests.order) == list(range(8))
    places = [requests.order.index(number) for number in (1, 3, 5, 7)]
    assert max(places) - min(places) == 3
    assert [number for number in requests.order if number % 2 == 0] == [6, 4, 2, 0]
    assert requests.shared_tokens is None


def test_long_answers_are_begun_first(tmp_path):
    asked = [{"max_tokens": 5}, {"max_completion_tokens": 90}, {}, {"max_tokens": 90}, {"max_tokens": -1}]
    records = [{"prompt": str(number) * (number + 1), **fields} for number, fields in enumerate(asked)]
    requests = Requests(written(tmp_path / "in.jsonl", records), {})
    assert requests.order == [4, 2, 3, 1, 0]
    assert requests.shared_tokens == 0


def test_chats_begin_alike_by_their_template(tmp_path):
    """So they follow each other, and of each as much is kept as the next one may take over."""
    records = []
    for number in range(4):
        records.append({"prompt": f"{number} has another beginning", "max_tokens": 5})
        body = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 3}
        records.append({"custom_id": f"c{number}", "url": "/v1/chat/completions", "body": body})
    source = written(tmp_path / "in.jsonl", records)
    requests = Requests(source, {})
    assert sorted(requests.order[:4]) == [1, 3, 5, 7]

    dec, template = chat_decoder(), "You are asked by many. "
    dec.tokenizer.chat_template = template + TEMPLATE
    expected = answered(Answering(dec, "tiny", 1), source, tmp_path / "alone.jsonl")
    dec.prefixes = reuse_for(dec.target, requests.shared_tokens)
    used, reused = Statistics.count_step, []

    def counted(statistics, *args):
        reused.append(statistics.reused_tokens)
        used(statistics, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Statistics, "count_step", counted)
        rows = answered(Answering(dec, "tiny", 1), source, tmp_path / "out.jsonl")
    assert sum(count >= len(template) for count in reused) >= 3
    assert 0 < dec.prefixes.nbytes <= dec.prefixes.max_bytes
    assert [row["response"]["body"]["choices"] for row in rows] == [
        row["response"]["body"]["choices"] for row in expected
    ]
    assert reuse_for(dec.target, 0) is None and reuse_for(dec.target, None).max_bytes > dec.prefixes.max_bytes


def test_defaults_fill_what_lines_leave_out(tmp_path):
    source = written(tmp_path / "in.jsonl", [{"prompt": "a", "seed": 3}, {"prompt": "b"}])
    assert [line.body["seed"] for line in Requests(source, {"seed": 9})] == [3, 9]


def test_parquet_in_and_out(answering, tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{"id": "x", "prompt": "a", "max_tokens": 3}, {"id": "y", "prompt": "b", "max_tokens": None}]
    datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "in.parquet"))
    requests, out = Requests(tmp_path / "in.parquet", {"max_tokens": 4}), tmp_path / "out.parquet"
    assert [line.body["max_tokens"] for line in requests] == [3, 4]
    with Job(requests, out) as job:
        job.open()
        job.begin(answering.identity())
        answering.answer(requests, job.created, lambda line, row: job.record(line.number, row))
        job.finish()
    table = datasets.Dataset.from_parquet(str(out))
    assert table["custom_id"][:] == ["x", "y"] and table["finish_reason"][:] == ["length", "length"]
    assert [json.loads(body)["choices"][0]["text"] for body in table["body"]] == table["text"][:]


@pytest.mark.parametrize("content", [b"", b"garbage", b"PAR1 cut"])
def test_a_damaged_parquet_file_is_named(tmp_path, content):
    pytest.importorskip("datasets")
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"in\.parquet is no whole Parquet file"):
        Requests(tmp_path / "in.parquet", {})


def test_the_command(saved, tmp_path, capsys):
    source = written(tmp_path / "in.jsonl", mixed(6))
    given = ["batch", str(source), str(tmp_path / "out.jsonl"), "--model", str(saved)]
    assert command.main([*given, "--defaults", '{"top_p": 0.9}', "--max-batch", "3"]) == 0
    assert "6 answers" in capsys.readouterr().err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6
    for more, words in (
        ([], "is there already"),
        (["--max-batch", "0"], "--max-batch must be at least 1"),
        (["--defaults", "[1]"], "--defaults must be a JSON object"),
        (["--ray-actors", "2"], "--ray-actors goes with --ray"),
    ):
        assert command.main([*given, *more]) == 2
        assert words in capsys.readouterr().err


def test_a_full_disk_keeps_what_is_answered(saved, tmp_path, monkeypatch, capsys):
    source, out = written(tmp_path / "in.jsonl", mixed(8)), tmp_path / "out.jsonl"
    given = [str(part) for part in ["batch", source, out, "--model", saved, "--device", "cpu"]]
    record, count = Job.record, iter(range(100))

    def full(job, number, row):
        if next(count) == 4:
            raise OSError(28, "No space left on device", str(out))
        record(job, number, row)

    monkeypatch.setattr(Job, "record", full)
    assert command.main(given) == 1
    # Answers that were made before the others were told to stop are kept, too.
    kept = (tmp_path / "out.jsonl.journal").read_bytes().count(b"\n") - 1
    assert 4 <= kept < 8
    said = capsys.readouterr().err
    assert "No space left on device" in said and f"{kept} of 8 answers are kept: run it again" in said
    monkeypatch.setattr(Job, "record", record)
    assert command.main(given) == 0
    assert len(out.read_text().splitlines()) == 8


def rows_of(path):
    """The answers of a file, without the time at which the job was begun."""
    rows = [json.loads(line) for line in path.open()]
    for row in rows:
        row["response"]["body"].pop("created", None)
    return rows


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_for_good_goes_on(saved, tmp_path, kills):
    source = written(tmp_path / "in.jsonl", mixed(20 + 4 * kills))
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    common = ["--model", saved, "--device", "cpu", "--max-batch", "3"]
    assert command.main([str(part) for part in ["batch", source, whole, *common]]) == 0
    journal, chance, killed = tmp_path / "cut.jsonl.journal", random.Random(kills), 0
    while not cut.exists():
        process = forked(command.main, ["batch", source, cut, *common])
        before = journal.stat().st_size if journal.exists() else 0
        # Somewhere between its first answers of this turn and some more.
        wanted = before + chance.randrange(1, 4000)
        while killed < kills and process.is_alive() and not (journal.exists() and journal.stat().st_size >= wanted):
            process.join(0.001)
        if killed < kills and process.is_alive():
            process.kill()
            killed += 1
        process.join()
    assert killed >= kills // 2
    assert rows_of(cut) == rows_of(whole)


def test_what_threads_ask_for_is_decoded_together_and_none_waits_for_anothers(answering, tmp_path, monkeypatch):
    """As the blocks of an actor of Ray's."""
    records = mixed(16)
    requests = Requests(written(tmp_path / "in.jsonl", records), {})
    expected = answered(answering, requests.path, tmp_path / "out.jsonl")
    short, long = [requests[number] for number in (0, 1)], [requests[number] for number in range(2, 16)]
    rows, ended, together = {}, [], []
    both, turn = threading.Barrier(2), answering.service.worker.turn

    def counted():
        turn()
        together.append(answering.service.worker.running)

    def read(lines):
        both.wait(60)
        yield from lines

    def answer(lines):
        answering.answer(read(lines), 0, lambda line, row: rows.update({line.number: row}))
        ended.append(len(lines))

    monkeypatch.setattr(answering.service.worker, "turn", counted)
    threads = [threading.Thread(target=answer, args=(lines,)) for lines in (short, long)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended == [2, 14] and max(together) > 2
    for number, row in rows.items():
        row["response"]["body"]["created"] = expected[number]["response"]["body"]["created"]
    assert [rows[number] for number in range(16)] == expected


class InProcess:
    """What of Ray's module is used, with an actor for each block, all in this process."""

    def __init__(self):
        self.data, self.exceptions = self, SimpleNamespace(RayError=ZeroDivisionError)
        self.DataContext = SimpleNamespace(get_current=lambda: SimpleNamespace())

    def init(self, **given): ...
    def shutdown(self): ...

    def cluster_resources(self):
        return {"CPU": 2.0}

    def ActorPoolStrategy(self, size, **given):
        return size

    def from_items(self, items, override_num_blocks):
        self.items = items
        return self

    def map_batches(self, actor, *, fn_constructor_args, batch_size, **resources):
        self.actor, self.given, self.size = actor, fn_constructor_args, batch_size
        return self

    def iter_rows(self):
        for start in range(0, len(self.items), self.size):
            block = [one["item"] for one in self.items[start : start + self.size]]
            out = self.actor(*self.given)({"item": block})
            yield from (dict(zip(out, row, strict=True)) for row in zip(*out.values(), strict=True))


@pytest.fixture
def ray(monkeypatch):
    module = InProcess()
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.data", module)


def test_an_address_without_ray_is_told(ray):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(OSError, match=f"there is no Ray cluster at {address} .*: start one, or use --ray auto"):
        list(Cluster(address).map(None, [1], 1))


@pytest.mark.parametrize(("asked", "words"), [({"actors": 3}, "3 CPUs .* has 2"), ({"gpus": 0.5}, "0.5 GPUs .* has 0")])
def test_actors_that_would_wait_for_ever_are_told(ray, monkeypatch, caplog, asked, words):
    with pytest.raises(ValueError, match=words):
        list(Cluster("auto", **asked).map(None, [1], 1))
    # A cluster may grow.
    monkeypatch.setattr("decoder.jobs.on_ray._reach", lambda address: None)
    [row] = Cluster("there:1", **asked).map(lambda: (lambda items: items, {}), [1], 1)
    assert row[:2] == (1, 1) and re.search(words, caplog.text)


def test_few_items_are_shared_by_all_actors(ray):
    blocks = []

    def ready():
        return (lambda items: blocks.append(items) or items), {}

    assert len(list(Cluster("auto", actors=2).map(ready, [1, 2, 3], 8))) == 3
    assert blocks == [[1, 2], [3]]


def test_a_worker_unlike_the_first_is_told_with_its_node_and_what_is_done_is_kept(ray):
    versions = iter(("1", "1", "2"))

    def ready():
        return (lambda items: [2 * item for item in items]), {"model": "m", "version": next(versions)}

    done = []
    with pytest.raises(ValueError, match=f"the worker on {socket.gethostname()} has another version than the first"):
        for item, result, _ in Cluster("auto").map(ready, [1, 2, 3, 4, 5], 2):
            done.append((item, result))
    assert done == [(1, 2), (2, 4), (3, 6), (4, 8)]


@pytest.mark.slow
def test_actors_of_ray_write_the_same_file_though_one_is_killed(saved, tmp_path):
    """And the driver once."""
    psutil, _ = pytest.importorskip("psutil"), pytest.importorskip("ray")
    source = written(tmp_path / "in.jsonl", mixed(400))
    whole, out = tmp_path / "whole.jsonl", tmp_path / "ray.jsonl"
    common = ["--model", saved, "--device", "cpu", "--max-batch", "3"]
    assert command.main([str(part) for part in ["batch", source, whole, *common]]) == 0
    given = [sys.executable, "-m", "decoder", "batch", source, out, *common, "--ray", "auto", "--ray-actors", "2"]
    for turn in range(2):
        process = subprocess.Popen([str(part) for part in given])
        journal = tmp_path / "ray.jsonl.journal"
        while process.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 20 + 100 * turn):
            time.sleep(0.05)
        actors = [
            one for one in psutil.Process(process.pid).children(recursive=True) if "MapWorker" in "".join(one.cmdline())
        ]
        assert actors
        actors[0].kill()
        if not turn:
            time.sleep(1)
            process.kill()
        process.wait()
    assert process.returncode == 0
    assert rows_of(out) == rows_of(whole)
