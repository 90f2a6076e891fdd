"""How likely a model finds a text."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from decoder.auditing import evaluating
from decoder.parts import cache_named, rounding_cache
from ts_eval.metrics.base import MeanOverTexts

_SCORED, _UNSCORED = 256, 1024  # tokens in a pass; logits of those that are scored take memory


@torch.inference_mode()
def perplexity(model: PreTrainedModel, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> float | None:
    """exp of the mean negative log-likelihood of ``token_ids`` after ``prompt_ids`` under the model itself.

    The plain distribution (Jelinek et al., 1977), without temperature, filters or penalty; every token sees all before
    it. Without a prompt the first token is not scored; None when none is. Under the model that wrote it, a low value
    is a mark of repetition rather than of quality (Holtzman et al., 2020).
    """
    text = [*prompt_ids, *token_ids]
    first, last = max(len(prompt_ids) - 1, 0), len(text) - 1
    count = last - first
    if count < 1:
        return None
    ids = torch.tensor([text], device=model.device)
    cache = rounding_cache(None, model)
    total = 0.0
    with evaluating(model):
        for start, end in pairwise([*range(0, first, _UNSCORED), *range(first, last, _SCORED), last]):
            scored = end - max(start, first)
            output = model(
                ids[:, start:end], **cache_named(model, cache), use_cache=True, logits_to_keep=max(1, scored)
            )
            if scored > 0:
                targets = ids[0, end - scored + 1 : end + 1]
                total += float(torch.nn.functional.cross_entropy(output.logits[0].double(), targets, reduction="sum"))
    return math.exp(total / count)


class Perplexity(MeanOverTexts):
    """Mean `perplexity` over texts, one text's token ids per update; `torchmetrics.text.Perplexity` takes logits."""

    higher_is_better = False

    def __init__(self, model: PreTrainedModel, **kwargs):
        super().__init__(**kwargs)
        # In a list: the metric shall neither move the model nor save it.
        self._model = [model]

    def measure(self, token_ids: Sequence[int]) -> float | None:
        return perplexity(self._model[0], token_ids)
