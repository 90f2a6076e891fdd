"""Tokens chosen by the native library: the same ones as `Sampler` defines, in a tenth of the time.

The library rules out, by noise in single precision, all tokens that cannot be the highest; that leaves one almost
always. Where it leaves several, the noise of these is computed as everywhere.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_double, c_float, c_int64
from dataclasses import fields
from functools import reduce

import numpy as np
import torch

from decoder.backends.native import library as native
from decoder.backends.native.structures import Sampling
from decoder.sampling.host_rows import in_float32
from decoder.sampling.noise import gumbel
from decoder.sampling.params import SamplingParams

IMPLEMENTED = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty", "penalty_window", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias"),
        *("suppress_tokens", "constraint", "bad_words", "min_tokens", "continued_tokens"),
        "include_stop_str_in_output",  # of the text, and not of its tokens
    }
)
"""The fields of `SamplingParams` that the library takes into account; its window and counts come with each call.

Tokens that are suppressed, or that constraint, bad words and min_tokens rule out, have logits of -inf already.
"""

_ROOM = 64  # tokens that may be left
_DTYPES = (torch.float32, torch.bfloat16)


class NativeChoice:
    """Chooses tokens as ``params`` say; see `native_choice` for where it can be had.

    Args:
        bias: what is added to logits, float64 [V]; None where nothing is.
    """

    def __init__(self, params: SamplingParams, bias: torch.Tensor | None = None):
        self._params, self._bias = params, bias
        self._biased = None if bias is None else bias.numpy() != 0
        self._own = self.choosing(not params.greedy)
        self._ids, self._scores = (c_int64 * _ROOM)(), (c_double * _ROOM)()
        self._sample_candidates = native.library().sample_candidates

    def choosing(
        self, do_sample: bool, penalised: torch.Tensor | None = None, counts: torch.Tensor | None = None
    ) -> Sampling:
        """What the library must know, for tokens with noise or without; ``penalised`` and ``counts`` as in `highest`.

        It is enough to rank drafts, and not for the target's tokens, see `_given`.
        """
        params = self._params
        return Sampling(
            penalised=_address(penalised),
            bias=_address(self._bias),
            counts=_address(counts),
            penalty=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            temperature=1.0 if params.greedy else params.temperature,
            **self._filters(),
            seed=params.seed % 2**64,
            do_sample=do_sample,
        )

    def _filters(self) -> dict[str, float]:
        """The fields of the filters; greedy decoding has none."""
        params = SamplingParams() if self._params.greedy else self._params
        log_min_p = math.log(params.min_p) if params.min_p else -math.inf
        return dict(top_k=params.top_k, top_p=params.top_p, log_min_p=log_min_p, eta=params.eta_cutoff)

    def highest(
        self, logits: torch.Tensor, position: int, penalised: torch.Tensor | None, counts: torch.Tensor | None = None
    ) -> tuple[int, float] | None:
        """The token drawn at a position, and its score, with noise or without.

        Args:
            logits: the target's [V].
            penalised: the tokens of the penalty window, bool [V]; None stands for an empty one.
            counts: how often the output has each token, int32 [V]; None where that changes nothing.

        Returns:
            None where the library leaves it to others: too many tokens are left, or some logits are no numbers.
        """
        if logits.dtype not in _DTYPES or not logits.is_contiguous():
            return None
        with self._given(penalised, counts):
            count = self._candidates(logits, position)
        if count < 1:
            return None
        return (self._ids[0], self._scores[0]) if count == 1 else self._best(self._scores[:count], position)

    @contextmanager
    def _given(self, penalised: torch.Tensor | None, counts: torch.Tensor | None) -> Iterator[None]:
        """A block in which the library knows of the tokens whose scores are their own."""
        own, parts = self._own, [] if self._biased is None else [self._biased]
        if penalised is not None:
            parts.append(penalised.numpy())
        if counts is not None:
            parts.append(counts.numpy() > 0)
        special = reduce(np.logical_or, parts) if parts else None
        own.penalised, own.counts = _address(penalised), _address(counts)
        own.special = None if special is None else special.ctypes.data
        try:
            yield
        finally:
            own.special = own.penalised = own.counts = None  # nobody holds these any more

    def highest_with_noise(self, scores: torch.Tensor, position: int) -> tuple[int, float] | None:
        """The token whose score [V], float64, plus noise is the highest, the first of equal ones, and that sum.

        It is for parameters that have nothing but a seed. None as for `highest`.
        """
        count = self._candidates(scores.float(), position)  # a rounding is less than what the library leaves room for
        return self._best(scores[self._ids[:count]].tolist(), position) if count > 0 else None

    def log_probabilities(
        self,
        logits: torch.Tensor,
        token: int,
        penalised: torch.Tensor | None,
        counts: torch.Tensor | None,
        most: int,
    ) -> tuple[float, list[tuple[int, float]]] | None:
        """What of the distribution is told: the log-probability of the token that `highest` has found in these logits.

        Returns:
            It, and the ``most`` likeliest tokens as (id, log-probability), without those that the filters drop. None
            where the library leaves it to others: it would take long to rank so many, or there is no memory.
        """
        if most > _ROOM:
            return None
        logprob, ids, values = c_double(), (c_int64 * _ROOM)(), (c_double * _ROOM)()
        is_bf16, vocab_size = logits.dtype == torch.bfloat16, len(logits)
        with self._given(penalised, counts):
            count = native.library().log_probabilities(
                byref(self._own), logits.data_ptr(), is_bf16, vocab_size, token, byref(logprob), most, ids, values
            )
        return None if count < 0 else (logprob.value, list(zip(ids[:count], values[:count], strict=True)))

    def _candidates(self, logits: torch.Tensor, position: int) -> int:
        """How many tokens are left, whose ids and scores are noted; fewer than one where the library cannot tell."""
        is_bf16, vocab_size = logits.dtype == torch.bfloat16, len(logits)
        return self._sample_candidates(
            byref(self._own), position, logits.data_ptr(), is_bf16, vocab_size, self._ids, self._scores, _ROOM
        )

    def _best(self, scores: Sequence[float], position: int) -> tuple[int, float]:
        """The best of the candidates with their noise, which have these scores."""
        ids = self._ids[: len(scores)]
        noise = gumbel(self._params.seed, torch.tensor([position]), torch.tensor(ids))[0].tolist()
        sums = [score + extra for score, extra in zip(scores, noise, strict=True)]
        best = max(range(len(sums)), key=sums.__getitem__)  # the first of equal ones
        return ids[best], sums[best]

    def best_drafts(
        self,
        logits: torch.Tensor,
        position: int,
        penalised: torch.Tensor | None,
        counts: torch.Tensor | None,
        do_sample: bool,
        width: int,
    ) -> list[tuple[int, float]]:
        """The best candidates for a position by a draft's logits [V], with their scores in single precision.

        Args:
            do_sample: whether scores hold the noise of the position.
            width: how many; there may be fewer, whose others have a score of -inf.
        """
        row = in_float32(logits)  # which is written over
        choosing, scores, tokens = self.choosing(do_sample, penalised, counts), (c_float * width)(), (c_int64 * width)()
        native.library().rank_drafts(
            byref(choosing), position, row.data_ptr(), len(row), width, byref(scores), byref(tokens)
        )
        return list(zip(tokens, scores, strict=True))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def native_choice(
    params: SamplingParams, device: torch.device, bias: torch.Tensor | None = None
) -> NativeChoice | None:
    """A choice by the library; None on other devices, and where a field it does not implement is not at its default."""
    others = [field for field in fields(params) if field.name not in IMPLEMENTED]
    plain = all(getattr(params, field.name) == field.default for field in others)
    return NativeChoice(params, bias) if plain and device.type == "cpu" else None


def no_choice(params: SamplingParams, bias: torch.Tensor | None = None) -> None:
    """No choice, whatever the parameters."""
    return None
