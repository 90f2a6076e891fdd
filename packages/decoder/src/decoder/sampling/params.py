"""The sampling parameters that the user gives: one immutable, validated record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from decoder.checks import fault, shown
from decoder.constraints.base import Constraint

_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's logits; names and meanings as in transformers and vLLM.

    The order is fixed: tokens that may not follow (by the constraint, suppressed, bad words, ends before min_tokens),
    logit_bias, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p, eta, each on the
    renormalised rest of the one before.

    Under a constraint each token is drawn from the model's distribution over the tokens that may follow. The text as a
    whole does not have the law of the model's texts among those that hold to the constraint: a beginning is as likely
    as the model thinks it is, however unlikely all that may follow it.

    Args:
        temperature: divides the logits; 0 is greedy (the highest penalised logit, no noise).
        top_k: keep the k most probable tokens; 0 switches off.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 switches off.
        min_p: drop tokens less probable than min_p times the most probable one; 0 switches off.
        eta_cutoff: drop tokens with p < min(eta_cutoff, sqrt(eta_cutoff) * exp(-entropy)); 0 switches off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the window; 1 switches off.
        penalty_window: how many of the last tokens, prompt included, count as the window.
        seed: the noise is a pure function of (seed, position, token id).
        suppress_tokens: ids that are never chosen, as in transformers.
        presence_penalty: is subtracted from the logits of tokens that the output has; the prompt does not count.
        frequency_penalty: is subtracted once for each time that the output has the token.
        logit_bias: what is added to the logits of tokens, by id; a mapping, kept as pairs.
        min_tokens: how many tokens the output has at least before one may end it; less where the constraint ends it.
        bad_words: what the output must not have: texts, or their token ids. Of each the last token is ruled out behind
            the others; texts are tokenised with and without a space in front.
        include_stop_str_in_output: whether a stop string that ends a text is part of it.
        constraint: what the output must be, of `decoder.constraints` or of your own.
        continued_tokens: how many of the prompt's last tokens are an output that goes on: where the constraint begins,
            and what the two penalties and min_tokens count.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    penalty_window: int = 1024
    seed: int = 0
    suppress_tokens: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    min_tokens: int = 0
    bad_words: Sequence[str | Sequence[int]] = ()
    include_stop_str_in_output: bool = False
    constraint: Constraint | None = None
    continued_tokens: int = 0

    def __post_init__(self) -> None:
        if not _are_ids(self.suppress_tokens):
            raise ValueError(f"suppress_tokens must be token ids of at least 0, not {shown(self.suppress_tokens)}")
        object.__setattr__(self, "suppress_tokens", tuple(self.suppress_tokens))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        if self.constraint is not None:
            _check_constraint(self.constraint)
        if not isinstance(self.include_stop_str_in_output, bool):
            words = shown(self.include_stop_str_in_output)
            raise ValueError(f"include_stop_str_in_output must be true or false, not {words}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_THEIR_OWN:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"{field.name} must be a number, not {shown(value)}")
            if words := fault(value):
                raise ValueError(f"{field.name} {words}")
            if isinstance(field.default, float):
                # PyTorch takes no integer of more than 64 bits.
                object.__setattr__(self, field.name, float(value))
        ranges = {
            "temperature": (
                self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < float("inf"),
                "0, or at least 1e-6 and finite",
            ),
            "top_k": (0 <= self.top_k < 2**63, "at least 0 and below 2**63"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "eta_cutoff": (0 <= self.eta_cutoff < 1, "at least 0 and below 1"),
            "repetition_penalty": (1e-3 <= self.repetition_penalty <= 1e3, "between 0.001 and 1,000"),
            "penalty_window": (0 <= self.penalty_window < 2**63, "at least 0 and below 2**63"),
            "seed": (0 <= self.seed < 2**63, "at least 0 and below 2**63"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "between -2 and 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            "min_tokens": (self.min_tokens >= 0, "at least 0"),
            "continued_tokens": (self.continued_tokens >= 0, "at least 0"),
        }
        for name in ("top_k", "penalty_window", "seed", "min_tokens", "continued_tokens"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} must be an integer, not {shown(getattr(self, name))}")
        for name, (fits, words) in ranges.items():
            if not fits:
                raise ValueError(f"{name} must be {words}, not {shown(getattr(self, name))}")

    @property
    def window(self) -> int:
        """The size of the penalty window; 0 when the penalty is switched off."""
        return self.penalty_window if self.repetition_penalty != 1 else 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def counts_output(self) -> bool:
        """Whether it matters how often the output has a token."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def restricts(self) -> bool:
        """Whether which tokens may follow depends on the text."""
        return self.constraint is not None or bool(self.bad_words) or bool(self.min_tokens)

    def for_weak_drafts(self) -> "SamplingParams":
        """How to rank what draft heads predict: they know less than the model, so their ranks are less certain.

        A penalty or min-p that is right for the model's own logits rules out too much where the logits are a guess.
        Measured on text that SmolLM2's heads and the reference model's had not seen (temperature 1, min-p 0.1, penalty
        1.2): the token drawn is among the first four ranked so in 1.08 and 1.05 times as many positions, and the first
        in 1.06 and 0.98. A temperature a little lower makes up for the lower min-p. Other filters stay.
        """
        cooler = max(0.85 * self.temperature, _LEAST_TEMPERATURE)
        return replace(
            self,
            temperature=cooler if self.min_p and not self.greedy else self.temperature,
            min_p=self.min_p**1.5,
            repetition_penalty=self.repetition_penalty**0.7,
        )


# Fields that are no numbers.
_OF_THEIR_OWN = frozenset({"suppress_tokens", "logit_bias", "bad_words", "include_stop_str_in_output", "constraint"})
_LARGEST_BIAS = 100.0  # as in vLLM and OpenAI's protocol


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and all(type(token) is int and token >= 0 for token in value)


def _bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    """The biases as pairs, which can be hashed, in the order of their ids."""
    try:
        pairs = dict(value or ()).items()
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must be a mapping of token ids to numbers, not {shown(value)}") from None
    for token, number in pairs:
        if type(token) is not int or token < 0:
            raise ValueError(f"logit_bias must be by token ids of at least 0, not {shown(token)}")
        if type(number) not in (int, float) or not -_LARGEST_BIAS <= number <= _LARGEST_BIAS:
            raise ValueError(f"logit_bias must be between -100 and 100, not {shown(number)} (token {token})")
    return tuple(sorted((token, float(number)) for token, number in pairs)) or None


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not whole or not all((isinstance(one, str) and one.strip()) or (one and _are_ids(one)) for one in value):
        raise ValueError(f"bad_words must be texts, or their token ids, that are not empty, not {shown(value)}")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value)


def _check_constraint(constraint: Any) -> None:
    if not isinstance(constraint, Constraint):
        raise ValueError(
            f"constraint must be one of decoder.constraints or have its method start, not {shown(constraint)}"
        )
    try:
        hash(constraint)
    except TypeError:
        raise ValueError(f"constraint must be hashable, which {type(constraint).__name__} is not") from None
