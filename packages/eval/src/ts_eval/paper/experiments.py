"""The paper's experiments (arXiv 2502.18890), as paper.yaml has them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ts_eval import defaults

K = 1024
PROMPT, NEW, LENGTHS = 4 * K, 100 * K, (20, 40, 60, 80, 100)
MODEL = "llama-3.1-8b"
"""Whose sampler is taken where none is named."""
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "eta_cutoff": 0.0}
_UNKNOWN = "_"

Figures = dict[str, list[float | None]]
"""Figure -> its values, one per length."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        method: as `ts-eval compare` takes it; None for what is not run.
        prompt_tokens, max_new_tokens, budget: at the paper's scale; budget None is the prompt's length.
        sampling: fields of `decoder.SamplingParams`.
        config: of computed experiments, the configuration's name.
        paper, std: the paper's figures and their standard deviations over 5 runs.
    """

    method: str | None
    prompt_tokens: int
    max_new_tokens: int
    budget: int | None
    sampling: dict[str, Any]
    config: str | None
    paper: Figures
    std: Figures


@dataclass(frozen=True)
class Trend:
    """What the paper's figures show at the end: ``figure`` of the row ``above`` is higher than of the row ``below``."""

    says: str
    figure: str
    above: str
    below: str


@dataclass(frozen=True)
class Target:
    """A table or figure of the paper.

    Args:
        figures: what is told per row and length: alpha, beta, x, ar_minutes, minutes, distinct1..4, distinct,
            loop_start, repeated_share; other names in computed experiments.
        at: new tokens at which it is told, at the paper's scale; () is the end of outputs that keep their length.
        trends: what should come out on another model, too.
        pages: also write pages of the texts, with the repeated spans marked.
        computed: the function of `configured` that computes the rows, which are then not run.
    """

    title: str
    figures: tuple[str, ...]
    rows: dict[str, Row]
    at: tuple[int, ...]
    trends: tuple[Trend, ...]
    note: str
    pages: bool
    computed: str | None

    @property
    def places(self) -> tuple[int, ...]:
        """Which of the lengths of its runs ``at`` are."""
        return tuple(LENGTHS.index(tokens // K) for tokens in self.at) or (0,)


@cache
def _content() -> dict:
    return yaml.safe_load((Path(__file__).parent / "paper.yaml").read_text(encoding="utf-8"))


@cache
def targets() -> dict[str, Target]:
    """The experiments by name, such as table-5."""
    return {name: _target(given) for name, given in _content()["experiments"].items()}


def sampler(model: str) -> dict[str, Any]:
    """Table 10's sampler of a model: every field of `decoder.SamplingParams` but the seed."""
    return {**defaults.SAMPLING, **_NEUTRAL, **_content()["samplers"][model]}


def sampler_for(model: str | None) -> dict[str, Any]:
    """The `sampler` of the paper's model that a folder, file or hub id is called after; Llama-3.1-8B's for others.

    Folders around it have no say; a config.json is called after its own.
    """
    path = Path(model or "").absolute()
    called = (path.parent if path.name == "config.json" else path).name.lower()
    known = [name for name in _content()["samplers"] if name in called]
    return sampler(known[0] if known else MODEL)


def _target(given: dict) -> Target:
    return Target(
        title=given["title"],
        figures=tuple(given["figures"]),
        rows={label: _row(row) for label, row in given["rows"].items()},
        at=tuple(length * K for length in given.get("at", LENGTHS)),
        trends=tuple(Trend(*trend) for trend in given.get("trends", ())),
        note=given.get("note", ""),
        pages=given.get("pages", False),
        computed=given.get("computed"),
    )


def _row(given: dict) -> Row:
    left = dict(given)
    named = left.pop("sampler", MODEL)
    row = {
        "method": left.pop("method", "tokenswift"),
        "prompt_tokens": left.pop("prompt", PROMPT),
        "max_new_tokens": left.pop("new", NEW),
        "budget": left.pop("budget", None),
        "sampling": {**sampler(named), **left.pop("sampling", {})},
        "config": left.pop("config", None),
    }
    paper: Figures = {}
    std: Figures = {}
    for names, cells in left.items():
        figures = re.sub(" std$", "", names)
        (paper if figures == names else std).update(_columns(figures, str(cells)))
    return Row(**row, paper=paper, std=std)


def _columns(names: str, cells: str) -> Figures:
    """What "alpha/x" and "0.42/1.36 0.42/1.42" say, by figure."""
    columns = zip(*(cell.split("/") for cell in cells.split()), strict=True)
    return {
        name: [None if value == _UNKNOWN else float(value) for value in column]
        for name, column in zip(names.split("/"), columns, strict=True)
    }
