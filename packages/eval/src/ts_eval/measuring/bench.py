"""What a step costs on this machine and how near that is to its memory's speed: `ts-eval bench`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import decoder
from decoder.drafters import METHODS
from decoder.parts import available_memory, dtype_name
from ts_eval import defaults
from ts_eval.comparing.asked import Asked, Say, refuse_outside, silent
from ts_eval.comparing.data_dir import find_data_dir
from ts_eval.comparing.decoders import Sources, with_ar
from ts_eval.comparing.method_spec import NEED_DRAFT_MODEL, MethodSpec
from ts_eval.comparing.prompts import SHIPPED, Prompt, read_prompts, refuse_missing_prompts
from ts_eval.comparing.results import environment, read_results, write_json
from ts_eval.measuring import measurement
from ts_eval.measuring.computed import Assumption, computed, read_assumptions
from ts_eval.measuring.measurement import Measurement
from ts_eval.measuring.random_weights import RandomSources
from ts_eval.planning.model_shape import ModelShape

SCHEMA_VERSION = 2
RESULTS = "bench.json"
PLOT = "bench.png"


def bench(methods: Sequence[str] = (), *, say: Say = silent, **settings) -> dict:
    """Measure what ``settings``, the fields of `Bench`, ask for; returns what `save` writes. Raises as `Bench.run`."""
    return Bench(tuple(methods), **settings).run(say)


@dataclass(frozen=True, kw_only=True)
class Bench(Asked):
    """What is measured, and how often; `ar` always, and without methods all of ours whose parts are at hand.

    Args:
        sanitize_control_tokens, options: as in `compare.Experiment`.
        prompt_tokens: of the first prompt, from which the generations go on.
        new_tokens: of each generation.
        lengths: tokens of text over which passes are timed; of the usual ones those that the model has positions for.
        widths: nodes of the verifications timed.
        repeats: rounds; figures are their medians.
        seed: of the noise, and of random weights and prompt.
        random_weights: a configuration as `model_shape.read_config` takes it: model and heads are made from it alone,
            and the prompt is of random tokens; then without ``model``, ``heads``, ``draft_model`` and ``prompts``.
        tokens_per_step: as in `computed.read_assumptions`; the time of a whole text is computed from them.
        output: folder; figures in it that were measured with the same settings are taken over.
        overwrite: measure again, whatever the folder holds.
    """

    sanitize_control_tokens: bool = False
    prompt_tokens: int = defaults.BENCH_PROMPT_TOKENS
    new_tokens: int = defaults.BENCH_NEW_TOKENS
    lengths: Sequence[int] = defaults.BENCH_LENGTHS
    widths: Sequence[int] = defaults.BENCH_WIDTHS
    repeats: int = defaults.BENCH_REPEATS
    random_weights: str | None = None
    tokens_per_step: Sequence[str] = ()
    options: dict | None = None
    output: str | Path = defaults.BENCH_OUTPUT

    def run(self, say: Say) -> dict:
        """Measure.

        Raises:
            ValueError, OSError: an argument that does not fit or a file that is missing; nothing has been measured.
            OtherSettingsError: ``output`` holds figures of other settings.
            MemoryError: the longest text does not fit into memory.
        """
        self._refuse_wrong_numbers()
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

        loaded = sources.load(self.device, self.dtype, self.bitwise)
        if isinstance(sources, RandomSources):
            prompt = sources.prompt(loaded[None].target.vocab_size, self.prompt_tokens)
        else:
            sanitize = self.sanitize_control_tokens
            prompt = read_prompts(prompts, loaded[None].tokenizer, self.prompt_tokens, 1, sanitize)[0]
        lengths = sorted(set(_usual_that_fit(loaded[None], self.lengths, say)))
        widths = sorted({1, *self.widths, *(assumption.nodes for assumption in assumptions.values())})
        _refuse_too_long(loaded[None], prompt, self.new_tokens, lengths, widths)
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
        settings = self._settings(made, sources, prompt.name, lengths, widths, assumptions)
        header = json.loads(json.dumps({"settings": settings}))
        header["environment"] = environment(loaded[None].model.device, self.arguments)
        before = None if self.overwrite else read_results(folder / RESULTS, "ts-eval bench", SCHEMA_VERSION, header)
        if before is not None:
            say(f"taken over from {folder / RESULTS}, measured before; --overwrite measures again.")
            return before
        # What cannot be written to is told before anything is measured.
        folder.mkdir(parents=True, exist_ok=True)
        figures = made.all(lengths, widths)
        of_text = computed(figures["lengths"], figures["methods"], assumptions) if assumptions else None
        return {"schema_version": SCHEMA_VERSION, **header, **figures, "computed": of_text}

    def _refuse_wrong_numbers(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lengths", "widths"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be one or more numbers of at least 1")

    def _settings(
        self,
        made: Measurement,
        sources: Sources,
        prompt_name: str,
        lengths: Sequence[int],
        widths: Sequence[int],
        assumptions: dict[str, Assumption],
    ) -> dict:
        """What decides the figures, for the record and to tell whether a folder's figures are those asked for."""
        return {
            "methods": list(made.names),
            "model": sources.model,
            "random_weights": self.random_weights is not None,
            "heads": {text: sources.heads.get(text) for text in made.names},
            "draft_model": sources.draft_model,
            "weights": sources.weights(),
            "prompt_name": prompt_name,
            "prompt_tokens": len(made.prompt),
            "new_tokens": self.new_tokens,
            "lengths": lengths,
            "widths": widths,
            "repeats": self.repeats,
            "seed": self.seed,
            "tokens_per_step": {text: asdict(assumption) for text, assumption in assumptions.items()},
            "dtype": dtype_name(made.ar.model),
            "sampling": {name: value for name, value in asdict(made.params).items() if name in defaults.SAMPLING},
            "options": {text: asdict(option) for text, option in made.options.items()},
            "options_for_all": asdict(made.options_for_all),
        }

    def _rows(self) -> tuple[list[MethodSpec], Sources]:
        """The rows and what they run with; when none were asked for, those that do not lack heads or draft model."""
        specs = with_ar(self.methods or decoder.methods())
        refuse_outside(specs, " and cannot be taken apart: compare times it")
        if self.random_weights is None:
            sources = Sources.find(specs, self.model, self.heads, self.draft_model, self.data_dir)
        else:
            for flag in ("model", "heads", "draft_model", "prompts"):
                if getattr(self, flag):
                    raise ValueError(f"--random-weights makes its own: leave out --{flag.replace('_', '-')}")
            given = next((spec.text for spec in specs if spec.heads), None)
            if given:
                raise ValueError(f"--random-weights makes its own heads: leave out those of {given!r}")
            sources = RandomSources.of(specs, self.random_weights, self.seed)
        if not self.methods:
            lacking = {name for name, of in METHODS.items() if of.needs_heads and name not in sources.heads}
            lacking |= set() if sources.draft_model else set(NEED_DRAFT_MODEL)
            specs = [spec for spec in specs if spec.name not in lacking]
        return specs, sources


