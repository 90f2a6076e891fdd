"""Penalty and filters: pure functions on logits, the same for every method, on one row or many."""

import math

import torch

from decoder.sampling.params import SamplingParams


def penalise(logits: torch.Tensor, in_window: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty (paper section 3.5): ``logits`` [..., V] where ``in_window`` [V] bool, / or * ``penalty``.

    Positive ones are divided and the others multiplied, which is the smaller result of the two; below 1 the greater.
    """
    worse = torch.minimum if penalty > 1 else torch.maximum
    return torch.where(in_window, worse(logits / penalty, logits * penalty), logits)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k highest logits of each row; equal ones with the smaller token id first."""
    if k >= logits.shape[-1]:
        return logits
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return logits.scatter(-1, order[..., k:], -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the most probable tokens until their mass reaches p; at least one, equal ones with the smaller id first."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    drop = mass_before >= p
    drop[..., :1].fill_(False)
    return ranked.masked_fill(drop, -torch.inf).gather(-1, order.argsort(-1))


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Drop tokens with probability below min_p times the highest one's; their ratio needs no normalisation."""
    floor = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < floor, -torch.inf)


def keep_eta(logits: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Eta sampling (Hewitt et al., 2022): drop p < min(eps, sqrt(eps) * exp(-entropy)); the best token stays."""
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).nan_to_num(nan=0.0).sum(-1, keepdim=True)
    eta = torch.minimum(torch.full_like(entropy, epsilon), epsilon**0.5 * (-entropy).exp())
    drop = (probabilities < eta) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -torch.inf)


def process_logits(logits: torch.Tensor, params: SamplingParams, in_window: torch.Tensor | None) -> torch.Tensor:
    """The filtered, unnormalised log-probabilities of each row [..., V], -inf where a filter dropped; dtype is kept.

    ``in_window`` [..., V] bool marks the tokens of the penalty window; None stands for an empty window.
    """
    if in_window is not None and params.repetition_penalty != 1:
        logits = penalise(logits, in_window, params.repetition_penalty)
    if params.greedy:
        return logits
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.top_k:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    if params.min_p:
        logits = keep_min_p(logits, params.min_p)
    if params.eta_cutoff:
        logits = keep_eta(logits, params.eta_cutoff)
    return logits


def first_argmax(scores: torch.Tensor, best: torch.Tensor | None = None) -> torch.Tensor:
    """Index of the highest score of each row of [..., V]; of equal ones the smallest, which torch does not promise.

    The last one where scores are NaN. ``best`` [..., 1] are the highest scores, where they are known already.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    best = scores.amax(-1, keepdim=True) if best is None else best
    return torch.where(scores == best, ids, ids[-1]).amin(-1)
