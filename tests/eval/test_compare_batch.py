"""`ts-eval compare --batch N`: texts decoded together are the texts of one at a time, and the batch's own speed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import decoder
from ts_eval.cli import main
from ts_eval.comparing import rounds
from ts_eval.comparing.progress import Progress

SHORT = ["--prompt-tokens", "40", "--max-new-tokens", "12", "--tree", "1,2", "--ngrams", "2", "--dtype", "float64"]


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Three prompts of different lengths."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": "The mill by the river. " * count}) + "\n" for count in (1, 2, 3)))
    return path


@pytest.fixture
def compare(data, prompts):
    def run(output: Path, *arguments: str, methods: tuple[str, ...] = ("ar", "tokenswift")):
        command = ["compare", *methods, "--data-dir", str(data), "--prompts", str(prompts), *SHORT, "--runs", "2"]
        return CliRunner(env={"COLUMNS": "160"}).invoke(main, [*command, "--output", str(output), *arguments])

    return run


def load(output: Path) -> dict:
    return json.loads((output / "results.json").read_text())


def tokens(results: dict) -> dict:
    return {name: [run["token_ids"] for run in row["runs"]] for name, row in results["methods"].items()}


def lying(monkeypatch, method: str, place: int, break_off: bool = False):
    """Have the batches of ``method`` give a wrong token at ``place``, or end there in an interruption."""
    honest = decoder.Decoder.stream_batch

    def stream_batch(self, *arguments, **named):
        for given, (index, chunk) in enumerate(honest(self, *arguments, **named)):
            if arguments[2] == method and given == place:
                if break_off:
                    raise KeyboardInterrupt
                chunk.token_ids[0] = (chunk.token_ids[0] + 1) % 256
            yield index, chunk

    monkeypatch.setattr(decoder.Decoder, "stream_batch", stream_batch)


def test_texts_decoded_together_are_those_of_one_at_a_time(compare, tmp_path):
    alone, together = compare(tmp_path / "1"), compare(tmp_path / "4", "--batch", "4", "--check-lossless")
    assert alone.exit_code == together.exit_code == 0, together.output
    assert tokens(load(tmp_path / "1")) == tokens(load(tmp_path / "4"))
    results = load(tmp_path / "4")
    assert results["settings"]["batch"] == 4 and load(tmp_path / "1")["settings"]["batch"] == 1
    for row in results["methods"].values():
        assert row["identical_to_ar"]
        # Six texts, run by run: four and two.
        assert [run["batch_index"] for run in row["runs"]] == [0, 0, 0, 0, 1, 1]
        assert [(run["prompt_index"], run["run"]) for run in row["runs"]] == [(p, r) for r in (0, 1) for p in (0, 1, 2)]
        low, high = row["speedup_interval"]
        assert row["speedup_range"][0] <= low <= row["speedup"] <= high <= row["speedup_range"][1]
    assert "95% CI" in together.stdout and "batch tok/s" in together.stdout and "4 texts at a time" in together.stdout
    assert "batch tok/s" not in alone.stdout
    assert len((tmp_path / "4/generations.jsonl").read_text().splitlines()) == 1 + 12


def test_throughput_is_all_tokens_over_the_time_of_all_steps(compare, tmp_path):
    assert compare(tmp_path / "out", "--batch", "4").exit_code == 0
    rows = load(tmp_path / "out")["methods"]
    for row in rows.values():
        assert row["throughput"] == pytest.approx(72 / sum(run["shared_seconds"] for run in row["runs"]))
        batches = [[run for run in row["runs"] if run["batch_index"] == place] for place in (0, 1)]
        speeds = [12 * len(batch) / sum(run["shared_seconds"] for run in batch) for batch in batches]
        assert row["throughput_range"] == pytest.approx([min(speeds), max(speeds)])
        assert row["throughput_speedup"] == pytest.approx(row["throughput"] / rows["ar"]["throughput"])
        assert row["throughput"] > row["tokens_per_second"]
    # All of ar's texts end together, so that the time of a batch is that of each of its texts.
    for batch in ([run for run in rows["ar"]["runs"] if run["batch_index"] == place] for place in (0, 1)):
        for run in batch:
            assert run["decode_seconds"] == pytest.approx(sum(each["shared_seconds"] for each in batch))
    assert 2 < rows["ar"]["texts_per_step"] < 4


def test_one_at_a_time_a_step_decodes_one_text(compare, tmp_path):
    assert compare(tmp_path / "out").exit_code == 0
    for row in load(tmp_path / "out")["methods"].values():
        assert row["texts_per_step"] == pytest.approx(1)
        for run in row["runs"]:
            assert run["shared_seconds"] == pytest.approx(run["decode_seconds"])


def test_a_wrong_text_of_a_batch_is_found(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "WARM_UP_NEW_TOKENS", 1)
    lying(monkeypatch, "tokenswift", 7)
    result = compare(tmp_path / "out", "--batch", "3", "--check-lossless")
    assert result.exit_code == 1
    row = load(tmp_path / "out")["methods"]["tokenswift"]
    assert not row["identical_to_ar"] and sum(not run["identical_to_ar"] for run in row["runs"]) == 2


def test_a_batch_cut_in_the_middle_goes_on_to_the_same_texts(compare, tmp_path, monkeypatch):
    assert compare(tmp_path / "whole", "--batch", "3").exit_code == 0
    monkeypatch.setattr(rounds, "WARM_UP_NEW_TOKENS", 1)
    with monkeypatch.context() as patched:
        lying(patched, "tokenswift", 5, break_off=True)
        result = compare(tmp_path / "cut", "--batch", "3")
    assert result.exit_code == 130 and "the same command resumes there" in result.stderr
    result = compare(tmp_path / "cut", "--batch", "3")
    assert result.exit_code == 0, result.output
    assert "3 cut generations will be continued." in result.stderr
    assert tokens(load(tmp_path / "whole")) == tokens(load(tmp_path / "cut"))
    row = load(tmp_path / "cut")["methods"]["tokenswift"]
    assert row["resumed"] == 3 and row["throughput"] > 0
    assert not (tmp_path / "cut/in-progress").exists()


def test_texts_that_ended_before_the_cut_are_not_generated_again(compare, tmp_path, monkeypatch):
    generated = []
    add = Progress.add

    def counted(self, ids, counts, logprobs):
        generated.extend(ids)
        add(self, ids, counts, logprobs)

    with monkeypatch.context() as patched:
        lying(patched, "tokenswift", 10, break_off=True)
        patched.setattr(rounds, "WARM_UP_NEW_TOKENS", 1)
        patched.setattr(Progress, "add", counted)
        assert compare(tmp_path, "--batch", "3").exit_code == 130
        before = len(generated)
    with monkeypatch.context() as patched:
        patched.setattr(Progress, "add", counted)
        assert compare(tmp_path, "--batch", "3").exit_code == 0
    assert 0 < before < len(generated) == 2 * 6 * 12


def test_transformers_rows_take_the_texts_one_at_a_time(compare, tmp_path):
    arguments = ("--batch", "3", "--temperature", "0", "--repetition-penalty", "1")
    result = compare(tmp_path / "out", *arguments, methods=("hf",))
    assert result.exit_code == 0, result.output
    assert "hf: not decoded here, and given the texts of a batch one at a time." in result.stderr
    rows = load(tmp_path / "out")["methods"]
    assert rows["hf"]["identical_to_ar"] and rows["hf"]["texts_per_step"] == pytest.approx(1)
    assert rows["ar"]["texts_per_step"] == pytest.approx(3)


def test_another_batch_is_another_comparison(compare, tmp_path):
    assert compare(tmp_path / "out", "--batch", "3", methods=("ar",)).exit_code == 0
    result = compare(tmp_path / "out", "--batch", "2", methods=("ar",))
    assert result.exit_code == 2 and "other settings (batch)" in result.stderr
    result = compare(tmp_path / "out", "--batch", "0", methods=("ar",))
    assert result.exit_code == 2 and result.stderr == "ts-eval: --batch must be at least 1, not 0\n"


def test_too_little_memory_for_a_batch_names_its_texts(compare, tmp_path, monkeypatch):
    def fail(*arguments, **named):
        raise MemoryError

    monkeypatch.setattr(rounds, "WARM_UP_NEW_TOKENS", 1)
    monkeypatch.setattr(Progress, "add", fail)
    result = compare(tmp_path / "out", "--batch", "4")
    assert result.exit_code == 2
    assert (
        "out of memory at ar texts 1-4/6: ask for fewer tokens or a narrower tree, or a smaller --batch"
        in result.stderr
    )
