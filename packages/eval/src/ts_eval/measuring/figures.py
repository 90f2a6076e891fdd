"""What repeated measurements give: medians with their ranges, and a row's figures from its generations."""

from collections.abc import Sequence
from statistics import median

from ts_eval.measuring.stopwatch import FORWARDS, PARTS


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