def save(results: dict, folder: Path) -> list[Path]:
    """Write bench.json and bench.png into ``folder``; returns their paths. Raises OSError, naming the file."""
    # Imported here because a measurement does not need it.
    from ts_eval.measuring.bench_page import plot

    write_json(folder / RESULTS, results)
    plot(results, folder / PLOT)
    return [folder / RESULTS, folder / PLOT]


def _most_tokens(dec: "decoder.Decoder") -> int:
    """Of a text over which passes are timed."""
    leading = measurement.LEADING_STEPS[dec.target.device.type]
    return dec.model.config.max_position_embeddings - measurement.AR_TOKENS - leading


def _usual_that_fit(dec: "decoder.Decoder", lengths: Sequence[int], say: Say) -> Sequence[int]:
    """Without the longest of the usual lengths, where the model has too few positions for them and some are left."""
    most = _most_tokens(dec)
    fitting = [length for length in lengths if length <= most]
    if tuple(lengths) != defaults.BENCH_LENGTHS or not fitting or len(fitting) == len(lengths):
        return lengths
    left_out = ", ".join(f"{length:,}" for length in lengths if length > most)
    say(f"no passes over {left_out} tokens: this model takes --lengths of at most {most:,}.")
    return fitting


def _refuse_too_long(
    dec: "decoder.Decoder", prompt: Prompt, new_tokens: int, lengths: Sequence[int], widths: Sequence[int]
) -> None:
    limit, device = dec.model.config.max_position_embeddings, dec.target.device
    leading = measurement.LEADING_STEPS[device.type]
    if len(prompt.token_ids) + new_tokens + leading > limit:
        raise ValueError(
            f"the prompt {prompt.name!r} ({len(prompt.token_ids):,} tokens) and {new_tokens + leading:,} new tokens "
            f"are beyond the model's {limit:,} positions"
        )
    further, most = measurement.AR_TOKENS + leading, _most_tokens(dec)
    if lengths[-1] > most:
        raise ValueError(
            f"lengths must be at most {most:,}, not {lengths[-1]:,}: the model has {limit:,} positions "
            f"and {further} more tokens are generated"
        )
    # Two caches of the longest text, one to generate in and one to verify over, and a draft cache no longer than it;
    # of the widest tree the logits, and its mask and what is made of that; and the buffers that are copied.
    shape, widest = ModelShape.of(dec.model), widths[-1]
    needed = 3 * shape.cache_bytes(lengths[-1] + max(further, dec.target.width(widest)))
    needed += 2 * measurement.COPIED_BYTES[device.type] + widest * (shape.vocab_size * shape.value_bytes + 2 * widest)
    free = available_memory(device)
    if needed > free:
        raise MemoryError(
            f"{lengths[-1]:,} tokens of text and trees of {widest:,} nodes take {needed / 1e9:,.1f} GB and "
            f"{free / 1e9:,.1f} GB are free: name shorter --lengths or narrower --widths"
        )
