"""From finished generations to one row per method."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, zip_longest
from statistics import median
from typing import Any

import decoder
from ts_eval import metrics
from ts_eval.comparing.generation import same_sampling_in_transformers
from ts_eval.comparing.intervals import median_interval, weighted_median
from ts_eval.comparing.method_spec import MethodSpec, plain_row
from ts_eval.comparing.prompts import Prompt
from ts_eval.comparing.results import GenerationLog

MeasureText = Callable[[Sequence[int], str, Sequence[int]], dict]
Margin = Callable[[Sequence[int], int, int, int], float | None]


def summarise(
    specs: list[MethodSpec],
    prompts: list[Prompt],
    params: "Sequence[decoder.SamplingParams]",
    marks: Sequence[int],
    log: GenerationLog,
    margin: Margin,
    measure_text: MeasureText,
    kv_dtype: str | None = None,
) -> dict[str, dict]:
    """Row per method, from its finished generations: one per prompt and run.

    Times are medians over prompts and runs, in which a generation weighs as much as it has tokens, with their smallest
    and largest value in the ``..._range`` beside them and, of speed and speed-up, the confidence interval over prompts
    in the ``..._interval``. ``speedup`` is the median of
    AR's milliseconds per token over the method's for the same prompt and run. ``throughput`` is the tokens per second
    of all texts that are decoded together, over all batches, with its range over batches; ``throughput_speedup`` is the
    method's over AR's, and ``texts_per_step`` the mean number of texts that a step decoded, weighted by time. Rates are
    pooled over all steps. Measures of the text are means over generations.
    ``logprobs_equal`` tells whether the log-probabilities are ar's to the last bit, where they were kept.
    ``first_divergence`` is the smallest index at which a generation differs from ar's and ``divergence_margin`` the
    largest margin of those that differ: all are ties when it is within the tolerance. Identity is None where
    transformers samples, penalises otherwise or has no quantised cache, of llama.cpp and of a server. Of their rows
    that draft, ``identical_to_own_plain`` and ``own_first_divergence`` compare with ``own_plain``, the row of the same
    engine without drafts.

    Args:
        params: the sampling of each run.
        marks: numbers of new tokens at which ``along_length`` tells latency, speed-up and acceptance so far.
        margin: (context, ar's token, the method's token, run) -> `divergence_margin`.
        measure_text: (token ids, text, the prompt's token ids) -> measures of the text.
        kv_dtype: of our rows' full caches.
    """
    pairs = [(prompt, run) for run in range(len(params)) for prompt in range(len(prompts))]
    reference = {pair: log.get("ar", *pair) for pair in pairs}
    at_marks = [along_length(reference[pair], marks) for pair in pairs]
    measured: dict[tuple, dict] = {}
    rows = {}
    for spec in specs:
        generations, measures = [], []
        for prompt, run in pairs:
            record, ar = dict(log.get(spec.text, prompt, run)), reference[prompt, run]
            ids, length = prompts[prompt].token_ids, len(prompts[prompt].token_ids) + len(record["token_ids"])
            outside = spec.is_hf and kv_dtype is None and same_sampling_in_transformers(params[run], length)
            comparable = outside or not spec.is_outside
            record |= _identity(ar, record, ids, run, margin) if comparable else dict.fromkeys(IDENTITY)
            record["speedup"] = _quotient(ar["ms_per_token"], record["ms_per_token"])
            record["along_length"] = along_length(record, marks)
            # Lossless methods share one text, and a measure may cost a pass of the model.
            key = (prompt, tuple(record["token_ids"]))
            if key not in measured:
                measured[key] = measure_text(record["token_ids"], record["text"], ids)
            measures.append(measured[key])
            generations.append(record | measured[key])
        rows[spec.text] = _row(generations, measures, at_marks) | _own_identity(spec, specs, generations, pairs, log)
    for row in rows.values():
        row["throughput_speedup"] = _quotient(row["throughput"], rows["ar"]["throughput"])
    return rows


IDENTITY = ("identical_to_ar", "first_divergence", "divergence_margin", "logprobs_equal")


def _identity(ar: dict, record: dict, prompt: Sequence[int], run: int, margin: Margin) -> dict:
    index = first_divergence(ar["token_ids"], record["token_ids"])
    found = None
    if index is not None and index < min(len(ar["token_ids"]), len(record["token_ids"])):
        found = margin([*prompt, *ar["token_ids"][:index]], ar["token_ids"][index], record["token_ids"][index], run)
    return dict(zip(IDENTITY, (index is None, index, found, _logprobs_equal(ar, record, index)), strict=True))


def _own_identity(
    spec: MethodSpec, specs: Sequence[MethodSpec], generations: list[dict], pairs: Sequence[tuple], log: GenerationLog
) -> dict:
    """Of a row that is not decoded here, whether its texts are those of the same engine without drafts."""
    plain = plain_row(spec, specs) if spec.is_outside else None
    if plain in (None, spec.text):
        return {"own_plain": None, "identical_to_own_plain": None, "own_first_divergence": None}
    found = [
        first_divergence(log.get(plain, *pair)["token_ids"], record["token_ids"])
        for pair, record in zip(pairs, generations, strict=True)
    ]
    first = min((index for index in found if index is not None), default=None)
    return {"own_plain": plain, "identical_to_own_plain": first is None, "own_first_divergence": first}


def _logprobs_equal(ar: dict, record: dict, end: int | None) -> bool | None:
    """Whether the tokens before ``end`` have ar's log-probabilities to the last bit; None where they were not kept."""
    expected, found = ar.get("logprobs"), record.get("logprobs")
    return None if expected is None or found is None else expected[:end] == found[:end]


def timed_tokens(record: dict) -> list[int]:
    """Per step, the tokens so far that the decode clock has seen: transformers' first ones come from the prefill."""
    clock = [0.0, *record["step_seconds"]]
    ticked = [count if after > before else 0 for count, (before, after) in zip(
        record["step_tokens"], pairwise(clock), strict=True)]  # fmt: skip
    return list(accumulate(ticked))


def along_length(record: dict, marks: Sequence[int]) -> list[dict]:
    """What a generation had shown when it reached each of ``marks`` new tokens; marks beyond its end are left out.

    ``ms_per_token`` is from the beginning of decoding to the end of the step that reached the mark,
    ``ms_per_token_since`` from the mark before; the rates and ``tokens_per_step`` are from the beginning.
    """
    reached, timed = list(accumulate(record["step_tokens"])), timed_tokens(record)
    found, before = [], (0.0, 0)
    for mark in marks:
        step = next((i for i, tokens in enumerate(reached) if tokens >= mark), None)
        if step is None:
            break
        now = (record["step_seconds"][step], timed[step])
        drafted, accepted = record["step_drafted"][step], record["step_accepted"][step]
        found.append(
            {
                "tokens": mark,
                "ms_per_token": _ms(*now),
                "ms_per_token_since": _ms(now[0] - before[0], now[1] - before[1]),
                "acceptance_rate": metrics.acceptance_rate(accepted, drafted),
                "ngram_acceptance_rate": metrics.ngram_acceptance_rate(record["step_ngram_accepted"][step], drafted),
                "tokens_per_step": metrics.tokens_per_step(reached[step], step + 1),
            }
        )
        before = now
    return found


def _ms(seconds: float, tokens: int) -> float | None:
    return 1000 * seconds / tokens if tokens and seconds else None


def _throughput(generations: list[dict]) -> dict:
    """Tokens per second of all texts together, its range over batches, and how many texts a step decoded."""

    def speed(records: list[dict]) -> float | None:
        return _quotient(
            sum(timed_tokens(each)[-1] for each in records), sum(each["shared_seconds"] for each in records)
        )

    batches: dict[int, list[dict]] = {}
    for record in generations:
        batches.setdefault(record["batch_index"], []).append(record)
    speeds = [found for found in map(speed, batches.values()) if found is not None]
    texts = [sum(record[name] for record in generations) for name in ("decode_seconds", "shared_seconds")]
    return {
        "throughput": speed(generations),
        "throughput_range": [min(speeds), max(speeds)] if speeds else None,
        "texts_per_step": _quotient(*texts),
    }


def _row(generations: list[dict], measures: list[dict], at_marks: list[list[dict]]) -> dict:
    def total(name: str) -> int | None:
        values = [record[name] for record in generations]
        return None if None in values else sum(values)

    compared = [record for record in generations if record["identical_to_ar"] is not None]
    differing = [record for record in compared if not record["identical_to_ar"]]
    margins = [record["divergence_margin"] for record in differing]
    equal = [record["logprobs_equal"] for record in generations]
    drafted, steps = total("drafted"), total("steps")
    known = [record for record in generations if record["accepted_by_depth"] is not None]
    by_depth = _sums([record["accepted_by_depth"] for record in known])
    by_source = sum((Counter(record["accepted_by_source"]) for record in known), Counter())
    return {
        **_median_and_range("tokens_per_second", generations),
        **_median_and_range("ms_per_token", generations),
        **_interval("tokens_per_second", generations),
        **_median_and_range("speedup", generations),
        **_interval("speedup", generations),
        **_throughput(generations),
        **_median_and_range("prefill_seconds", generations),
        **_median_and_range("peak_memory_bytes", generations),
        "memory_above_model_bytes": median_of([_above_model(record) for record in generations]),
        "acceptance_rate": metrics.acceptance_rate(total("accepted"), drafted),
        "ngram_acceptance_rate": metrics.ngram_acceptance_rate(total("ngram_accepted"), drafted),
        "tokens_per_step": metrics.tokens_per_step(total("new_tokens"), steps),
        "nodes_per_step": _quotient(total("nodes"), steps),
        "acceptance_by_depth": metrics.acceptance_by_depth(by_depth, steps),
        "acceptance_by_source": metrics.acceptance_by_source(by_source, drafted),
        "along_length": along_rows(generations, at_marks),
        **_mean_measures(measures),
        "identical_to_ar": not differing if compared else None,
        "logprobs_equal": None if None in equal or not equal else all(equal),
        "first_divergence": min((record["first_divergence"] for record in differing), default=None),
        "divergence_margin": max(margins, default=None) if None not in margins else None,
        "resumed": sum(bool(record["resumed_at"]) for record in generations),
        "runs": generations,
    }


def _above_model(record: dict) -> int | None:
    """The peak above what was held once the models were loaded and warm."""
    peak, loaded = record["peak_memory_bytes"], record["memory_loaded_bytes"]
    return None if peak is None or loaded is None else max(0, peak - loaded)


def _sums(columns: list[list[int]]) -> list[int]:
    """Sums by place; shorter lists end in zeros."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def along_rows(generations: list[dict], at_marks: list[list[dict]]) -> list[dict]:
    """Medians at each mark over the generations that came so far, ``speedup`` that of pairs with ar's at that mark.

    Args:
        generations: records with an ``along_length``.
        at_marks: ar's `along_length` of the same prompts and runs.
    """
    pairs = [(record["along_length"], reference) for record, reference in zip(generations, at_marks, strict=True)]
    rows = []
    longest = max((own for own, _ in pairs), key=lambda own: len(own))
    for place, mark in enumerate(longest):
        reached = [(own[place], ar[place] if place < len(ar) else None) for own, ar in pairs if place < len(own)]
        row = {"tokens": mark["tokens"]}
        for name in list(mark)[1:]:
            row[name] = median_of([own[name] for own, _ in reached])
        for name in ("ms_per_token", "ms_per_token_since"):
            speedups = [None if ar is None else _quotient(ar[name], own[name]) for own, ar in reached]
            row["speedup" + name.removeprefix("ms_per_token")] = median_of(speedups)
        rows.append(row)
    return rows


def _mean_measures(values: list[dict]) -> dict:
    """Means over generations, nested ones by key; of where looping begins the earliest."""
    means: dict[str, Any] = {}
    for name, first in values[0].items():
        column = [value[name] for value in values]
        if isinstance(first, dict):
            means[name] = _mean_measures(column)
        elif name == "loop_start":
            means[name] = min((value for value in column if value is not None), default=None)
        else:
            means[name] = metrics.mean_of(column)
    return means


def median_of(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _interval(name: str, generations: list[dict]) -> dict:
    """The `median_interval` of a figure over prompts."""
    of_prompts: dict[int, list[tuple[float, float]]] = {}
    for record in generations:
        if record[name] is not None:
            of_prompts.setdefault(record["prompt_index"], []).append((record[name], _weight(record)))
    return {f"{name}_interval": median_interval(list(of_prompts.values()))}


def _weight(record: dict) -> float:
    return max(1, record["new_tokens"])


def _median_and_range(name: str, generations: list[dict]) -> dict:
    known = [(record[name], _weight(record)) for record in generations if record[name] is not None]
    values = [value for value, _ in known]
    return {
        name: weighted_median(known) if known else None,
        f"{name}_range": [min(values), max(values)] if known else None,
    }


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def first_divergence(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two ends; None when they are equal."""
    for index, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(actual) else min(len(expected), len(actual))
