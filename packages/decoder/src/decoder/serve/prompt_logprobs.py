"""Log-probabilities of prompts in the shapes of OpenAI's completions and of vLLM."""

from collections.abc import Sequence
from typing import Any

from decoder.prompt_scores import PromptLogprob
from decoder.text.tokens import TextOffsets, TokenTexts

_LEAST = -9999.0  # as in OpenAI's protocol, since JSON has no infinity

Scores = Sequence[PromptLogprob | None]


def of_completion(texts: TokenTexts, ids: Sequence[int], scores: Scores, most_likely: bool) -> dict[str, Any]:
    """Those of a prompt that is echoed, as its answer's ``logprobs`` begin."""
    places = TextOffsets(texts, [])
    offsets = [at for token in ids for at in places.next(token)] + places.rest()
    tops: list[dict[str, float] | None] = []
    for token, one in zip(ids, scores, strict=True):
        tops.append(None if one is None else texts.by_name(token, _logprob(one), one.top_logprobs))
    return {
        "tokens": [texts.name(token) for token in ids],
        "token_logprobs": [None if one is None else _logprob(one) for one in scores],
        "top_logprobs": tops if most_likely else None,
        "text_offset": offsets,
    }


def of_vllm(texts: TokenTexts, ids: Sequence[int], scores: Scores) -> list[dict[str, Any] | None]:
    """Those of ``prompt_logprobs``: of each token, and of the most likely ones in its place, by id."""

    def entry(token: int, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
        return str(token), {"logprob": logprob, "rank": rank, "decoded_token": texts.text(token)}

    told: list[dict[str, Any] | None] = []
    for token, one in zip(ids, scores, strict=True):
        if one is None:
            told.append(None)
            continue
        likely = [entry(other, value, rank) for rank, (other, value) in enumerate(one.top_logprobs, 1)]
        told.append(dict([*likely, entry(token, _logprob(one), one.rank)]))
    return told


def _logprob(one: PromptLogprob) -> float:
    return max(one.logprob, _LEAST)
