"""Penalty and filters: pure functions on logits, the same for every method, on one row or many."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from decoder.sampling.params import SamplingParams

_ROUNDING = 1e-12  # of sums of probabilities


def penalise(logits: torch.Tensor, in_window: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty (paper section 3.5) on the ``logits`` [..., V] of the tokens ``in_window``, bool [V].

    Positive logits are divided by ``penalty`` and the others multiplied, which for a penalty above 1 is the smaller of
    the two results, and below 1 the greater.
    """
    worse = torch.minimum if penalty > 1 else torch.maximum
    return torch.where(in_window, worse(logits / penalty, logits * penalty), logits)


def filter_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Drop all but the k highest logits of each row; of equal ones the smaller token ids stay."""
    if k >= logits.shape[-1]:
        return logits
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return logits.scatter(-1, order[..., k:], -torch.inf)


def filter_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Drop all but the most probable tokens whose mass reaches p, at least one; of equal ones the smaller ids stay.

    Where masses are p itself, as those of equal tokens can be, the rounding of sums would decide: these reach it.
    """
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    drop = mass_before >= p - _ROUNDING
    drop[..., :1].fill_(False)
    return ranked.masked_fill(drop, -torch.inf).gather(-1, order.argsort(-1))


def filter_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Drop tokens whose probability is below ``min_p`` times the highest one; such ratios need no normalisation."""
    floor = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < floor, -torch.inf)


def filter_eta(logits: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Eta sampling (Hewitt et al., 2022): drop p < min(eps, sqrt(eps) * exp(-entropy)); the best token stays."""
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).nan_to_num(nan=0.0).sum(-1, keepdim=True)
    eta = torch.minimum(torch.full_like(entropy, epsilon), epsilon**0.5 * (-entropy).exp())
    drop = (probabilities < eta) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -torch.inf)


class Filter(NamedTuple):
    """A filter of `SamplingParams`.

    Attributes:
        field: the parameter.
        off: its value that switches the filter off.
        apply: logits [..., V] and the value to logits.
        sums: whether it sums over the vocabulary, so that bits may follow from how many rows there are; such filters
            run row by row where bits have to be those of one row.
    """

    field: str
    off: float
    apply: Callable[[torch.Tensor, Any], torch.Tensor]
    sums: bool


FILTERS = (
    Filter("top_k", 0, filter_top_k, sums=False),
    Filter("top_p", 1.0, filter_top_p, sums=True),
    Filter("min_p", 0.0, filter_min_p, sums=False),
    Filter("eta_cutoff", 0.0, filter_eta, sums=True),
)
"""In the order in which they act, each on what the one before has left."""


def active(params: SamplingParams) -> list[Filter]:
    """The filters that these parameters switch on; none where decoding is greedy."""
    return [] if params.greedy else [own for own in FILTERS if getattr(params, own.field) != own.off]


def penalise_output(logits: torch.Tensor, counts: torch.Tensor, frequency: float, presence: float) -> torch.Tensor:
    """Frequency and presence penalty, as OpenAI and vLLM define them; ``counts`` [..., V] are those in the output."""
    # A product of integers and a number is of single precision otherwise.
    times = counts.to(logits.dtype)
    return logits - times * frequency - times.clamp(max=1) * presence


def process_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    in_window: torch.Tensor | None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The filtered, unnormalised log-probabilities of each row [..., V], in the dtype given; -inf for dropped tokens.

    Args:
        in_window: the tokens of the penalty window, bool [..., V]; None stands for an empty window.
        counts: how often the output has each token, int32 [..., V]; None stands for an empty output.
    """
    if in_window is not None and params.repetition_penalty != 1:
        logits = penalise(logits, in_window, params.repetition_penalty)
    if counts is not None and params.counts_output:
        logits = penalise_output(logits, counts, params.frequency_penalty, params.presence_penalty)
    if not params.greedy and params.temperature != 1:
        logits = logits / params.temperature
    for own in active(params):
        logits = own.apply(logits, getattr(params, own.field))
    return logits


def first_argmax(scores: torch.Tensor, best: torch.Tensor | None = None) -> torch.Tensor:
    """The index of the highest score in each row of [..., V]; of equal scores the first, which torch does not promise.

    It is the last index if a score is NaN. ``best`` [..., 1] are the highest scores, if the caller has them already.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    best = scores.amax(-1, keepdim=True) if best is None else best
    return torch.where(scores == best, ids, ids[-1]).amin(-1)


def highest_of(scores: np.ndarray) -> tuple[int, float]:
    """The index of the highest score [V] on the host, the first of equal ones, and the score; NaN is the highest."""
    # NumPy promises the first one, at a tenth of what `first_argmax` costs.
    best = int(scores.argmax())
    return best, float(scores[best])


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the ``count`` highest scores in each row of [..., V], the highest first, int64 [..., count].

    Of equal scores those with the smaller indices are taken, and come first, which `torch.topk` does not promise. A row
    that holds NaN gives indices within it and no more than that.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    least = scores.topk(count).values[..., -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))
    # Indices differ from each other, so that their order is certain; that of equal scores then follows from it.
    first = torch.where(taken, ids, ids[-1]).topk(count, largest=False, sorted=True).values
    return first.gather(-1, scores.gather(-1, first).sort(dim=-1, descending=True, stable=True).indices)


def of_size(logits: torch.Tensor, size: int) -> torch.Tensor:
    """A draft model's logits [..., v] as [..., size]: -inf for tokens without a row of its own, without its padding."""
    missing = size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
