"""What a step costs on this machine and how near that is to its memory's speed: `ts-eval bench`.

Three stages, each of interleaved rounds after a warm-up round: what is less than a pass (sampling, heads); whole
generations from a real prompt, told apart into parts; passes over texts of given lengths, and the memory's bandwidth.

At the given lengths only the prompt is prefilled: the cache is filled with its keys and values over and over, which
cost as much to attend to as those of a text of that length. What such a text would be is meaningless, so only plain
decoding, single verifications and single draft passes are timed there.
"""

import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

import decoder
from decoder.cache.full import FullCache
from decoder.cache.partial import PartialCache
from decoder.drafters import METHODS
from decoder.drafters.levels import ranked
from decoder.kernels.memory import available_memory
from decoder.kernels.transfers import download
from decoder.model.target import Target
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from ts_eval import defaults
from ts_eval.computed import computed, read_assumptions
from ts_eval.data_dir import find_data_dir
from ts_eval.decoders import Sources, with_ar
from ts_eval.device_trace import DeviceTrace
from ts_eval.memory import short_of_memory
from ts_eval.method_spec import MethodSpec
from ts_eval.plan import ModelShape
from ts_eval.prompts import SHIPPED, Prompt, read_prompts, refuse_missing_prompts
from ts_eval.random_weights import RandomSources
from ts_eval.results import OtherSettingsError, difference, environment, fingerprint_of, write_json
from ts_eval.stopwatch import FORWARDS, PARTS, Stopwatch, replaced

SCHEMA_VERSION = 2
RESULTS = "bench.json"
PLOT = "bench.png"

COPIED_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
"""Of the buffer that is copied and read: far more than any cache of the device holds."""
COPIES = 4
"""One after the other before the clock is read: launching and waiting then weigh nothing."""
CALLS, ENOUGH_SECONDS = 16, 0.2
"""Calls that one figure of a round is the median of; fewer once they have taken so many seconds."""
POSITIONS = 34
"""Positions in a row that sampling and scoring are timed over: twice those that noise is made for at once."""
AR_TOKENS = 16
"""Tokens of plain decoding per round and length."""
LEADING_STEPS = {"cpu": 0, "cuda": 4}
"""Steps of a generation before the clock starts: on CUDA its first passes are run as they are, and then recorded."""
TRACED_STEPS = 16
"""Steps of a generation that is traced: a trace has a line for each of some hundred kernels a pass."""

Say = Callable[[str], None]
Operation = Callable[[], object]


def bench(methods: Sequence[str] = (), *, say: Say = lambda sentence: None, **settings) -> dict:
    """Measure what ``settings``, the fields of `Bench`, ask for; returns what `save` writes. Raises as `Bench.run`."""
    return Bench(tuple(methods), **settings).run(say)


