"""The experiment: the same prompts and seeds through several decoding methods, one row per method.

Runs are interleaved: for each run and prompt every method takes its turn, in an order that rotates from run to run,
after a short warm-up of each, so that a machine that warms up or is shared slows no method alone. Clocks are the
engine's own: decoding and prefill apart.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import decoder
from decoder.text.stream import TextStream
from ts_eval import checkpoints, defaults, metrics, plan
from ts_eval.data_dir import find_data_dir
from ts_eval.decoders import Sources, with_ar
from ts_eval.generation import OnStep, can_continue, continue_with_decoder, continue_with_transformers
from ts_eval.json_lines import whole_lines
from ts_eval.memory import PeakMemory, resident_bytes, short_of_memory
from ts_eval.method_spec import HF, MethodSpec
from ts_eval.progress import Progress
from ts_eval.prompts import SHIPPED, Prompt, is_hub_dataset, read_prompts, refuse_missing_prompts
from ts_eval.results import SCHEMA_VERSION, GenerationLog, environment, write_json
from ts_eval.summary import audit_of, divergence_margin, summarise, timed_tokens

WARM_UP_PROMPT_TOKENS = 256
WARM_UP_NEW_TOKENS = 16
IN_PROGRESS = "in-progress"
WAIT_SECONDS = 1.0

Say = Callable[[str], None]


def _silent(sentence: str) -> None:
    pass


def compare(methods: Sequence[str], *, say: Say = _silent, **settings) -> dict | None:
    """Run ``methods`` against ``ar`` and write ``output/results.json``; returns its content.

    ``settings`` are the fields of `Experiment`, which also says what is raised; ``say`` is called with a sentence for
    the user now and then.
    """
    return Experiment(tuple(methods), **settings).run(say)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is compared, how, and where it goes.

    Args:
        methods: specifications as in `MethodSpec`; ``ar`` is put first when it is not among them.
        model: folder or hub id; None takes the reference model of the data folder, with its heads and draft model.
        heads: one checkpoint for every method, or METHOD=CHECKPOINT pairs.
        draft_model: folder or hub id of the model that drafts for ``triforce``.
        prompts: text file (one prompt), .jsonl(.gz), or hub dataset, with its split if that is not test
            (owner/name:split); None takes the shipped PG-19 test books.
        prompt_tokens: the first so many tokens of each prompt; None takes the whole text, but 1,024 of a book that is
            shipped or on the hub.
        max_new_tokens: tokens to generate, end-of-text ignored.
        num_prompts: at most so many prompts; None takes all of a file, one of the shipped books or of a hub dataset.
        runs: generations per method and prompt; run r (from 0) uses the seed ``seed`` + r.
        device, dtype: as in `decoder.load`.
        sampling: fields of `decoder.SamplingParams` over the defaults temperature 1, min-p 0.1, penalty 1.2 over 1,024.
        options: fields of `decoder.TokenSwiftOptions` for every method; a method's own come first.
        marks: numbers of new tokens at which latency and speed-up are told; None takes five equal steps.
        embedding_model: folder or hub id of an encoder, for the semantic diversity of the texts.
        audit: score ar's texts again with the plain model, so that a fault of all methods alike is found too.
        output: folder; what was generated in it is kept and not generated again.
        data_dir: the data folder; None finds the checkout's.
        overwrite: drop what other settings left in ``output`` instead of refusing.
        processes: how many processes share the prompts and runs, each on a CUDA device of its own where there are
            several, or with its part of the CPU's threads.
        rank: which of the ``processes`` this one is, when a launcher such as torchrun has started them all; None
            starts the others itself. Only rank 0 writes results.
        arguments: the command line, for the record.

    Raises (from `run`):
        ValueError, OSError: an argument that does not fit or a file that is missing; nothing has been written.
        OtherSettingsError: ``output`` holds generations of other settings.
        OSError, MemoryError: the disk is full or the memory too small; what was generated is kept.
    """

    methods: tuple[str, ...] = field(kw_only=False)
    model: str | None = None
    heads: Sequence[str] = ()
    draft_model: str | None = None
    prompts: str | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int = defaults.MAX_NEW_TOKENS
    num_prompts: int | None = None
    runs: int = defaults.RUNS
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    sampling: dict | None = None
    options: dict | None = None
    marks: Sequence[int] | None = None
    embedding_model: str | None = None
    audit: bool = False
    output: str | Path = defaults.OUTPUT
    data_dir: str | Path | None = None
    overwrite: bool = False
    processes: int = 1
    rank: int | None = None
    arguments: Sequence[str] | None = None

    def run(self, say: Say = _silent) -> dict | None:
        """Generate what is missing and write the results, which are returned; None from ranks other than 0."""
        threads = torch.get_num_threads()
        if self.rank is None:
            torch.set_num_threads(max(1, threads // max(1, self.processes)))
        try:
            return self._run(say)
        finally:
            torch.set_num_threads(threads)

    def _run(self, say: Say) -> dict | None:
        setup = self._set_up()
        with GenerationLog(
            Path(self.output), setup.settings, setup.environment, overwrite=self.overwrite, rank=self.rank or 0
        ) as log:
            jobs = [job for job in setup.jobs() if log.get(*job) is None]
            if len(log):
                say(f"{len(log)} finished generations taken over from {log.path}; {len(jobs)} left to run.")
            if jobs:
                with _keeping(Path(self.output)), self._others() as check_others:
                    log.begin()
                    _drop_parts(log, of_others_only=True)
                    setup.generate(jobs, log, say, self.processes, self.rank or 0)
                    while not self.rank and any(log.get(*job) is None for job in jobs):
                        check_others()
                        time.sleep(WAIT_SECONDS)
                        log.refresh()
            if self.rank:
                return None
            _drop_parts(log)
            results = {
                "schema_version": SCHEMA_VERSION,
                "environment": setup.environment,
                "settings": {**setup.settings, "marks": self._marks(), "embedding_model": self.embedding_model},
                "methods": self._summary(setup, log),
            }
        write_json(Path(self.output) / "results.json", results)
        return results

    def _marks(self) -> list[int]:
        marks = self.marks or [self.max_new_tokens * fifth // 5 for fifth in range(1, 6)]
        return sorted({mark for mark in marks if mark})

    def _summary(self, setup: "Setup", log: GenerationLog) -> dict[str, dict]:
        embed = metrics.SentenceEmbedder(self.embedding_model, setup.model.device) if self.embedding_model else None

        def measure(token_ids: Sequence[int], text: str, prompt_ids: Sequence[int]) -> dict:
            return {
                **metrics.measure_text(text, token_ids),
                "perplexity": metrics.perplexity(setup.model, token_ids, prompt_ids),
                "semantic_diversity": None if embed is None else metrics.semantic_diversity(text, embed),
            }

        def margin(context: Sequence[int], token: int, other: int, run: int) -> float | None:
            return divergence_margin(setup.model, context, token, other, setup.params[run])

        rows = summarise(setup.specs, setup.prompts, setup.params, self._marks(), log, margin, measure)
        for spec in setup.specs:
            rows[spec.text]["planned_memory_bytes"] = setup.planned_bytes(spec)
        if self.audit:
            rows["ar"]["audits"] = [setup.audit(record) for record in rows["ar"]["runs"]]
        return rows

    @contextmanager
    def _others(self) -> Iterator[Callable[[], None]]:
        """Start the processes beside this one; gives a check that raises when one of them has failed."""
        if self.rank is not None or self.processes == 1:
            yield lambda: None
            return
        context = multiprocessing.get_context("spawn")
        failures = context.SimpleQueue()
        children = []
        for rank in range(1, self.processes):
            arguments = (replace(self, rank=rank), torch.get_num_threads(), failures)
            children.append(context.Process(target=_work_beside, args=arguments, daemon=True))
        for child in children:
            child.start()

        def check() -> None:
            if not failures.empty():
                raise OSError(failures.get())
            codes = [child.exitcode for child in children if child.exitcode]
            if codes:
                raise OSError(f"one of the {self.processes} processes ended with status {codes[0]}")

        try:
            yield check
        finally:
            for child in children:
                child.terminate()
                child.join()

    def _set_up(self) -> "Setup":
        specs = with_ar(self.methods)
        counts = ("max_new_tokens", "runs", "num_prompts", "prompt_tokens", "processes")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        sampling = {**defaults.SAMPLING, **(self.sampling or {})}
        params = [decoder.SamplingParams(**sampling, seed=self.seed + run) for run in range(self.runs)]
        options = {spec.text: decoder.TokenSwiftOptions(**{**(self.options or {}), **spec.options}) for spec in specs}
        sources = Sources.find(specs, self.model, self.heads, self.draft_model, self.data_dir)
        prompts, prompt_tokens, num_prompts = self.prompts, self.prompt_tokens, self.num_prompts
        if prompts is None:
            prompts = str(find_data_dir(self.data_dir) / SHIPPED)
        if self.prompts is None or is_hub_dataset(prompts):
            prompt_tokens, num_prompts = prompt_tokens or defaults.BOOK_TOKENS, num_prompts or 1
        checkpoints.refuse_missing("embedding model", self.embedding_model)
        refuse_missing_prompts(prompts)
        sources.refuse_missing(specs)

        memory_before = resident_bytes()
        decoders = sources.load(self._device(), self.dtype)
        backbone = decoders[None].model
        texts = read_prompts(prompts, decoders[None].tokenizer, prompt_tokens, num_prompts)
        limit = backbone.config.max_position_embeddings
        for prompt in texts:
            if len(prompt.token_ids) + self.max_new_tokens > limit:
                raise ValueError(
                    f"the prompt {prompt.name!r} ({len(prompt.token_ids):,} tokens) and {self.max_new_tokens:,} new "
                    f"tokens are beyond the model's {limit:,} positions"
                )
        settings = {
            "methods": [spec.text for spec in specs],
            "model": sources.model,
            "heads": {spec.text: sources.heads.get(spec.text) for spec in specs},
            "draft_model": sources.draft_model,
            "weights": sources.weights(),
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "prompt_names": [prompt.name for prompt in texts],
            "prompt_lengths": [len(prompt.token_ids) for prompt in texts],
            "prompt_digest": hashlib.sha256(str([prompt.token_ids for prompt in texts]).encode()).hexdigest()[:16],
            "max_new_tokens": self.max_new_tokens,
            "num_prompts": len(texts),
            "runs": self.runs,
            "seed": self.seed,
            "processes": self.processes,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "sampling": {name: value for name, value in asdict(params[0]).items() if name in defaults.SAMPLING},
            "options": {text: asdict(option) for text, option in options.items()},
            "options_for_all": asdict(decoder.TokenSwiftOptions(**(self.options or {}))),
        }
        return Setup(
            specs=specs,
            params=params,
            options=options,
            prompts=texts,
            decoders={spec.text: decoders[sources.heads.get(spec.text)] for spec in specs},
            settings=json.loads(json.dumps(settings)),
            environment=environment(backbone.device, self.arguments),
            max_new_tokens=self.max_new_tokens,
            memory_before=memory_before if backbone.device.type == "cpu" else 0,
        )

    def _device(self) -> str:
        if self.processes > 1 and self.device in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{(self.rank or 0) % torch.cuda.device_count()}"
        return self.device


@dataclass(frozen=True)
class Setup:
    """An experiment with everything loaded; mappings are by the row's name.

    ``memory_before`` is what the process held before the model came, nothing of what a CUDA device counts.
    """

    specs: list[MethodSpec]
    params: "list[decoder.SamplingParams]"
    options: "dict[str, decoder.TokenSwiftOptions]"
    prompts: list[Prompt]
    decoders: "dict[str, decoder.Decoder]"
    settings: dict
    environment: dict
    max_new_tokens: int
    memory_before: int | None

    @property
    def model(self):
        return self.decoders["ar"].model

    def jobs(self) -> Iterator[tuple[str, int, int]]:
        """(row, prompt, run), interleaved; the order of the methods rotates by one from run to run."""
        for run in range(len(self.params)):
            shift = run % len(self.specs)
            for prompt in range(len(self.prompts)):
                for spec in self.specs[shift:] + self.specs[:shift]:
                    yield spec.text, prompt, run

    def generate(self, jobs: Sequence[tuple[str, int, int]], log: GenerationLog, say: Say, processes: int, rank: int):
        """Run this process's share of ``jobs`` and log each; all rows of a prompt and run are one process's."""
        mine = [job for job in jobs if (job[2] * len(self.prompts) + job[1]) % processes == rank]
        progress = {job: self._progress(job, log) for job in mine}
        cut = sum(bool(kept.token_ids) for kept in progress.values())
        if cut:
            say(f"{cut} cut generation{'s' if cut > 1 else ''} will be continued.")
        for text in dict.fromkeys(text for text, _, _ in mine):
            self._warm_up(text)
        total = sum(self.max_new_tokens - len(kept.token_ids) for kept in progress.values())
        # In a file each refresh is a line of its own.
        interval = 0.2 if sys.stderr.isatty() else 10
        with tqdm(total=total, unit="tok", disable=not mine or rank > 0, leave=False, mininterval=interval) as bar:
            for text, prompt, run in mine:
                where = f"{text} prompt {prompt + 1}/{len(self.prompts)} run {run + 1}/{len(self.params)}"
                bar.set_description(where, refresh=False)
                kept = progress[text, prompt, run]
                try:
                    log.append(self._generate(text, prompt, run, kept, bar.update))
                except (RuntimeError, MemoryError) as error:
                    sentence = f"out of memory at {where}: ask for fewer tokens or a narrower tree"
                    raise short_of_memory(error, sentence) from error
                finally:
                    kept.close()
                kept.discard()

    def _progress(self, job: tuple[str, int, int], log: GenerationLog) -> Progress:
        text, prompt, run = job
        header = {"fingerprint": log.fingerprint, "method": text, "prompt_index": prompt, "run": run}
        name = hashlib.sha256(str(header).encode()).hexdigest()[:16]
        path = log.folder / IN_PROGRESS / f"{name}.jsonl"
        if not can_continue(self._name(text), self.params[run], self.options[text]):
            path.unlink(missing_ok=True)
        return Progress(path, header)

    def _name(self, text: str) -> str:
        return next(spec.name for spec in self.specs if spec.text == text)

    def _warm_up(self, text: str) -> None:
        prompt = self.prompts[0].token_ids[:WARM_UP_PROMPT_TOKENS]
        self._continue(text, prompt, 0, [], min(WARM_UP_NEW_TOKENS, self.max_new_tokens), lambda tokens, counts: None)

    def _generate(self, text: str, prompt: int, run: int, kept: Progress, update: Callable[[int], None]) -> dict:
        """The record of a generation, of which ``kept`` may hold a part already."""

        def on_step(tokens: Sequence[int], counts: dict) -> None:
            kept.add(tokens, counts)
            update(len(tokens))
            if _orphaned():
                raise SystemExit("the process that started this one is gone")

        memory = PeakMemory(self.model.device)
        ids = self.prompts[prompt].token_ids
        if len(kept.token_ids) < self.max_new_tokens:
            self._continue(text, ids, run, kept.token_ids, self.max_new_tokens, on_step)
        return self._record(text, prompt, run, kept, memory.bytes())

    def _continue(
        self, text: str, prompt: Sequence[int], run: int, sofar: Sequence[int], max_new_tokens: int, on_step: OnStep
    ) -> None:
        name, dec = self._name(text), self.decoders[text]
        if name in HF:
            continue_with_transformers(dec.model, name, prompt, sofar, max_new_tokens, self.params[run], on_step)
        else:
            options = self.options[text]
            continue_with_decoder(dec, name, prompt, sofar, max_new_tokens, self.params[run], options, on_step)

    def _record(self, text: str, prompt: int, run: int, kept: Progress, peak_memory: int | None) -> dict:
        written, pieces = TextStream(self.decoders[text].tokenizer), []
        for place, token in enumerate(kept.token_ids):
            written.push(token)
            pieces.append(written.take(final=place == len(kept.token_ids) - 1))
        record = {
            "method": text,
            "prompt": self.prompts[prompt].name,
            "prompt_index": prompt,
            "run": run,
            "seed": self.params[run].seed,
            "prompt_tokens": len(self.prompts[prompt].token_ids),
            "new_tokens": len(kept.token_ids),
            "resumed_at": kept.resumed_at,
            "step_tokens": kept.step_tokens,
            "step_seconds": kept.step_seconds,
            "step_drafted": kept.step_drafted,
            "step_accepted": kept.step_accepted,
            "step_ngram_accepted": kept.step_ngram_accepted,
        }
        seconds, timed = kept.counts["decode_seconds"], timed_tokens(record)[-1]
        return {
            **record,
            "tokens_per_second": timed / seconds if seconds else None,
            "ms_per_token": 1000 * seconds / timed if timed else None,
            **kept.counts,
            "acceptance_rate": metrics.acceptance_rate(kept.counts["accepted"], kept.counts["drafted"]),
            "ngram_acceptance_rate": metrics.ngram_acceptance_rate(
                kept.counts["ngram_accepted"], kept.counts["drafted"]
            ),
            "tokens_per_step": metrics.tokens_per_step(len(kept.token_ids), kept.counts["steps"]),
            "peak_memory_bytes": peak_memory,
            "memory_before_bytes": self.memory_before,
            "token_ids": kept.token_ids,
            "token_ends": list(accumulate(map(len, pieces))),
            "text": "".join(pieces),
        }

    def audit(self, record: dict) -> dict:
        """The audit of a finished generation of ours."""
        return audit_of(self.model, self.prompts[record["prompt_index"]].token_ids, record, self.params[record["run"]])

    def planned_bytes(self, spec: MethodSpec) -> int | None:
        """What the row's largest generation should hold by `plan.plan_method`; None for a method without a plan."""
        if spec.name not in plan.METHODS:
            return None
        dec = self.decoders[spec.text]
        heads = next(iter(dec.heads.values()), None)
        longest = max(len(prompt.token_ids) for prompt in self.prompts)
        return plan.plan_method(
            spec.name,
            plan.ModelShape.of(dec.model),
            longest,
            self.max_new_tokens,
            self.options[spec.text],
            heads=0 if heads is None else heads.num_heads,
            heads_bytes=0 if heads is None else sum(weight.nbytes for weight in heads.parameters()),
            draft_model=plan.ModelShape.of(dec.draft_model) if dec.draft_model is not None else None,
        ).total


def _drop_parts(log: GenerationLog, of_others_only: bool = False) -> None:
    """Drop the parts of generations: all when all are finished, or those of other settings, overwritten by these."""
    folder = log.folder / IN_PROGRESS
    for path in folder.glob("*.jsonl"):
        header = next(whole_lines(path), None)
        if not of_others_only or (header is not None and header[0].get("fingerprint") != log.fingerprint):
            path.unlink()
    if folder.is_dir() and not of_others_only:
        folder.rmdir()


def _work_beside(experiment: Experiment, threads: int, failures) -> None:
    """What a process beside rank 0 does; its failure is told to rank 0 in a sentence."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        experiment.run()
    except (ValueError, OSError, MemoryError) as error:
        failures.put(str(error))
    except KeyboardInterrupt:
        sys.exit(1)


def _orphaned() -> bool:
    """Whether the process that started this one for its share of the work has died, be it by a kill."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid


@contextmanager
def _keeping(output: Path) -> Iterator[None]:
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
