"""The time of a whole long text, computed from what its steps were measured to cost along the length."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ts_eval.comparing.method_spec import MethodSpec
from ts_eval.measuring.stopwatch import PARTS
from ts_eval.planning.plan import METHODS


@dataclass(frozen=True)
class Assumption:
    """That a method's steps bring ``tokens`` tokens on average, verifying trees of ``nodes`` nodes."""

    tokens: float
    nodes: int


def read_assumptions(given: Sequence[str], specs: Sequence[MethodSpec]) -> dict[str, Assumption]:
    """Row -> assumption, from METHOD=TOKENS@NODES each. Raises ValueError for what does not read so or cannot be."""
    by_text, found = {spec.text: spec for spec in specs}, {}
    for entry in given:
        row, _, numbers = entry.rpartition("=")
        try:
            tokens, nodes = numbers.split("@")
            assumption = Assumption(float(tokens), int(nodes))
        except ValueError as error:
            raise ValueError(
                f"--tokens-per-step takes METHOD=TOKENS@NODES, such as medusa=2.5@24, not {entry}"
            ) from error
        if row not in by_text:
            raise ValueError(f"--tokens-per-step {entry}: {row!r} is none of the rows {', '.join(by_text)}")
        name = by_text[row].name
        if name in ("ar", "auto") or name not in METHODS:
            reason = "has one token per step" if name == "ar" else "makes another tree in every step"
            raise ValueError(f"--tokens-per-step {entry}: {name} {reason}; name a method that drafts a fixed tree")
        if not 1 <= assumption.tokens <= assumption.nodes:
            raise ValueError(f"--tokens-per-step {entry}: a step brings at least 1 token and no more than it has nodes")
        found[row] = assumption
    return found


def mean_along(points: Sequence[tuple[int, float]], end: int) -> float:
    """Mean from 0 to ``end`` of what was measured at some lengths: straight between them, level before and behind."""
    points = sorted(points)
    level = [(0, points[0][1]), *((length, value) for length, value in points if length), (end, points[-1][1])]
    area = 0.0
    for (left, at_left), (right, at_right) in pairwise(level):
        if left >= end:
            break
        if right > end:
            right, at_right = end, at_left + (end - left) / (right - left) * (at_right - at_left)
        area += (right - left) * (at_left + at_right) / 2
    return area / end


def computed(lengths: Sequence[dict], methods: dict[str, dict], assumptions: dict[str, Assumption]) -> dict:
    """The time to generate as many tokens as the longest of ``lengths``, from an empty text, with ar and others.

    A step of ar takes what its token was measured to take at the length it has come to. A step of another method takes
    the verification of so many nodes there, and besides it what its generations took besides theirs, timed part by
    part: drafting, sampling and the rest, at the prompt's length.
    """
    tokens = lengths[-1]["length"]
    ar = mean_along([(row["length"], row["ar"]["ms_per_token"]["median"]) for row in lengths], tokens)
    rows = {"ar": {"tokens_per_step": 1.0, "nodes": 1, "pass_ms": ar, "besides_ms": 0.0}}
    for name, assumption in assumptions.items():
        verified = [
            (row["length"], next(cell["ms"]["median"] for cell in row["verify"] if cell["width"] == assumption.nodes))
            for row in lengths
        ]
        shares, step = methods[name]["shares"], methods[name]["watched_step_ms"]["median"]
        rows[name] = {
            "tokens_per_step": assumption.tokens,
            "nodes": assumption.nodes,
            "pass_ms": mean_along(verified, tokens),
            "besides_ms": step * sum(shares[part]["median"] for part in PARTS if part != "verify"),
        }
    for row in rows.values():
        row["steps"] = tokens / row["tokens_per_step"]
        row["seconds"] = row["steps"] * (row["pass_ms"] + row["besides_ms"]) / 1000
        row["speedup"] = rows["ar"]["seconds"] / row["seconds"]
    return {"tokens": tokens, "methods": rows}