@dataclass(frozen=True)
class Bench:
    """What is measured, and how often.

    Args:
        methods: specifications as in `MethodSpec`, `ar` always with them; none takes all of ours whose parts are at
            hand.
        model, heads, draft_model, prompts, device, dtype, sampling, options, data_dir: as in `compare.Experiment`.
        prompt_tokens: of the first prompt, from which the generations go on.
        new_tokens: of each generation.
        lengths: tokens of text over which passes are timed.
        widths: nodes of the verifications timed.
        repeats: rounds; figures are their medians.
        seed: of the noise, and of random weights and prompt.
        random_weights: a configuration as `plan.read_config` takes it: model and heads are made from it alone, and the
            prompt is of random tokens; then without ``model``, ``heads``, ``draft_model`` and ``prompts``.
        tokens_per_step: as in `computed.read_assumptions`; the time of a whole text is computed from them.
        output: folder; figures in it that were measured with the same settings are taken over.
        overwrite: measure again, whatever the folder holds.
        arguments: the command line, for the record.
    """

    methods: tuple[str, ...] = ()
    model: str | None = None
    heads: Sequence[str] = ()
    draft_model: str | None = None
    prompts: str | None = None
    prompt_tokens: int = defaults.BENCH_PROMPT_TOKENS
    new_tokens: int = defaults.BENCH_NEW_TOKENS
    lengths: Sequence[int] = defaults.BENCH_LENGTHS
    widths: Sequence[int] = defaults.BENCH_WIDTHS
    repeats: int = defaults.BENCH_REPEATS
    seed: int = 0
    random_weights: str | None = None
    tokens_per_step: Sequence[str] = ()
    device: str = "auto"
    dtype: str = "auto"
    sampling: dict | None = None
    options: dict | None = None
    output: str | Path = defaults.BENCH_OUTPUT
    data_dir: str | Path | None = None
    overwrite: bool = False
    arguments: Sequence[str] | None = None

    def run(self, say: Say) -> dict:
        """Measure.

        Raises:
            ValueError, OSError: an argument that does not fit or a file that is missing; nothing has been measured.
            OtherSettingsError: ``output`` holds figures of other settings.
            MemoryError: the longest text does not fit into memory.
        """
        for name in ("prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lengths", "widths"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be one or more numbers of at least 1")
        folder = Path(self.output)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"--output {folder} is a file: name a folder")
        params = decoder.SamplingParams(**{**defaults.SAMPLING, **(self.sampling or {})}, seed=self.seed)
        specs, sources = self._rows()
        options = {spec.text: decoder.TokenSwiftOptions(**{**(self.options or {}), **spec.options}) for spec in specs}
        assumptions = read_assumptions(self.tokens_per_step, specs)
        prompts = None
        if self.random_weights is None:
            prompts = self.prompts or str(find_data_dir(self.data_dir) / SHIPPED)
            refuse_missing_prompts(prompts)
        sources.refuse_missing(specs)

        loaded = sources.load(self.device, self.dtype)
        if prompts is None:
            prompt = sources.prompt(loaded[None].target.vocab_size, self.prompt_tokens)
        else:
            prompt = read_prompts(prompts, loaded[None].tokenizer, self.prompt_tokens, 1)[0]
        lengths = sorted(set(self.lengths))
        widths = sorted({1, *self.widths, *(assumption.nodes for assumption in assumptions.values())})
        _refuse_too_long(loaded[None], prompt, self.new_tokens, lengths, widths)
        settings = {
            "methods": [spec.text for spec in specs],
            "model": sources.model,
            "random_weights": self.random_weights is not None,
            "heads": {spec.text: sources.heads.get(spec.text) for spec in specs},
            "draft_model": sources.draft_model,
            "weights": sources.weights(),
            "prompt_name": prompt.name,
            "prompt_tokens": len(prompt.token_ids),
            "new_tokens": self.new_tokens,
            "lengths": lengths,
            "widths": widths,
            "repeats": self.repeats,
            "seed": self.seed,
            "tokens_per_step": {text: asdict(assumption) for text, assumption in assumptions.items()},
            "dtype": str(loaded[None].model.dtype).removeprefix("torch."),
            "sampling": {name: value for name, value in asdict(params).items() if name in defaults.SAMPLING},
            "options": {text: asdict(option) for text, option in options.items()},
            "options_for_all": asdict(decoder.TokenSwiftOptions(**(self.options or {}))),
        }
        header = json.loads(json.dumps({"settings": settings}))
        header["environment"] = environment(loaded[None].model.device, self.arguments)
        before = None if self.overwrite else _read(folder, header)
        if before is not None:
            say(f"taken over from {folder / RESULTS}, measured before; --overwrite measures again.")
            return before
        # What cannot be written to is told before anything is measured.
        folder.mkdir(parents=True, exist_ok=True)
        made = Measurement(
            decoders={spec.text: loaded[sources.heads.get(spec.text)] for spec in specs},
            names={spec.text: spec.name for spec in specs},
            options=options,
            options_for_all=decoder.TokenSwiftOptions(**(self.options or {})),
            params=params,
            prompt=list(prompt.token_ids),
            new_tokens=self.new_tokens,
            repeats=self.repeats,
        )
        figures = made.all(lengths, widths)
        of_text = computed(figures["lengths"], figures["methods"], assumptions) if assumptions else None
        return {"schema_version": SCHEMA_VERSION, **header, **figures, "computed": of_text}

    def _rows(self) -> tuple[list[MethodSpec], Sources]:
        """The rows and what they run with; when none were asked for, those that do not lack heads or draft model."""
        specs = with_ar(self.methods or decoder.methods())
        theirs = next((spec.name for spec in specs if spec.is_hf), None)
        if theirs:
            raise ValueError(f"{theirs} is transformers' own generate, which cannot be taken apart: compare times it")
        if self.random_weights is None:
            sources = Sources.find(specs, self.model, self.heads, self.draft_model, self.data_dir)
        else:
            for flag in ("model", "heads", "draft_model", "prompts"):
                if getattr(self, flag):
                    raise ValueError(f"--random-weights makes its own: leave out --{flag.replace('_', '-')}")
            sources = RandomSources.of(specs, self.random_weights, self.seed)
        if not self.methods:
            lacking = {name for name, of in METHODS.items() if of.needs_heads and name not in sources.heads}
            lacking |= set() if sources.draft_model else {"triforce"}
            specs = [spec for spec in specs if spec.name not in lacking]
        return specs, sources


