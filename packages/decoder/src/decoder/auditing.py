"""The audit of a finished generation: is every token the one that the model and the seed give?"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from decoder.backends.reference.mixers import has_two_forms, mixers_of
from decoder.cache.argument import cache_named
from decoder.cache.rounding import rounding_cache
from decoder.constraints.base import Vocabulary
from decoder.sampling.filters import first_argmax
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook, Sampler

if TYPE_CHECKING:
    from decoder.outputs import GenerationOutput

_CHUNK = 128  # tokens of a pass
_LARGEST_CHANGE = 1000.0  # of a logit difference, where the search for a margin ends
_MEASURED = 16  # tokens whose logits are computed in two ways, to see how far rounding moves them
_BEFORE = 240  # tokens before these
# A tie's margin in standard deviations of what rounding does to a logit between two passes of the plain model. Two
# logits move, and by more between its passes and a generation's: up to some three times as far was seen. What a tie can
# hide is then still less than what a wrong penalty changes.
_DEVIATIONS = 16


@dataclass(frozen=True)
class Audit:
    """The result of an audit: all tokens are equal, or which differ, and whether rounding alone can explain that.

    Attributes:
        checked: how many tokens were compared.
        index: the index in the output of the fault, or else of the first difference. It and the five fields below are
            None if there is none.
        token: the token of the generation there.
        expected: the token that scoring it again gives.
        token_score, expected_score: their scores, log-probability plus noise; -inf for a token that a filter drops.
        margin: by how much the difference of the two logits would have to change to give ``token``. For a
            floating-point tie this is of the order of rounding. Infinite if no change below 1,000 suffices.
        ties: the indices of all differences whose margin rounding can explain; the audit goes on behind them.
        fault: the index of the first difference that it cannot explain, where the audit ends; None if there is none.
        rounding: the largest margin of a tie, from how far the model's own logits move when they are computed in two
            ways (`rounding`); 0 if nothing differs.
    """

    checked: int
    index: int | None = None
    token: int | None = None
    expected: int | None = None
    token_score: float | None = None
    expected_score: float | None = None
    margin: float | None = None
    ties: tuple[int, ...] = ()
    fault: int | None = None
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        return self.index is None

    def __str__(self) -> str:
        if self.equal:
            return f"all {self.checked} tokens are the model's own choices"
        places = ", ".join(map(str, self.ties))
        ties = f"{len(self.ties)} of {self.checked} tokens are ties within rounding ({self.rounding:.1e}): {places}"
        if self.fault is None:
            return f"{ties}; all others are the model's own choices"
        scores = f"scores {self.token_score:.6f} and {self.expected_score:.6f}, margin {self.margin:.1e}"
        found = f"token {self.index} is {self.token}, scored again it is {self.expected} ({scores})"
        return f"{found}; before it {ties}" if self.ties else found


def audit(output: "GenerationOutput") -> Audit:
    """Score a finished generation again with the plain model, and recompute every choice from the seed.

    This distinguishes floating-point ties, whose margins are of the order of rounding, from faults.

    Raises:
        ValueError: the generation was verified independently, so its choices do not follow from the seed alone.
    """
    request = output.request
    if request.verification != "exact":
        raise ValueError(f"only exact verification can be audited, and this was {request.verification!r}")
    return audit_tokens(
        request.model,
        request.prompt_ids,
        output.token_ids,
        request.sampling,
        request.logits_hook,
        request.kv_dtype,
        request.vocabulary,
    )


@torch.inference_mode()
def audit_tokens(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    sampling: SamplingParams,
    logits_hook: LogitsHook | None = None,
    kv_dtype: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> Audit:
    """Score ``token_ids`` again by one teacher-forced pass of the plain model, and compare with the seed's choices.

    The pass is made in chunks, with the model's own attention and transformers' own cache: with the generation it
    shares only the weights, the sampler and, of a quantised cache (``kv_dtype``), the rounding. It goes on behind a
    tie, with the token of the text, and stops at the first difference that rounding cannot explain.
    """
    text = [*prompt_ids, *token_ids]
    ids = torch.tensor([text], device=model.device)
    cache = rounding_cache(kv_dtype, model)
    sampler: Sampler | None = None
    first = len(prompt_ids) - 1
    found, allowed = Audit(0), 0.0
    ties: list[int] = []
    with evaluating(model):
        for start, end in pairwise(_borders(model, len(prompt_ids), len(text) - 1)):
            rows = end - max(start, first)
            output = model(ids[:, start:end], **cache_named(model, cache), use_cache=True, logits_to_keep=max(1, rows))
            for position in range(max(start, first), end):
                logits = output.logits[0, position - end]
                sampler = sampler or Sampler(
                    sampling, len(logits), logits.device, prompt_ids, logits_hook, vocabulary=vocabulary
                )
                scores = sampler.scores(logits)
                expected, token = int(first_argmax(scores)), text[position + 1]
                if token != expected:
                    index, margin = position - first, _margin(sampler, logits, token, expected)
                    if not margin <= allowed:
                        # Rounding is not the same everywhere, so it is measured here, too.
                        allowed = max(allowed, rounding(model, text[: max(position + 1, _BEFORE)], kv_dtype))
                    fault = not margin <= allowed
                    if fault or not ties:
                        pair = (float(scores[token]), float(scores[expected]))
                        found = Audit(index + 1, index, token, expected, *pair, margin)
                    if fault:
                        return replace(found, ties=tuple(ties), fault=index, rounding=allowed)
                    ties.append(index)
                sampler.push(token)
    return replace(found, checked=len(token_ids), ties=tuple(ties), rounding=allowed)


def _borders(model: PreTrainedModel, prompt: int, count: int) -> list[int]:
    """Where an audit cuts a text of ``count`` tokens, both ends included, of which the first are a ``prompt``'s."""
    if not any(map(has_two_forms, mixers_of(list(model.modules())))):
        return [*range(0, count, _CHUNK), count]
    prompt = min(prompt, count)
    return [*range(0, prompt, _CHUNK), *range(prompt, count + 1)]


