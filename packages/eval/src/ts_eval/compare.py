"""The experiment: the same prompts and seeds through several decoding methods, one row per method.

Runs are interleaved: for each run and prompt every method takes its turn, in an order that rotates from run to run,
after a short warm-up of each, so that a machine that warms up or is shared slows no method alone. Clocks are the
engine's own: decoding and prefill apart.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from decoder.parts import ending_in_words, linked, whole_lines
from ts_eval import defaults, metrics
from ts_eval.commands.run_file import write_run_file
from ts_eval.comparing.asked import AskedOfMany, Say, silent
from ts_eval.comparing.checks import audits, differing, divergence_margin, tie_tolerance
from ts_eval.comparing.on_cluster import cluster_of, generate_on
from ts_eval.comparing.processes import working_beside
from ts_eval.comparing.results import SCHEMA_VERSION, GenerationLog, write_json
from ts_eval.comparing.rounds import IN_PROGRESS, Rounds
from ts_eval.comparing.setup import Setup, set_up
from ts_eval.comparing.shared_model import in_step
from ts_eval.comparing.summary import summarise

WAIT_SECONDS = 1.0


def compare(methods: Sequence[str], *, say: Say = silent, **settings) -> dict | None:
    """Run ``methods`` against ``ar`` and write ``output/results.json``; returns its content.

    ``settings`` are the fields of `Experiment`, which also says what is raised; ``say`` is called with a sentence for
    the user now and then.
    """
    return Experiment(tuple(methods), **settings).run(say)


@dataclass(frozen=True, kw_only=True)
class Experiment(AskedOfMany):
    """What is compared, how, and where it goes; ``ar`` is put first when it is not among the methods.

    Args:
        endpoint: address of a server that speaks OpenAI's protocol and has the same model, for one more row.
        max_new_tokens: tokens to generate, end-of-text ignored.
        sanitize_control_tokens: whether control tokens in the messages of chats are text, as in `decoder.load`.
        runs: generations per method and prompt; run r (from 0) uses the seed ``seed`` + r.
        batch: how many of a row's generations are decoded together, taken run by run and prompt by prompt;
            rows that are not decoded here take them one at a time.
        yarn: as in `decoder.load`.
        options: fields of `decoder.TokenSwiftOptions` for every method; a method's own come first.
        marks: numbers of new tokens at which latency and speed-up are told; None takes five equal steps.
        embedding_model: folder or hub id of an encoder, for the semantic diversity of the texts.
        audit: score all texts of ours again with the plain model, to their end, so that a fault of all methods alike is
            found too; and keep all tokens' log-probabilities, to compare them with ar's.
        output: folder; what was generated in it is kept and not generated again.
        extend: add rows and runs to what others with the same settings have left in ``output``; the results are of
            these rows and runs alone.
        processes: how many processes share the prompts and runs, each on a CUDA device of its own where there are
            several, or with its part of the CPU's threads.
        rank: which of the ``processes`` this one is, when a launcher such as torchrun has started them all; None
            starts the others itself. Only rank 0 writes results.
        tensor_parallel: whether the processes that torchrun has started share the model, and not the prompts.

    Raises (from `run`):
        ValueError, OSError: an argument that does not fit or a file that is missing; nothing has been written.
        OtherSettingsError: ``output`` holds generations of other settings.
        OSError, MemoryError: the disk is full or the memory too small; what was generated is kept.
    """

    endpoint: str | None = None
    max_new_tokens: int = defaults.MAX_NEW_TOKENS
    sanitize_control_tokens: bool = False
    runs: int = defaults.RUNS
    batch: int = 1
    yarn: float | None = None
    options: dict | None = None
    marks: Sequence[int] | None = None
    embedding_model: str | None = None
    audit: bool = False
    output: str | Path = defaults.OUTPUT
    extend: bool = False
    processes: int = 1
    rank: int | None = None
    tensor_parallel: bool = False

    def run(self, say: Say = silent) -> dict | None:
        """Generate what is missing and write the results, which are returned; None from ranks other than 0."""
        if self.tensor_parallel:
            with in_step(self) as (own, rank), linked(), ending_in_words():
                results = own._run(say)
            return None if rank else results
        threads, cluster = torch.get_num_threads(), cluster_of(self)
        if self.rank is None:
            # The threads are a part of what all processes must have alike.
            torch.set_num_threads(cluster.cpus if cluster else max(1, threads // max(1, self.processes)))
        try:
            return self._run(say)
        finally:
            torch.set_num_threads(threads)

    def _run(self, say: Say) -> dict | None:
        setup = set_up(self)
        rows = {spec.text: setup.settings_of_row(spec.text) for spec in setup.specs} if self.extend else None
        with GenerationLog(
            Path(self.output),
            setup.settings_of_all() if self.extend else setup.settings,
            setup.environment,
            overwrite=self.overwrite,
            rank=self.rank or 0,
            rows=rows,
        ) as log:
            wanted = [(turn.spec.text, *pair) for turn in setup.turns() for pair in turn.pairs]
            jobs = [job for job in wanted if log.get(*job) is None]
            if len(jobs) < len(wanted):
                kept = len(wanted) - len(jobs)
                say(f"{kept} finished generations taken over from {log.path}; {len(jobs)} left to run.")
            if jobs:
                self._generate(setup, log, jobs, say)
            if self.rank:
                return None
            if not self.extend:
                _drop_parts(log)
            methods = self._summary(setup, log)
            settings = {**setup.settings, "marks": self._marks(), "embedding_model": self.embedding_model}
            settings["tie_tolerance"] = tie_tolerance(setup) if differing(methods) else None
            results = {
                "schema_version": SCHEMA_VERSION,
                "environment": setup.environment,
                "settings": settings,
                "methods": methods,
            }
        write_run_file(self)
        write_json(Path(self.output) / "results.json", results)
        return results

    def _generate(self, setup: Setup, log: GenerationLog, jobs: Sequence[tuple[str, int, int]], say: Say) -> None:
        """Generate ``jobs``, what is missing of all ranks' generations."""
        if setup.without_heads and not self.rank:
            bare, model = ", ".join(setup.without_heads), setup.settings["model"]
            say(f"{bare}: without draft heads, as none for it lie beside {model}; --heads names some.")
        one_at_a_time = [spec.text for spec in setup.specs if spec.is_outside]
        if self.batch > 1 and one_at_a_time:
            say(f"{', '.join(one_at_a_time)}: not decoded here, and given the texts of a batch one at a time.")
        # A folder that cannot be written to keeps nothing.
        log.begin()
        with keeping(Path(self.output)), linked(), working_beside(self) as check_others:
            if not self.rank:
                write_run_file(self)
            _drop_parts(log, of_others_only=True)
            if (cluster := cluster_of(self)) is not None:
                generate_on(cluster, self, setup, log)
                return
            Rounds(setup, log, self.processes, self.rank or 0).run(say)
            while not self.rank and any(log.get(*job) is None for job in jobs):
                check_others()
                time.sleep(WAIT_SECONDS)
                log.refresh()

    def _marks(self) -> list[int]:
        marks = self.marks or [self.max_new_tokens * fifth // 5 for fifth in range(1, 6)]
        return sorted({mark for mark in marks if mark})

    def _summary(self, setup: Setup, log: GenerationLog) -> dict[str, dict]:
        embed = metrics.SentenceEmbedder(self.embedding_model, setup.model.device) if self.embedding_model else None

        # Perplexity takes passes of a large model for minutes.
        made = ((turn.spec.text, *pair) for turn in setup.turns() for pair in turn.pairs)
        count = len({(job[1], *found["token_ids"]) for job in made if (found := log.get(*job)) is not None})
        bar = tqdm(desc="perplexity", total=count, unit="text", delay=5, leave=False, disable=None)

        def measure(token_ids: Sequence[int], text: str, prompt_ids: Sequence[int]) -> dict:
            bar.update()
            return {
                **metrics.measure_text(text, token_ids),
                "perplexity": metrics.perplexity(setup.model, token_ids, prompt_ids),
                "semantic_diversity": None if embed is None else metrics.semantic_diversity(text, embed),
            }

        def margin(context: Sequence[int], token: int, other: int, run: int) -> float | None:
            return divergence_margin(setup.model, context, token, other, setup.params[run], setup.kv_dtype)

        with bar:
            given = setup.specs, setup.prompts, setup.params, self._marks(), log
            rows = summarise(*given, margin, measure, setup.kv_dtype)
        for spec in setup.specs:
            rows[spec.text] |= setup.planned_bytes(spec)
            rows[spec.text]["bitwise"] = setup.settings["bitwise"] and not spec.is_outside
        if self.audit:
            audits(setup, rows)
        return rows


def _drop_parts(log: GenerationLog, of_others_only: bool = False) -> None:
    """Drop the parts of generations: all when all are finished, or those of other settings, overwritten by these."""
    folder = log.folder / IN_PROGRESS
    for path in folder.glob("*.jsonl"):
        if of_others_only:
            header = next(whole_lines(path), None)
            if header is None or header[0].get("fingerprint") == log.fingerprint:
                continue
        path.unlink()
    if folder.is_dir() and not of_others_only:
        folder.rmdir()


@contextmanager
def keeping(output: Path) -> Iterator[None]:
    """Add to an error that ends the run what becomes of the work done so far."""
    kept = f"what was generated is kept in {output}, and the same command goes on there"
    try:
        yield
    except MemoryError as error:
        raise MemoryError(f"{error}; {kept}") from error
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        # A process beside this one has said so itself.
        raise OSError(what if what.endswith(kept) else f"{what}; {kept}") from error