def save(results: dict, folder: Path) -> list[Path]:
    """Write bench.json and bench.png into ``folder``; returns their paths. Raises OSError, naming the file."""
    # Imported here because a measurement does not need it.
    from ts_eval.bench_page import plot

    write_json(folder / RESULTS, results)
    plot(results, folder / PLOT)
    return [folder / RESULTS, folder / PLOT]


def _read(folder: Path, header: dict) -> dict | None:
    """What ``folder`` holds, measured under the same ``header``; None when it holds nothing."""
    path = folder / RESULTS
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        old = {name: results[name] for name in header}
        same = fingerprint_of(old) == fingerprint_of(header) and results["schema_version"] == SCHEMA_VERSION
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no result of ts-eval bench: use another --output, or --overwrite") from error
    if not same:
        raise OtherSettingsError(
            f"{folder} holds figures of other settings ({difference(old, header)}): use another --output, or "
            "--overwrite to drop them"
        )
    return results


def _refuse_too_long(
    dec: "decoder.Decoder", prompt: Prompt, new_tokens: int, lengths: Sequence[int], widths: Sequence[int]
) -> None:
    limit, device = dec.model.config.max_position_embeddings, dec.target.device
    leading = LEADING_STEPS[device.type]
    if len(prompt.token_ids) + new_tokens + leading > limit:
        raise ValueError(
            f"the prompt {prompt.name!r} ({len(prompt.token_ids):,} tokens) and {new_tokens + leading:,} new tokens "
            f"are beyond the model's {limit:,} positions"
        )
    further = AR_TOKENS + leading
    if lengths[-1] + further > limit:
        raise ValueError(
            f"lengths must be at most {limit - further:,}, not {lengths[-1]:,}: the model has {limit:,} positions "
            f"and {further} more tokens are generated"
        )
    # Two caches of the longest text, one to generate in and one to verify over, and a draft cache no longer than it;
    # of the widest tree the logits, and its mask and what is made of that; and the buffers that are copied.
    shape, widest = ModelShape.of(dec.model), widths[-1]
    needed = 3 * shape.cache_bytes(lengths[-1] + max(further, dec.target.width(widest)))
    needed += 2 * COPIED_BYTES[device.type] + widest * (shape.vocab_size * shape.value_bytes + 2 * widest)
    free = available_memory(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"{lengths[-1]:,} tokens of text and trees of {widest:,} nodes take {needed / 1e9:,.1f} GB and "
            f"{free / 1e9:,.1f} GB are free: name shorter --lengths or narrower --widths"
        )


