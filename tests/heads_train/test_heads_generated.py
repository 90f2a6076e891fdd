"""Training text of the model's own: what the decoder writes, each text once, whoever writes it."""

import numpy as np
import pytest

import decoder
from decoder.engine import Engine
from decoder.jobs.on_ray import Cluster
from heads_train.cli import main
from heads_train.generated import GeneratedChunks, GeneratedText

PROMPTS = np.arange(24).reshape(6, 4) % 15


@pytest.fixture
def chunks(model, tmp_path):
    """Chunks of 24 tokens in a folder of their own, five texts, by the tiny model."""

    def make(folder="cache", texts=5, seed=7, chunk_tokens=24, **settings) -> GeneratedChunks:
        settings = GeneratedText("unused", **({"prompt_tokens": 4} | settings))
        return GeneratedChunks(str(model), settings, PROMPTS, texts, chunk_tokens, seed, tmp_path / folder)

    return make


def test_a_text_is_a_prompt_and_what_the_decoder_makes_of_it(chunks, model):
    made = chunks(temperature=0.9, min_p=0.05)
    made.make()
    rows = made.load()
    assert rows.shape == (5, 24)
    plain = decoder.load(model)
    prompts = PROMPTS.tolist()
    for row in rows.tolist():
        assert row[:4] in prompts
        prompts.remove(row[:4])
    sampling = decoder.SamplingParams(temperature=0.9, min_p=0.05, repetition_penalty=1.2, seed=(7 << 32) + 3)
    assert plain.generate(rows[3, :4].tolist(), 20, "ar", sampling, ignore_eos=True).token_ids == rows[3, 4:].tolist()


def test_heads_speed_the_generation_up_and_leave_the_text(chunks, model, tmp_path):
    decoder.DraftHeads(32).save_pretrained(tmp_path / "heads")
    plain, drafted = chunks("plain"), chunks("drafted", heads=str(tmp_path / "heads"), tree=(1, 2))
    plain.make()
    drafted.make()
    assert np.array_equal(plain.load(), drafted.load())


def test_a_cluster_writes_the_same_texts_for_rank_0_alone(chunks, monkeypatch):
    plain, of_cluster = chunks("plain"), chunks("cluster", ray="auto", batch=1)
    given = []

    def in_blocks(self, ready, items, block):
        """What Ray does, in this process."""
        do, identity = ready()
        for start in range(0, len(items), block):
            given.append(items[start : start + block])
            yield from ((item, result, identity) for item, result in zip(given[-1], do(given[-1]), strict=True))

    monkeypatch.setattr(Cluster, "map", in_blocks)
    plain.make()
    of_cluster.make(rank=1, ranks=2)
    assert not given
    of_cluster.make(rank=0, ranks=2)
    assert [len(block) for block in given] == [2, 2, 1] and np.array_equal(plain.load(), of_cluster.load())


def test_ranks_share_the_work_and_a_cut_one_goes_on(chunks, monkeypatch):
    whole, shared = chunks("whole"), chunks("shared")
    whole.make()
    written = []
    stream_batch = decoder.Decoder.stream_batch

    def counted(self, prompts, *arguments, **named):
        written.extend(prompts)
        return stream_batch(self, prompts, *arguments, **named)

    monkeypatch.setattr(decoder.Decoder, "stream_batch", counted)
    shared.make(rank=1, ranks=2)
    assert len(written) == 2
    with pytest.raises(OSError, match=r"3 of 5 generated texts are not in .*; all nodes must share --data.cache_dir"):
        shared.load()
    shared.make(rank=0, ranks=2)
    shared.make()
    assert len(written) == 5
    assert np.array_equal(whole.load(), shared.load())
    # More texts keep those that are there.
    more = chunks("shared", texts=7)
    more.make()
    assert len(written) == 7
    assert np.array_equal(more.load()[:5], whole.load())


@pytest.mark.parametrize("heads", [False, True])
def test_texts_decoded_together_are_those_of_one_at_a_time(chunks, tmp_path, monkeypatch, heads):
    drafting = {}
    if heads:
        decoder.DraftHeads(32).save_pretrained(tmp_path / "heads")
        drafting = {"heads": str(tmp_path / "heads"), "tree": (1, 2)}
    most, step = [], Engine.step

    def watched(self):
        stepped = step(self)
        most.append(len(stepped))
        return stepped

    monkeypatch.setattr(Engine, "step", watched)
    alone, together = chunks("alone", batch=1, **drafting), chunks("together", batch=3, **drafting)
    alone.make()
    assert max(most) == 1
    together.make()
    assert max(most) == 3
    assert np.array_equal(alone.load(), together.load())


def test_a_batch_cut_in_the_middle_keeps_what_is_finished(chunks, monkeypatch):
    whole, cut = chunks("whole"), chunks("cut", batch=2)
    whole.make()
    save, saved = GeneratedChunks._save, []

    def cut_off(self, n, token_ids):
        if len(saved) == 3:
            raise KeyboardInterrupt
        saved.append(n)
        save(self, n, token_ids)

    with monkeypatch.context() as patched:
        patched.setattr(GeneratedChunks, "_save", cut_off)
        with pytest.raises(KeyboardInterrupt):
            cut.make()
    with pytest.raises(OSError, match="2 of 5 generated texts"):
        cut.load()
    monkeypatch.setattr(GeneratedChunks, "_save", lambda self, n, ids: saved.append(n) or save(self, n, ids))
    cut.make()
    assert sorted(saved) == [0, 1, 2, 3, 4]
    assert np.array_equal(whole.load(), cut.load())


def test_other_settings_give_other_texts(chunks):
    kept = chunks()
    kept.make()
    for other in (chunks(seed=8), chunks(temperature=0.5), chunks(chunk_tokens=25)):
        with pytest.raises(OSError, match="5 of 5"):
            other.load()


def test_a_run_on_generated_text_trains_and_says_so(flags, books, tmp_path, capsys):
    flags = [flag for flag in flags if not flag.startswith("--data.source=")]
    generated = [f"--data.generated.prompts={books}", "--data.generated.texts=20", "--data.generated.prompt_tokens=8"]
    flags = [*flags, "--data.source=generated", *generated]
    assert main(["fit", *flags]) == 0
    assert "'texts': 20" in (tmp_path / "out" / "best" / "README.md").read_text()
    assert len(list((tmp_path / "cache").glob("generated-*"))) == 2
    for flag, reason in (
        ("--data.generated.prompt_tokens=32", "data.generated.prompt_tokens 32 must be below data.chunk_tokens 32"),
        ("--data.generated.texts=0", "data.generated.texts must be at least 1, got 0"),
        ("--data.generated.batch=0", "data.generated.batch must be at least 1, got 0"),
        ("--data.generated.min_p=2", "min_p must be between 0 and 1, not 2"),
    ):
        assert main(["fit", *flags, flag]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]
