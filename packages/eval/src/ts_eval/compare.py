"""The experiment: the same prompts and seeds through several decoding methods, one row per method.

Runs are interleaved: for each run and prompt every method takes its turn, in an order that rotates from run to run,
after a short warm-up of each, so that a machine that warms up or is shared slows no method alone. Clocks are the
engine's own: decoding and prefill apart.
"""

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

import decoder
from decoder.sampler import Sampler, first_argmax
from ts_eval import defaults, metrics
from ts_eval.data_dir import find_data_dir
from ts_eval.prompts import SHIPPED, Prompt, read_prompts
from ts_eval.results import SCHEMA_VERSION, GenerationLog, digest_files, environment, write_json

REFERENCE_MODEL = "reference-model"
DEFAULT_HEADS = {"tokenswift": "heads-chained", "medusa": "heads-independent"}
DRAFT_MODEL = "draft-model"
WARM_UP_PROMPT_TOKENS = 256
WARM_UP_NEW_TOKENS = 16

# How far apart two differently shaped matrix products may put two logits, by the model's dtype: a few units in the
# last place of a logit of magnitude 16 to 32 in the short formats, and the contract's 1e-4 in float32.
TIE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.5}

STATISTICS = (
    "steps",
    "drafted",
    "accepted",
    "ngram_accepted",
    "acceptance_rate",
    "ngram_acceptance_rate",
    "tokens_per_step",
    "accepted_by_depth",
    "cache_rebuilds",
    "prefill_seconds",
    "decode_seconds",
)


@dataclass(frozen=True)
class MethodSpec:
    """A row of the comparison: a method with options of its own, written ``NAME[:option=value...]``.

    ``text``, the specification as written, names the row. Numbers of a tuple are separated by commas:
    ``tokenswift:tree=1,3,3,3:ngrams=20``.
    """

    text: str
    name: str
    options: dict = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "MethodSpec":
        """Raises ValueError for an unknown method or option, or a value that does not read as the option's kind."""
        name, *pairs = text.split(":")
        if name not in decoder.methods():
            raise ValueError(f"unknown method {name!r}: choose from {', '.join(decoder.methods())}")
        defaults = asdict(decoder.TokenSwiftOptions())
        options = {}
        for pair in pairs:
            option, equals, value = pair.partition("=")
            if option not in defaults or not equals:
                raise ValueError(f"unknown option {pair!r} in {text!r}: options are {', '.join(defaults)}")
            try:
                options[option] = _read_like(defaults[option], value)
            except ValueError as error:
                raise ValueError(f"{value!r} does not fit the option {option} in {text!r}") from error
        return cls(text, name, options)


def _read_like(default: object, value: str) -> object:
    """``value`` read as what ``default`` is; None stands for a number that has no default."""
    if isinstance(default, tuple):
        return tuple(int(number) for number in value.split(","))
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise ValueError(f"{value!r} is neither true nor false")
        return value == "true"
    return value if isinstance(default, str) else int(value)