@dataclass(frozen=True)
class Measurement:
    """A bench with everything loaded; mappings are by the row's name."""

    decoders: "dict[str, decoder.Decoder]"
    names: dict[str, str]
    options: "dict[str, decoder.TokenSwiftOptions]"
    options_for_all: "decoder.TokenSwiftOptions"
    params: "decoder.SamplingParams"
    prompt: list[int]
    new_tokens: int
    repeats: int

    @property
    def ar(self) -> "decoder.Decoder":
        return self.decoders["ar"]

    @property
    def target(self) -> Target:
        return self.ar.target

    @torch.inference_mode()
    def all(self, lengths: Sequence[int], widths: Sequence[int]) -> dict:
        """The figures of all stages. Raises MemoryError, in a sentence, when the device's memory is too small."""
        # In a file each refresh is a line of its own.
        interval = 0.2 if sys.stderr.isatty() else 10
        total = (2 + len(lengths)) * (1 + self.repeats)
        with tqdm(desc="sampling and heads", unit="round", total=total, leave=False, mininterval=interval) as bar:
            try:
                small = self.small(bar)
                # Generations come first: a row that cannot run is told before what takes longest.
                bar.set_description("generations", refresh=False)
                methods = self.generations(bar)
                memory, along = self._bandwidth(), []
                for length in lengths:
                    bar.set_description(f"{length:,} tokens", refresh=False)
                    along.append(self.at_length(length, widths, memory, bar))
                return {**small, "lengths": along, "methods": methods}
            except (RuntimeError, MemoryError) as error:
                raise short_of_memory(
                    error, f"out of memory at {bar.desc.rstrip(': ')}: name shorter --lengths or narrower --widths"
                ) from error

    def _rounds(self, operations: dict[object, Operation], bar: tqdm) -> dict[object, list]:
        """What each operation gives in each round; they take turns in an order that rotates, after a warm-up round."""
        found: dict[object, list] = {name: [] for name in operations}
        names = list(operations)
        for number in range(-1, self.repeats):
            shift = max(number, 0) % len(names)
            for name in names[shift:] + names[:shift]:
                result = operations[name]()
                if number >= 0:
                    found[name].append(result)
            bar.update()
        return found

    def _seconds(self, operation: Operation) -> float:
        """Seconds of a call of ``operation``, the median of up to `CALLS`.

        A first call is not counted: it finds the processor's caches full of what was measured before.
        """
        operation()
        seconds: list[float] = []
        while len(seconds) < CALLS and sum(seconds) < ENOUGH_SECONDS:
            self.target.wait()
            start = time.perf_counter()
            operation()
            self.target.wait()
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    def _bandwidth(self) -> dict[object, Operation]:
        """Time a copy, whose bytes are read and written and so count twice, and a read; both give GB/s."""
        device = self.target.device
        source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
        copy = torch.empty_like(source)

        def speed(operation: Operation, nbytes: int) -> float:
            return COPIES * nbytes / self._seconds(lambda: [operation() for _ in range(COPIES)]) / 1e9

        return {
            "copy": lambda: speed(lambda: copy.copy_(source), 2 * source.nbytes),
            "read": lambda: speed(source.sum, source.nbytes),
        }

    def small(self, bar: tqdm) -> dict:
        """What is less than a pass: one level of each kind of heads, and sampling and scoring per token."""
        cache = FullCache(len(self.prompt))
        with self.target.patched():
            self.target.prefill(self.prompt[:-1], cache)
            [verified] = self.target.forward([TokenTree(self.prompt[-1])], [cache])
        logits = verified.logits[0]
        chooser, scorer = (self._sampler(self.prompt) for _ in range(2))
        width, coupled = max(self._widths(), default=1), self.options_for_all.coupled

        # Many positions in a row, as in a text: noise is made for some of them at once.
        def choose() -> None:
            for _ in range(POSITIONS):
                chooser.take(chooser.draw(logits))

        def score() -> None:
            for _ in range(POSITIONS):
                download(ranked(scorer.draft_scores(logits[None], coupled, scorer.draft_context()), width)[1])
                scorer.push(self.prompt[0])

        operations: dict[object, Operation] = {
            "choose": lambda: self._seconds(choose) / POSITIONS,
            "score": lambda: self._seconds(score) / POSITIONS,
        }
        heads = {}
        for dec in self.decoders.values():
            for kind, module in dec.heads.items():
                heads[("heads", module.source)] = kind
                operations["heads", module.source] = self._level(dec, module, verified.hidden[0])
        found = self._rounds(operations, bar)
        return {
            "sampling": {"choose_ms": milliseconds(found["choose"]), "score_ms": milliseconds(found["score"])},
            "heads": [
                {"kind": kind, "checkpoint": key[1], "level_ms": milliseconds(found[key])}
                for key, kind in heads.items()
            ],
        }

    def _widths(self) -> list[int]:
        """Candidates per level of the tree."""
        tree = self.options_for_all.tree
        return [width if isinstance(width, int) else max(width) + 1 for width in tree]

    def _sampler(self, context: Sequence[int]) -> Sampler:
        return Sampler(self.params, self.target.vocab_size, self.target.device, context)

    def _level(self, dec: "decoder.Decoder", heads: "decoder.DraftHeads", hidden: torch.Tensor) -> Operation:
        """Time one head with what it takes: an embedding where it is conditioned, and the language-model head."""

        def level() -> None:
            embedding = dec.target.embed(self.prompt[-1]) if heads.conditioned else None
            dec.target.head(heads.advance(0, hidden, embedding)[1][None])

        def timed() -> float:
            with dec.target.patched():
                return self._seconds(level)

        return timed

    def at_length(self, length: int, widths: Sequence[int], memory: dict[object, Operation], bar: tqdm) -> dict:
        """Plain decoding, verifications and TokenSwift's draft pass over ``length`` tokens of text.

        The memory's bandwidth is measured in the same rounds, as other work on the machine takes part of it.
        """
        target, text = self.target, list(itertools.islice(itertools.cycle(self.prompt), length))
        prefill = Target.prefill

        def filled(
            target: Target, tokens: Sequence[int], cache: FullCache, observed: int = 1
        ) -> dict[int, torch.Tensor]:
            queries = prefill(target, tokens[: len(self.prompt)], cache, observed)
            _fill(cache, len(tokens))
            return queries

        cache = FullCache(length + target.width(widths[-1]))
        with target.patched():
            queries = filled(target, text, cache)

        def decode() -> float:
            with replaced(Target, "prefill", filled):
                run = self._generate("ar", text, AR_TOKENS)
            return run["seconds"]["step"] / run["tokens"]

        def verify(width: int) -> float:
            # All below the root: what a node costs does not depend on its depth.
            tree = TokenTree(text[-1])
            for token in range(width - 1):
                tree.add(0, token, "bench")
            tree.tokens = [text[-1]] * width
            with target.patched():
                return self._seconds(lambda: target.forward([tree], [cache]))

        slots = min(self.options_for_all.budget_for(length), length)
        memory_of_drafts = PartialCache(slots, min(self.options_for_all.sink, slots - 1))
        memory_of_drafts.append(cache, queries)

        def draft() -> float:
            with target.patched():
                return self._seconds(lambda: target.draft([text[-1]], length, memory_of_drafts))

        operations: dict[object, Operation] = {**memory, "ar": decode, "draft": draft}
        operations |= {width: lambda width=width: verify(width) for width in widths}
        found = self._rounds(operations, bar)
        shape = ModelShape.of(self.ar.model)
        read = shape.pass_bytes + shape.cache_bytes(length)
        floors = {name: [read / (1e9 * speed) for speed in found[name]] for name in memory}
        return {
            "length": length,
            "bandwidth": {name: statistic(found[name]) for name in memory},
            "ar": {
                "ms_per_token": milliseconds(found["ar"]),
                "tokens_per_second": 1 / median(found["ar"]),
                "bytes_read": read,
                "floor_ms": {name: read / median(found[name]) / 1e6 for name in memory},
                "times_floor": {name: ratio(found["ar"], floor) for name, floor in floors.items()},
                "bandwidth_share": {name: ratio(floor, found["ar"]) for name, floor in floors.items()},
            },
            "verify": [
                {"width": width, "ms": milliseconds(found[width]), "times_plain": ratio(found[width], found[1])}
                for width in widths
            ],
            "draft": {
                "slots": slots,
                "ms": milliseconds(found["draft"]),
                "times_plain": ratio(found["draft"], found[1]),
            },
        }

    def generations(self, bar: tqdm) -> dict[str, dict]:
        """Per row, steps of whole generations from the prompt: timed as they are, told apart into parts, and traced."""
        operations: dict[object, Operation] = {}
        for text in self.decoders:
            operations[text, "plain"] = partial(self._generate, text, self.prompt, self.new_tokens)
            operations[text, "parts"] = partial(self._generate, text, self.prompt, self.new_tokens, parts=True)
            if self.target.device.type == "cuda":
                operations[text, "trace"] = partial(self._generate, text, self.prompt, self.new_tokens, traced=True)
        found = self._rounds(operations, bar)
        return {
            text: summary(found[text, "plain"], found[text, "parts"], found.get((text, "trace"), ()))
            for text in self.decoders
        }

    def _generate(
        self,
        text: str,
        prompt: list[int],
        new_tokens: int,
        parts: bool = False,
        traced: bool = False,
    ) -> dict:
        """Steps and seconds of one generation, prefill and leading steps not counted; when traced, of its beginning."""
        if self.target.device.type == "cuda":
            # The caches of the generation before, and what was recorded over them, make room for this one's.
            gc.collect()
        leading, trace = LEADING_STEPS[self.target.device.type], DeviceTrace() if traced else None
        watch = Stopwatch(self.target.wait, parts, leading, trace)
        arguments = (prompt, new_tokens + leading, self.names[text], self.params, self.options[text])
        stream = self.decoders[text].stream(*arguments, ignore_eos=True)
        with watch.watching(), closing(stream):
            for _ in itertools.islice(stream, leading + TRACED_STEPS if traced else None):
                pass
        busy = None if trace is None else trace.busy_seconds
        return {"steps": watch.steps, "tokens": watch.tokens, "seconds": watch.seconds, "busy_seconds": busy}