@torch.inference_mode()
def rounding(model: PreTrainedModel, token_ids: Sequence[int], kv_dtype: str | None = None) -> float:
    """How far rounding may move the difference of two of the model's logits.

    The logits behind the last 16 of ``token_ids`` (of 256 at most) are computed in one pass and token by token. What is
    returned is 16 times the standard deviation of their differences, of the token where it is largest; and no less than
    four times the spacing of floating-point numbers at the largest logit. Logits that are infinite, or stand for that,
    are left out. (A shift of all logits alike changes no choice.)
    """
    ids = torch.tensor([list(token_ids[-_BEFORE - _MEASURED :])], device=model.device)
    count = min(_MEASURED, ids.shape[1])
    with evaluating(model):
        at_once = model(
            ids, **cache_named(model, rounding_cache(kv_dtype, model)), use_cache=True, logits_to_keep=count
        ).logits[0]
        cache = rounding_cache(kv_dtype, model)
        borders = [0, *range(ids.shape[1] - count, ids.shape[1] + 1)]
        one_by_one = [
            model(ids[:, start:end], **cache_named(model, cache), use_cache=True, logits_to_keep=1).logits[0]
            for start, end in pairwise(borders)
            if end > start
        ]
    both = torch.stack((at_once, torch.cat(one_by_one[-count:]))).double()
    # Some models mark tokens that do not exist with the least number of their dtype.
    usual = (both.abs() < torch.finfo(at_once.dtype).max / 2).all(0).all(0)
    both = both[:, :, usual]
    if both.shape[-1] < 2:
        return 0.0
    mixers = mixers_of(list(model.modules()))
    # Where the two ways are two functions, their difference is not rounding.
    deviation = torch.zeros(()) if any(map(has_two_forms, mixers)) else (both[0] - both[1]).std(-1).amax()
    rounded_to = at_once.dtype
    if mixers and rounded_to == torch.float64:
        rounded_to = torch.float32  # in which recurrent layers keep their states in any case
    spacing = torch.finfo(rounded_to).eps * both.abs().amax()
    return _DEVIATIONS * float(torch.maximum(deviation, spacing / 4))


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """A block in which no module of the model is in training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        # Not `train()`: the user may have set the modules one by one.
        for module in training:
            module.training = True


def _margin(sampler: Sampler, logits: torch.Tensor, token: int, expected: int) -> float:
    """The least change of the difference of the two logits with which ``token`` is drawn, to one part in a million.

    The difference of their scores would not do: it is infinite if a filter drops one of them, however narrowly.
    """

    def drawn(change: float) -> bool:
        moved = logits.double().clone()
        moved[token] += change / 2
        moved[expected] -= change / 2
        return int(first_argmax(sampler.scores(moved))) == token

    high = 1e-12
    while not drawn(high):
        high *= 2
        if high > _LARGEST_CHANGE:
            return math.inf
    low = high / 2
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if drawn(middle) else (middle, high)
    return high