def compare(
    methods: Sequence[str],
    *,
    model: str | None = None,
    heads: Sequence[str] = (),
    draft_model: str | None = None,
    prompts: str | None = None,
    prompt_tokens: int | None = None,
    max_new_tokens: int = defaults.MAX_NEW_TOKENS,
    num_prompts: int | None = None,
    runs: int = defaults.RUNS,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    sampling: dict | None = None,
    options: dict | None = None,
    output: str | Path = defaults.OUTPUT,
    data_dir: str | Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict:
    """Run ``methods`` against ``ar`` and write ``output/results.json``; returns its content.

    Args:
        methods: specifications as in `MethodSpec`; ``ar`` is put first when it is not among them.
        model: folder or hub id; None takes the reference model of the data folder, with its heads and draft model.
        heads: one checkpoint for every method, or METHOD=CHECKPOINT pairs.
        draft_model: folder or hub id of the model that drafts for ``triforce``.
        prompts: text file (one prompt) or .jsonl(.gz); None takes the shipped PG-19 test books.
        prompt_tokens: the first so many tokens of each prompt; None takes the whole text, of a shipped book 1,024.
        max_new_tokens: tokens to generate, end-of-text ignored.
        num_prompts: at most so many prompts; None takes all of a file, one of the shipped books.
        runs: generations per method and prompt; run r (from 0) uses the seed ``seed`` + r.
        device, dtype: as in `decoder.load`.
        sampling: fields of `decoder.SamplingParams` over the defaults temperature 1, min-p 0.1, penalty 1.2 over 1,024.
        options: fields of `decoder.TokenSwiftOptions` for every method; a method's own come first.
        output: folder; finished generations in it are kept and not run again.
        data_dir: the data folder; None finds the checkout's.
        overwrite: drop generations of other settings in ``output`` instead of refusing.
        say: told in a sentence when finished generations are taken over.

    Raises:
        ValueError, OSError: an argument that does not fit or a file that is missing; nothing has been written.
        OtherSettingsError: ``output`` holds generations of other settings.
    """
    specs = _specs(methods)
    counts = {
        "max_new_tokens": max_new_tokens,
        "runs": runs,
        "num_prompts": num_prompts,
        "prompt_tokens": prompt_tokens,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    sampling = {**defaults.SAMPLING, **(sampling or {})}
    params = [decoder.SamplingParams(**sampling, seed=seed + run) for run in range(runs)]
    method_options = {spec.text: decoder.TokenSwiftOptions(**{**(options or {}), **spec.options}) for spec in specs}

    if model is None:
        model = str(find_data_dir(data_dir) / REFERENCE_MODEL)
        own_heads = {name: str(find_data_dir(data_dir) / folder) for name, folder in DEFAULT_HEADS.items()}
        if draft_model is None and any(spec.name == "triforce" for spec in specs):
            draft_model = str(find_data_dir(data_dir) / DRAFT_MODEL)
    else:
        own_heads = {}
    checkpoints = _heads_by_method(specs, heads, own_heads)
    if prompts is None:
        prompts = str(find_data_dir(data_dir) / SHIPPED)
        prompt_tokens, num_prompts = prompt_tokens or defaults.BOOK_TOKENS, num_prompts or 1
    _refuse_missing_folder("model", model)
    _refuse_missing_folder("draft model", draft_model)
    for path in checkpoints.values():
        _refuse_missing_folder("heads", path)
    if not Path(prompts).is_file():
        raise FileNotFoundError(f"the prompt file {prompts} does not exist")

    decoders = _load(model, checkpoints, draft_model, device, dtype)
    backbone = decoders[None].model
    texts = read_prompts(prompts, decoders[None].tokenizer, prompt_tokens, num_prompts)
    limit = backbone.config.max_position_embeddings
    for prompt in texts:
        if len(prompt.token_ids) + max_new_tokens > limit:
            raise ValueError(
                f"the prompt {prompt.name!r} ({len(prompt.token_ids):,} tokens) and {max_new_tokens:,} new tokens are "
                f"beyond the model's {limit:,} positions"
            )

    settings = {
        "methods": [spec.text for spec in specs],
        "model": model,
        "heads": {spec.text: checkpoints.get(spec.text) for spec in specs},
        "draft_model": draft_model,
        "weights": {path: _weights(path) for path in (model, draft_model, *checkpoints.values()) if path},
        "prompts": str(prompts),
        "prompt_tokens": prompt_tokens,
        "prompt_names": [prompt.name for prompt in texts],
        "prompt_lengths": [len(prompt.token_ids) for prompt in texts],
        "prompt_digest": hashlib.sha256(str([prompt.token_ids for prompt in texts]).encode()).hexdigest()[:16],
        "max_new_tokens": max_new_tokens,
        "num_prompts": len(texts),
        "runs": runs,
        "seed": seed,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "sampling": {name: value for name, value in asdict(params[0]).items() if name in defaults.SAMPLING},
        "options": {text: _plain(option) for text, option in method_options.items()},
        "options_for_all": _plain(decoder.TokenSwiftOptions(**(options or {}))),
    }
    provenance = environment(backbone.device)
    log = GenerationLog(Path(output), settings, provenance, overwrite=overwrite)
    jobs = [job for job in _jobs(specs, len(texts), runs) if log.get(*job) is None]
    if len(log):
        say(f"{len(log)} finished generations taken over from {log.path}; {len(jobs)} left to run.")

    by_text = {spec.text: spec for spec in specs}

    def arguments(text: str, run: int) -> dict:
        return {
            "method": by_text[text].name,
            "sampling": params[run],
            "options": method_options[text],
            "ignore_eos": True,
        }

    def decoder_of(text: str):
        return decoders[checkpoints.get(text)]

    for text in dict.fromkeys(text for text, _, _ in jobs):
        start = list(texts[0].token_ids[:WARM_UP_PROMPT_TOKENS])
        decoder_of(text).generate(start, min(WARM_UP_NEW_TOKENS, max_new_tokens), **arguments(text, 0))
    # In a file each refresh is a line of its own.
    interval = 0.2 if sys.stderr.isatty() else 10
    with tqdm(total=len(jobs) * max_new_tokens, unit="tok", disable=not jobs, leave=False, mininterval=interval) as bar:
        for text, index, run in jobs:
            bar.set_description(f"{text} prompt {index + 1}/{len(texts)} run {run + 1}/{runs}", refresh=False)
            prompt = texts[index]
            for chunk in decoder_of(text).stream(list(prompt.token_ids), max_new_tokens, **arguments(text, run)):
                bar.update(len(chunk.token_ids))
            log.append(_record(text, index, prompt, run, params[run].seed, chunk.output))

    def margin(context: Sequence[int], token: int, other: int, run: int) -> float | None:
        return divergence_margin(backbone, context, token, other, params[run])

    results = {
        "schema_version": SCHEMA_VERSION,
        "environment": provenance,
        "settings": settings,
        "methods": summarise(specs, texts, runs, log, margin),
    }
    write_json(Path(output) / "results.json", results)
    return results


def _specs(methods: Sequence[str]) -> list[MethodSpec]:
    specs = [MethodSpec.parse(text) for text in dict.fromkeys(methods)]
    return specs if any(spec.text == "ar" for spec in specs) else [MethodSpec.parse("ar"), *specs]


def _heads_by_method(specs: list[MethodSpec], heads: Sequence[str], own: dict[str, str]) -> dict[str, str]:
    """Row -> heads checkpoint, for the rows that have one: the method's, the one for all, or the model's own."""
    pairs, for_all = {}, []
    for entry in heads:
        name, equals, path = entry.partition("=")
        if equals and name in decoder.methods():
            pairs[name] = path
        else:
            for_all.append(entry)
    if len(for_all) > 1:
        raise ValueError("heads is one checkpoint or METHOD=CHECKPOINT pairs, not several checkpoints")
    found = {spec.text: pairs.get(spec.name, for_all[0] if for_all else own.get(spec.name)) for spec in specs}
    return {text: path for text, path in found.items() if path and text != "ar"}


def _refuse_missing_folder(what: str, path: str | None) -> None:
    """Refuse at once, and offline, what is neither a folder nor could be a hub id (owner/name)."""
    if path and not Path(path).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        raise FileNotFoundError(f"there is no {what} folder {path}, and it is no hub id (owner/name) either")


def _plain(options: "decoder.TokenSwiftOptions") -> dict:
    """The options as JSON gives them back."""
    return {**asdict(options), "tree": list(options.tree)}


def _load(model: str, checkpoints: dict[str, str], draft_model: str | None, device: str, dtype: str) -> dict:
    """Heads checkpoint (or None) -> Decoder; all share the one loaded model."""
    try:
        plain = decoder.load(model, draft_model=draft_model, device=device, dtype=dtype)
    except OSError as error:
        # transformers answers with a paragraph; its first sentence has the reason.
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise OSError(f"{model} cannot be loaded: {reason}") from error
    if plain.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, which the prompts need")
    loaded = {None: plain}
    for path in dict.fromkeys(checkpoints.values()):
        loaded[path] = decoder.Decoder(plain.model, plain.tokenizer, heads=path, draft_model=plain.draft_model)
    return loaded


def _weights(path: str) -> str | None:
    """What tells two versions of a local checkpoint apart; the hub's own files never change under an id's revision."""
    return digest_files(Path(path)) if Path(path).is_dir() else None


def _jobs(specs: list[MethodSpec], num_prompts: int, runs: int) -> Iterator[tuple[str, int, int]]:
    """(row, prompt, run), interleaved; the order of the methods rotates by one from run to run."""
    for run in range(runs):
        shift = run % len(specs)
        for prompt in range(num_prompts):
            for spec in specs[shift:] + specs[:shift]:
                yield spec.text, prompt, run


def _record(text: str, index: int, prompt: Prompt, run: int, seed: int, output) -> dict:
    seconds, new_tokens = output.stats.decode_seconds, len(output.token_ids)
    return {
        "method": text,
        "prompt": prompt.name,
        "prompt_index": index,
        "run": run,
        "seed": seed,
        "prompt_tokens": len(prompt.token_ids),
        "new_tokens": new_tokens,
        "tokens_per_second": new_tokens / seconds if seconds else None,
        "ms_per_token": 1000 * seconds / new_tokens if seconds else None,
        **{name: getattr(output.stats, name) for name in STATISTICS},
        "token_ids": list(output.token_ids),
        "text": output.text,
    }


def summarise(
    specs: list[MethodSpec],
    prompts: list[Prompt],
    runs: int,
    log: GenerationLog,
    margin: Callable[[Sequence[int], int, int, int], float | None],
) -> dict[str, dict]:
    """Row per method, from its finished generations.

    Times are medians over prompts and runs, with their smallest and largest value in the ``..._range`` beside them;
    ``speedup`` is the median of AR's milliseconds per token over the method's for the same prompt and run. Rates are
    pooled over all steps. Distinct-n (over the new tokens) and Self-BLEU (over the new text) are means over
    generations. ``first_divergence`` is the smallest index at which a generation differs from ar's and
    ``divergence_margin`` the largest margin of those that differ: all are ties when it is within the tolerance.

    Args:
        margin: (context, ar's token, the method's token, run) -> `divergence_margin`.
    """
    pairs = [(prompt, run) for run in range(runs) for prompt in range(len(prompts))]
    reference = {pair: log.get("ar", *pair) for pair in pairs}
    rows = {}
    for spec in specs:
        generations = []
        for pair in pairs:
            record, ar = dict(log.get(spec.text, *pair)), reference[pair]
            index = first_divergence(ar["token_ids"], record["token_ids"])
            record["identical_to_ar"], record["first_divergence"] = index is None, index
            record["divergence_margin"] = None
            if index is not None and index < min(len(ar["token_ids"]), len(record["token_ids"])):
                context = [*prompts[pair[0]].token_ids, *ar["token_ids"][:index]]
                record["divergence_margin"] = margin(
                    context, ar["token_ids"][index], record["token_ids"][index], pair[1]
                )
            record["speedup"] = _quotient(ar["ms_per_token"], record["ms_per_token"])
            record["distinct"] = metrics.distinct(record["token_ids"])
            record["self_bleu"] = metrics.self_bleu(record["text"])
            generations.append(record)
        rows[spec.text] = _row(generations)
    return rows


def _row(generations: list[dict]) -> dict:
    def total(name: str) -> int:
        return sum(record[name] for record in generations)

    differing = [record for record in generations if not record["identical_to_ar"]]
    margins = [record["divergence_margin"] for record in differing]
    return {
        **_median_and_range("tokens_per_second", generations),
        **_median_and_range("ms_per_token", generations),
        **_median_and_range("speedup", generations),
        **_median_and_range("prefill_seconds", generations),
        "acceptance_rate": metrics.acceptance_rate(total("accepted"), total("drafted")),
        "ngram_acceptance_rate": metrics.ngram_acceptance_rate(total("ngram_accepted"), total("drafted")),
        "tokens_per_step": metrics.tokens_per_step(total("new_tokens"), total("steps")),
        "distinct": _mean_by_key([record["distinct"] for record in generations]),
        "self_bleu": _mean_by_key([record["self_bleu"] for record in generations]),
        "identical_to_ar": not differing,
        "first_divergence": min((record["first_divergence"] for record in differing), default=None),
        "divergence_margin": max(margins, default=None) if None not in margins else None,
        "runs": generations,
    }


def _median_and_range(name: str, generations: list[dict]) -> dict:
    known = [record[name] for record in generations if record[name] is not None]
    if not known:
        return {name: None, f"{name}_range": None}
    return {name: median(known), f"{name}_range": [min(known), max(known)]}


def _mean_by_key(values: list[dict[str, float | None]]) -> dict[str, float | None]:
    return {key: metrics.mean_of([value[key] for value in values]) for key in values[0]}


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def first_divergence(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two ends; None when they are equal."""
    for index, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


@torch.inference_mode()
def divergence_margin(
    model, context: Sequence[int], token: int, other: int, params: "decoder.SamplingParams"
) -> float | None:
    """How far two tokens are from a tie: the least change of their logits' difference that would draw either one.

    The model runs once over ``context`` [n] as a plain forward pass, without cache or tree, and the decoder's own
    sampler (penalty, filters, the position's noise) draws from its logits. Where both tokens pass the filters, this is
    the gap of their perturbed scores, in units of a logit; where one stands on the edge of a filter, it is the
    distance to that edge. None when no change below 1,000 brings one of them about.
    """
    ids = torch.tensor([list(context)], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].double()
    sampler = Sampler(params, logits.shape[-1], logits.device, context)

    def drawn(winner: int, loser: int, change: float) -> bool:
        moved = logits.clone()
        moved[winner] += change / 2
        moved[loser] -= change / 2
        return int(first_argmax(sampler.scores(moved))) == winner

    def least_change(winner: int, loser: int) -> float:
        if drawn(winner, loser, 0.0):
            return 0.0
        high = 1e-12
        while not drawn(winner, loser, high):
            if high > 1000:
                return math.inf
            high *= 2
        low = high / 2
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if drawn(winner, loser, middle) else (middle, high)
        return high

    margin = max(least_change(token, other), least_change(other, token))
    return margin if math.isfinite(margin) else None


def is_audited_tie(row: dict, dtype: str) -> bool:
    """Whether a row that differs from ar does so only where rounding decides, by `TIE_TOLERANCE` of the dtype."""
    margin = row["divergence_margin"]
    return margin is not None and margin <= TIE_TOLERANCE[getattr(torch, dtype)]


def differs(results: dict) -> list[str]:
    """Rows that differ from ar other than by an audited tie."""
    dtype = results["settings"]["dtype"]
    return [
        name
        for name, row in results["methods"].items()
        if not row["identical_to_ar"] and not is_audited_tie(row, dtype)
    ]
