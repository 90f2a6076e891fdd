"""Whether an engine samples from the model's distribution: its first tokens over many seeds, by a chi-square test."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import decoder
from decoder.parts import Sampler

SAID = 16
"""Tokens of the prompt of the draws that are said once; then some are said again, so that all drafts have a source."""
NEW_TOKENS = 6
"""Of a draw. The first two are tested; more are asked for, since drafts are cut to what is left of a text."""
EXPECTED = 5.0
"""How often an outcome should at least be expected to have a cell of its own, as is usual for Pearson's test."""
FALSE_ALARM = 1e-3
"""The odds that a table of exact engines has an alarm: each test is made at this, over the number of tests."""

Logits = Callable[[Sequence[int]], torch.Tensor]
"""Of a text: float [vocabulary] behind it."""


def draw_prompt(text: Sequence[int], model, sampling: "decoder.SamplingParams") -> list[int]:
    """The first `SAID` tokens of ``text`` and, again, so many of them that the two that follow are likeliest by half.

    A bias for drafted tokens, which are those two, changes such probabilities most.
    """
    said = list(text[:SAID])
    with torch.inference_mode():
        logits = model(torch.tensor([said + said], device=model.device)).logits[0]
    likely = [float(probabilities(logits[len(said) + place - 1], sampling)[said[place]]) for place in range(len(said))]

    def distance(again: int) -> float:
        return sum(abs(share - 0.5) for share in likely[again : again + 2])

    return said + said[: min(range(1, max(2, len(said) - 1)), key=distance)]


def probabilities(
    logits: torch.Tensor, sampling: "decoder.SamplingParams", temperature_last: bool = False
) -> torch.Tensor:
    """float64 [vocabulary], after the filters. Temperature comes before these, or behind them as in llama.cpp."""

    def filtered(params: "decoder.SamplingParams") -> torch.Tensor:
        return Sampler(params, len(logits), logits.device, []).filtered(logits)

    if not temperature_last:
        return filtered(sampling).softmax(-1)
    return (filtered(replace(sampling, temperature=1.0)) / sampling.temperature).softmax(-1)


def expected_shares(
    prompt: Sequence[int],
    draws: int,
    logits: Logits,
    sampling: "decoder.SamplingParams",
    temperature_last: bool = False,
) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """The probabilities of first tokens, and of pairs of first and second ones; rare outcomes are left out."""
    enough = EXPECTED / draws

    def likely(text: Sequence[int], least: float) -> dict[int, float]:
        shares = probabilities(logits(text), sampling, temperature_last)
        return {int(token): float(shares[token]) for token in (shares >= least).nonzero().flatten()}

    first = likely(prompt, enough)
    pairs = {
        (one, two): share * next_share
        for one, share in first.items()
        for two, next_share in likely([*prompt, one], enough / share).items()
    }
    return first, pairs


def chi_square(observed: Counter, shares: Mapping[Any, float]) -> dict | None:
    """Pearson's test of counts against probabilities: its statistic, degrees of freedom and p.

    Outcomes that are expected fewer than `EXPECTED` times, and those that ``shares`` leaves out, are counted together.
    None where one outcome is all there is.
    """
    draws = observed.total()
    cells = {outcome: draws * share for outcome, share in shares.items() if draws * share >= EXPECTED}
    counted = [(observed[outcome], expected) for outcome, expected in sorted(cells.items(), key=lambda cell: cell[1])]
    rest = (draws - sum(count for count, _ in counted), max(0.0, draws - sum(cells.values())))
    if counted and rest[1] < EXPECTED:
        # Together with the rarest, so that a filter's border, which rounding moves, decides nothing.
        counted[0] = (counted[0][0] + rest[0], counted[0][1] + rest[1])
    else:
        counted.append(rest)
    degrees = len(counted) - 1
    if not degrees:
        return None
    statistic = sum((count - expected) ** 2 / expected for count, expected in counted)
    p = torch.special.gammaincc(
        torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    )
    return {"statistic": statistic, "degrees": degrees, "p": float(p)}