def _fill(cache: FullCache, length: int) -> None:
    """Let a cache of some tokens hold ``length`` of them: its keys and values over and over."""
    while cache.length < length:
        start, count = cache.length, min(cache.length, length - cache.length)
        for buffer in (cache.keys, cache.values):
            buffer[:, :, :, start : start + count] = buffer[:, :, :, :count]
        cache.keep(range(count))


def summary(plain: Sequence[dict], watched: Sequence[dict], traced: Sequence[dict] = ()) -> dict:
    """A row's figures from its generations, timed as a whole and told apart into parts (`stopwatch.PARTS`).

    Shares are of the watched step; ``bookkeeping`` is the share of all that is no model forward. ``host_overhead`` is
    the share of the traced steps in which the device had nothing to do, and ``device_ms`` what it worked in a step;
    both are None where nothing was traced.
    """
    runs = []
    for run in watched:
        step = 1000 * run["seconds"]["step"] / run["steps"]
        parts = {part: 1000 * run["seconds"].get(part, 0.0) / run["steps"] for part in PARTS[:-1]}
        parts["rest"] = step - sum(parts.values())
        runs.append({"steps": run["steps"], "tokens": run["tokens"], "step_ms": step, "parts_ms": parts})
    shares = {part: statistic([run["parts_ms"][part] / run["step_ms"] for run in runs]) for part in PARTS}
    told = [run for run in traced if run["busy_seconds"] is not None]
    idle = [1 - run["busy_seconds"] / run["seconds"]["step"] for run in told]
    forwards = [sum(run["parts_ms"][part] for part in FORWARDS) / run["step_ms"] for run in runs]
    per_token = statistic([1000 * run["seconds"]["step"] / run["tokens"] for run in plain])
    return {
        "step_ms": statistic([1000 * run["seconds"]["step"] / run["steps"] for run in plain]),
        "ms_per_token": per_token,
        "tokens_per_second": 1000 / per_token["median"],
        "tokens_per_step": median(run["tokens"] / run["steps"] for run in plain),
        "watched_step_ms": statistic([run["step_ms"] for run in runs]),
        "shares": shares,
        "bookkeeping": statistic([1 - share for share in forwards]),
        "host_overhead": statistic(idle) if told else None,
        "device_ms": milliseconds([run["busy_seconds"] / run["steps"] for run in told]) if told else None,
        "runs": runs,
    }


def statistic(values: Sequence[float]) -> dict:
    """Median, smallest and largest of the rounds, and what each gave."""
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """How many times ``others`` the ``values`` are: the median over pairs of the same round."""
    return median(value / other for value, other in zip(values, others, strict=True))


def milliseconds(seconds: Sequence[float]) -> dict:
    """`statistic` in milliseconds."""
    return statistic([1000 * value for value in seconds])
