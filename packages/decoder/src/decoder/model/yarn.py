"""Positions behind a model's trained length: by YaRN (arXiv:2309.00071), or its own factors (arXiv:2402.13753)."""

import math
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"


def stretch(config: PreTrainedConfig, factor: float | None) -> None:
    """Let a model attend over ``factor`` times its trained length; None leaves its configuration as it is.

    Angles of the slow frequencies become ``factor`` times smaller and those of the fast ones stay, with a ramp between,
    as transformers computes them. This changes all logits, those of short texts too: it is another model. A model that
    has factors of its own for long texts, see `take_one_set`, takes these.

    Raises:
        ValueError: the factor is no number above 1, or the model has no plain rotary embeddings or no trained length.
    """
    if factor is None or _sets(config) is not None:
        return
    _check(factor)
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


def take_one_set(config: PreTrainedConfig, factor: float | None) -> None:
    """Of a model with LongRoPE's two sets of factors, for short texts and for long ones, take one for all texts.

    transformers goes from the first to the second where a text outgrows the trained length, so that keys in the cache
    go stale. Here a text of up to that length is had with the first set, as by transformers. With a ``factor`` it is
    the second, for all texts, up to ``factor`` times that length. Other models stay as they are.

    Raises:
        ValueError: the factor is no number above 1, or the model was not made for so long texts.
    """
    rotary = _sets(config)
    if rotary is None:
        return
    if rotary["short_factor"] == rotary["long_factor"]:
        if factor is not None:
            raise ValueError(f"its rotary embeddings are scaled already ({LONGROPE}): leave out yarn")
        return
    trained = rotary["original_max_position_embeddings"]
    most = config.max_position_embeddings / trained
    if factor is not None:
        _check(factor)
        if factor > most:
            raise ValueError(f"yarn must be at most {most:g}, not {factor:g}: beyond it the model has no factors")
    # Of the lengths as its makers give them.
    scaling = ROPE_INIT_FUNCTIONS[LONGROPE](config, torch.device("cpu"))[1]
    chosen = rotary["short_factor" if factor is None else "long_factor"]
    one_set = {"short_factor": chosen, "long_factor": chosen, "attention_factor": scaling, "factor": most}
    config.rope_parameters = rotary | one_set
    config.max_position_embeddings = int(trained * (factor or min(1.0, most)))


def hint_for_longer(config: PreTrainedConfig) -> str:
    """What to do for longer texts, in words behind an error; "" where there is nothing."""
    rotary = _sets(config)
    if rotary is None:
        return ""
    most = rotary["original_max_position_embeddings"] * rotary.get("factor", 1.0)
    if most <= config.max_position_embeddings:
        return ""
    return f", or load the model with yarn (--yarn) of up to {rotary['factor']:g} for {most:,.0f} positions"


def changes_with_length(config: PreTrainedConfig) -> bool:
    """Whether a model has two sets of factors still."""
    rotary = _sets(config)
    return rotary is None or rotary["short_factor"] != rotary["long_factor"]


def _sets(config: PreTrainedConfig) -> dict[str, Any] | None:
    """LongRoPE's parameters, of a model that has them for all layers."""
    rotary: Any = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict) or rotary.get("rope_type") != LONGROPE or "long_factor" not in rotary:
        return None
    # What stands beside them in configurations of before.
    trained = rotary.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0)
    return rotary | {"original_max_position_embeddings": trained} if trained and "short_factor" in rotary else None


def _check(factor: Any) -> None:
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < math.inf:
        raise ValueError(f"yarn must be a number above 1, not {factor!r}: the trained length is multiplied by it")
