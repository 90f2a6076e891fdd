"""Tensor parallelism with real models and under torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decoder import SamplingParams, load
from decoder.auditing import audit_tokens

from .ranks import free_port, on_ranks
from .serving import within

DATA = Path(__file__).parents[2] / "data"
SAMPLING = SamplingParams(min_p=0.1, repetition_penalty=1.2, seed=1)
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom"

pytestmark = pytest.mark.slow


def rank_generates(rank, model, heads, method):
    dec = load(model, heads, tensor_parallel=True)
    out = dec.generate(PROMPT, 32, method, SAMPLING, ignore_eos=True)
    return out.token_ids, dec.audit(out)


@pytest.mark.parametrize(
    ("model", "heads", "size", "method"),
    [
        ("reference-model", "heads-gated", 2, "auto"),
        ("reference-model", "heads-chained", 2, "tokenswift"),
        ("smollm2", "heads-smollm2", 3, "auto"),
        ("smollm2", None, 3, "ar"),
    ],
)
def test_real_models_give_the_text_of_one_process_up_to_audited_ties(model, heads, size, method):
    if not (DATA / model).is_dir():
        pytest.skip(f"data/{model} is not there: make {model} fetches it")
    heads = None if heads is None else DATA / heads
    dec = load(DATA / model)
    expected = dec.generate(PROMPT, 32, "ar", SAMPLING, ignore_eos=True)
    for tokens, audit in on_ranks(size, rank_generates, DATA / model, heads, method, seconds=300):
        assert audit.equal or audit.margin < 1e-3
        if tokens != expected.token_ids:
            tie = audit_tokens(dec.model, expected.request.prompt_ids, tokens, SAMPLING)
            assert not tie.equal and tie.margin < 1e-3


def torchrun(size, *arguments):
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    started += ["--master-port", str(free_port()), "-m", *arguments]
    return subprocess.Popen(
        [str(part) for part in started],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def worker(agent, rank):
    """The process of that rank which a torchrun has started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return next(int(pid) for pid in children if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text())


def killed(agent):
    """Kill the process of rank 1; what was told to standard error by then."""
    try:
        start = time.monotonic()
        os.kill(worker(agent, 1), signal.SIGKILL)
        _, told = agent.communicate(timeout=60)
    finally:
        agent.kill()
    assert agent.returncode and time.monotonic() - start < 60
    return told


def test_a_worker_that_is_killed_ends_torchrun_with_a_sentence_within_a_minute():
    given = ("--model", DATA / "reference-model", "--prompt", PROMPT, "--max-new-tokens", 20_000, "--ignore-eos")
    with torchrun(2, "decoder", *given, "--tensor-parallel", "--method", "ar") as agent:
        assert agent.stdout.read(20)
        told = killed(agent)
    assert told.count("python -m decoder: another process of this run has ended") == 1


def test_a_comparison_whose_worker_is_killed_ends_with_a_sentence_and_keeps_its_tokens(tmp_path):
    given = ("--max-new-tokens", 20_000, "--prompt-tokens", 100, "--output", tmp_path / "out")
    with torchrun(2, "ts_eval", "compare", "ar", "--tensor-parallel", *given) as agent:
        assert within(60, lambda: any(file.stat().st_size > 1000 for file in tmp_path.rglob("*/*.jsonl")))
        told = killed(agent)
    assert told.count("ts-eval: another process of this run has ended") == 1 and "the same command goes on" in told
