"""Positions behind a model's trained length, by YaRN (Peng et al., 2023, arXiv:2309.00071)."""

import math
from typing import Any

from transformers import PreTrainedConfig


def stretch(config: PreTrainedConfig, factor: float | None) -> None:
    """Let a model attend over ``factor`` times its trained length; None leaves its configuration as it is.

    Angles of the slow frequencies become ``factor`` times smaller and those of the fast ones stay, with a ramp between,
    as transformers computes them. This changes all logits, those of short texts too: it is another model.

    Raises:
        ValueError: the factor is no number above 1, or the model has no plain rotary embeddings or no trained length.
    """
    if factor is None:
        return
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < math.inf:
        raise ValueError(f"yarn must be a number above 1, not {factor!r}: the trained length is multiplied by it")
    rotary: Any = getattr(config, "rope_parameters", None)
    length = getattr(config, "max_position_embeddings", None)
    kind = rotary.get("rope_type", "default") if isinstance(rotary, dict) else None
    if kind not in (None, "default"):
        raise ValueError(f"its rotary embeddings are scaled already ({kind}): leave out yarn")
    if kind is None or "rope_theta" not in rotary or not length:
        raise ValueError("yarn is for models with one kind of rotary embeddings and a trained length: leave it out")
    config.rope_parameters = rotary | {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": length,
    }
    config.max_position_embeddings = int(length * factor)
