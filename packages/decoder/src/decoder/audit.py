"""The audit of a finished generation: is every token the one that the model and the seed give?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, PreTrainedModel

from decoder.sampling.filters import first_argmax
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook, Sampler

if TYPE_CHECKING:
    from decoder.outputs import GenerationOutput

_CHUNK = 128  # tokens of a pass
_LARGEST_CHANGE = 1000.0  # of a logit difference, where the search for a margin ends


@dataclass(frozen=True)
class Audit:
    """The result of an audit: all tokens are equal, or which is the first that differs.

    Attributes:
        checked: how many tokens were compared, the differing one included.
        index: the index in the output of the first difference. It and the fields below are None if there is none.
        token: the token of the generation there.
        expected: the token that scoring it again gives.
        token_score, expected_score: their scores, log-probability plus noise; -inf for a token that a filter drops.
        margin: by how much the difference of the two logits would have to change to give ``token``. For a
            floating-point tie this is of the order of rounding. Infinite if no change below 1,000 suffices.
    """

    checked: int
    index: int | None = None
    token: int | None = None
    expected: int | None = None
    token_score: float | None = None
    expected_score: float | None = None
    margin: float | None = None

    @property
    def equal(self) -> bool:
        return self.index is None

    def __str__(self) -> str:
        if self.equal:
            return f"all {self.checked} tokens are the model's own choices"
        scores = f"scores {self.token_score:.6f} and {self.expected_score:.6f}, margin {self.margin:.1e}"
        return f"token {self.index} is {self.token}, scored again it is {self.expected} ({scores})"


def audit(output: "GenerationOutput") -> Audit:
    """Score a finished generation again with the plain model, and recompute every choice from the seed.

    This distinguishes a floating-point tie, whose margin is of the order of rounding, from a fault.

    Raises:
        ValueError: the generation was verified independently, so its choices do not follow from the seed alone.
    """
    request = output.request
    if request.verification != "exact":
        raise ValueError(f"only exact verification can be audited, and this was {request.verification!r}")
    return audit_tokens(request.model, request.prompt_ids, output.token_ids, request.sampling, request.logits_hook)


@torch.inference_mode()
def audit_tokens(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    sampling: SamplingParams,
    logits_hook: LogitsHook | None = None,
) -> Audit:
    """Score ``token_ids`` again by one teacher-forced pass of the plain model, and compare with the seed's choices.

    The pass is made in chunks, with the model's own attention and transformers' own cache: it shares only the weights
    and the sampler with the generation. It stops at the first difference, since the texts differ from there on.
    """
    text = [*prompt_ids, *token_ids]
    ids = torch.tensor([text], device=model.device)
    cache = DynamicCache(config=model.config)
    sampler: Sampler | None = None
    first = len(prompt_ids) - 1
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for start in range(0, len(text) - 1, _CHUNK):
            end = min(start + _CHUNK, len(text) - 1)
            rows = end - max(start, first)
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=max(1, rows))
            for position in range(max(start, first), end):
                logits = output.logits[0, position - end]
                sampler = sampler or Sampler(sampling, len(logits), logits.device, prompt_ids, logits_hook)
                scores = sampler.scores(logits)
                expected, token = int(first_argmax(scores)), text[position + 1]
                if token != expected:
                    index = position - first
                    pair = (float(scores[token]), float(scores[expected]))
                    return Audit(index + 1, index, token, expected, *pair, _margin(sampler, logits, token, expected))
                sampler.push(token)
    finally:
        # Not `train()`: the user may have set the modules one by one.
        for module in training:
            module.training = True
    return Audit(len(token_ids))


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
