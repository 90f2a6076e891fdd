"""The checks of a comparison: how far a difference is from a tie, and each text scored again by the plain model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import decoder
from decoder.auditing import audit_tokens, rounding
from ts_eval.comparing.method_spec import MethodSpec

if TYPE_CHECKING:
    from ts_eval.comparing.setup import Setup

# How far apart two differently shaped matrix products may put two logits, where results do not say what was measured,
# by the model's dtype: a few units in the last place of a logit of magnitude 16 to 32 in the short formats, and the
# contract's 1e-4 in float32. Products with weights of four bits are rounded to bfloat16.
TIE_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5, "int4": 0.5, "int8": 0.5}

_MEASURED = 4  # prompts


def divergence_margin(
    model,
    context: Sequence[int],
    token: int,
    other: int,
    params: "decoder.SamplingParams",
    kv_dtype: str | None = None,
) -> float | None:
    """How far two tokens are from a tie: the least change of two logits' difference that would draw either one.

    The decoder's audit scores each of them after ``context`` [n] by the plain model. One of them is mostly its choice
    and needs no change. None when no change below 1,000 brings one of them about.
    """
    scored = [audit_tokens(model, context, [choice], params, kv_dtype=kv_dtype) for choice in (token, other)]
    margin = max(found.margin or 0.0 for found in scored)
    return margin if margin < float("inf") else None


def audit_of(
    model, prompt: Sequence[int], record: dict, params: "decoder.SamplingParams", kv_dtype: str | None = None
) -> dict:
    """The decoder's audit of a finished generation, to its end.

    It has the number of tokens ``checked``, ``index`` and ``margin`` of the first that differs, the indices of all
    ``ties``, and the index of a ``fault``, a difference that rounding cannot explain.
    """
    found = audit_tokens(model, prompt, record["token_ids"], params, kv_dtype=kv_dtype)
    margin = None if found.margin is None or found.margin == float("inf") else found.margin
    return {
        "checked": found.checked,
        "index": found.index,
        "margin": margin,
        "ties": list(found.ties),
        "fault": found.fault,
    }


def audits(setup: "Setup", rows: dict[str, dict]) -> None:
    """Add to every row of ours the ``audits`` of its generations; a text that is ar's is scored once."""
    made: dict[tuple, dict] = {}
    for spec in setup.specs:
        if spec.is_outside:
            continue
        row = rows[spec.text]
        row["audits"] = []
        for record in row["runs"]:
            key = record["prompt_index"], record["run"], tuple(record["token_ids"])
            if key not in made:
                prompt = setup.prompts[record["prompt_index"]].token_ids
                made[key] = audit_of(setup.model, prompt, record, setup.params[record["run"]], setup.kv_dtype)
            row["audits"].append(made[key])


def tie_tolerance(setup: "Setup") -> float:
    """How far apart rounding may put two logits of the model: the most that is seen behind the prompts."""
    return max(rounding(setup.model, prompt.token_ids, setup.kv_dtype) for prompt in setup.prompts[:_MEASURED])


def is_tie(margin: float | None, settings: dict) -> bool:
    """Whether rounding alone can explain a difference of that margin: as measured, else by `TIE_TOLERANCE`."""
    allowed = settings.get("tie_tolerance") or TIE_TOLERANCE[settings["dtype"]]
    return margin is not None and margin <= allowed


def differing(rows: dict[str, dict]) -> bool:
    """Whether any row's text is not ar's."""
    return any(row["identical_to_ar"] is False for row in rows.values())


def differs(results: dict) -> list[str]:
    """Rows that differ from ar other than by an audited tie, or whose audit found a fault.

    Where logits are the same bits in every pass, no tie excuses a row of ours, and log-probabilities must be ar's, too.
    """
    settings = results["settings"]
    bitwise = settings.get("bitwise", False)

    def faulty(audit: dict) -> bool:
        if "fault" in audit:
            return audit["fault"] is not None
        return audit["index"] is not None and not is_tie(audit["margin"], settings)

    return [
        name
        for name, row in results["methods"].items()
        if (
            row["identical_to_ar"] is False
            and not (is_tie(row["divergence_margin"], settings) and not (bitwise and not MethodSpec.parse(name).is_hf))
        )
        or (bitwise and row["logprobs_equal"] is False)
        or any(map(faulty, row.get("audits", ())))
    ]
