"""`ts-eval reproduce`: experiments of the paper on a given model, beside the paper's figures.

Rows whose prompts, lengths and sampling are equal share a comparison with ar, whichever experiments they belong to, so
each text is generated once.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from decoder.options import MIN_BUDGET, PAPER_NGRAMS, PAPER_TREE
from ts_eval.compare import compare
from ts_eval.comparing.asked import Say, silent
from ts_eval.comparing.decoders import Sources
from ts_eval.comparing.method_spec import MethodSpec
from ts_eval.comparing.results import write_text
from ts_eval.paper import configured
from ts_eval.paper.experiments import LENGTHS, K, Row, Target, targets
from ts_eval.paper.reproduced_page import Found, Values, page
from ts_eval.report import write_report
from ts_eval.report.table import describe, sampling_in_words

SHORTEST = 16
DISTINCT = tuple(f"distinct{n}" for n in ("1", "2", "3", "4", ""))
FIGURES = ("alpha", "beta", "x", "ar_minutes", "minutes", *DISTINCT, "loop_start", "repeated_share")


@dataclass(frozen=True)
class Cell:
    """What the texts of one comparison have in common, at the scale they are run at."""

    scale: float
    prompt_tokens: int
    marks: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]

    @property
    def folder(self) -> str:
        """Its name, by all that makes up a cell."""
        tokens = f"{self.prompt_tokens} and {self.marks[-1]} tokens"
        words = f"texts/{in_words(self.scale)} {tokens} {sampling_in_words(dict(self.sampling))}"
        return re.sub(r"[^\w./]+", "-", words.replace(",", ""))


def reproduce(names: Sequence[str], scale: float, output: Path, say: Say = silent, **settings) -> Iterator[str]:
    """Run experiments of `paper.targets`, and yield each one's page, which is written to ``output`` as `page_name`.

    Texts lie in folders below ``output/texts``; finished ones, and parts of others, are taken over from there.

    Args:
        scale: of prompt and output lengths and with them the partial cache; 1 is the paper's. Samplers and penalty
            windows stay as they are.
        settings: fields of `compare.Experiment`: the model, its heads, prompts, device, runs, seed, ... Rows whose
            heads or draft model are missing are left out, and the page says so.

    Raises:
        ValueError: an unknown name, or a scale that is infinite or leaves a first length fewer than 16 tokens; else as
            `compare.Experiment`.
    """
    chosen = {name: _target(name, scale) for name in dict.fromkeys(names)}
    methods: dict[Cell, dict[str, None]] = {}
    for target in chosen.values():
        for row in _run_rows(target).values():
            methods.setdefault(cell_of(row, target, scale), {})[method_of(row, scale)] = None
    lacking = _lacking(list(dict.fromkeys(method for each in methods.values() for method in each)), settings)
    methods = {cell: {method: None for method in each if method not in lacking} for cell, each in methods.items()}
    found: dict[Cell, dict[str, Found]] = {}
    for name, target in chosen.items():
        for number, (label, row) in enumerate(_run_rows(target).items(), 1):
            cell = cell_of(row, target, scale)
            if cell not in found and methods[cell]:
                say(f"{name}: {label} ({number} of {len(target.rows)})")
                found[cell] = _run(cell, tuple(methods[cell]), output, say, settings)
        rows = {label: _found(target, row, scale, found, settings) for label, row in target.rows.items()}
        folders = list(dict.fromkeys(row.folder for row in rows.values() if row is not None)) if target.pages else []
        for folder in folders:
            write_report(output / folder)
        reasons = {label: lacking.get(method_of(row, scale)) for label, row in _run_rows(target).items()}
        text = page(name, target, scale, rows, {label: why for label, why in reasons.items() if why}, folders)
        write_text(output / page_name(name, scale), text)
        yield text


def in_words(scale: float) -> str:
    """A scale as the names of pages and folders tell it: scale-0.005; two scales never share one."""
    return f"scale-{float(scale)!r}".removesuffix(".0")


def page_name(name: str, scale: float) -> str:
    """The file of an experiment's page: table-3-scale-0.005.md; of a computed one, which has no scale, table-2.md."""
    return f"{name}.md" if targets()[name].computed else f"{name}-{in_words(scale)}.md"


def _target(name: str, scale: float) -> Target:
    if name not in targets():
        raise ValueError(f"unknown target {name!r}: choose from {', '.join(targets())}")
    target = targets()[name]
    least = SHORTEST / target.at[0] if target.at else 1e-6
    if not least <= scale < inf:
        raise ValueError(f"scale must be finite and at least {least:.2g} for {name}, not {scale:g}")
    return target


def _run_rows(target: Target) -> dict[str, Row]:
    return {} if target.computed else {label: row for label, row in target.rows.items() if row.method is not None}


def _lacking(methods: Sequence[str], settings: dict) -> dict[str, str]:
    """The methods whose heads or draft model are missing, and the reason; ValueError when none is left."""
    specs = [MethodSpec.parse(method) for method in methods]
    given = (settings.get("model"), settings.get("heads") or (), settings.get("draft_model"), settings.get("data_dir"))
    lacking = Sources.find(specs, *given).lacking(specs)
    if specs and len(lacking) == len(specs):
        raise ValueError(lacking[specs[0].text])
    return lacking


def method_of(row: Row, scale: float) -> str:
    """The row's method, its cache scaled."""
    return row.method if row.budget is None else f"{row.method}:budget={max(MIN_BUDGET, round(row.budget * scale))}"


def cell_of(row: Row, target: Target, scale: float) -> Cell:
    """The comparison that has a row's texts; a penalty window beyond the text's length is cut to it."""
    prompt_tokens = max(SHORTEST, round(row.prompt_tokens * scale))
    # Every experiment of scaled length is told at the same marks, so that they share their texts.
    marks = tuple(round(mark * K * scale) for mark in LENGTHS) if target.at else (row.max_new_tokens,)
    window = min(row.sampling["penalty_window"], prompt_tokens + marks[-1])
    return Cell(scale, prompt_tokens, marks, tuple({**row.sampling, "penalty_window": window}.items()))


def _run(cell: Cell, methods: tuple[str, ...], output: Path, say: Say, settings: dict) -> dict[str, Found]:
    results = compare(
        methods,
        say=say,
        output=output / cell.folder,
        extend=True,
        prompt_tokens=cell.prompt_tokens,
        max_new_tokens=cell.marks[-1],
        marks=cell.marks,
        sampling=dict(cell.sampling),
        options={"tree": PAPER_TREE, "ngrams": PAPER_NGRAMS},
        **settings,
    )
    references, about = results["methods"]["ar"]["runs"], describe(results)
    return {
        method: Found(
            figures_of(row["runs"], references, len(cell.marks)),
            hashlib.sha256(str([_work(text) for text in row["runs"]]).encode()).hexdigest(),
            cell.folder,
            about,
            row["resumed"],
        )
        for method, row in results["methods"].items()
    }


def _found(target: Target, row: Row, scale: float, found: dict[Cell, dict[str, Found]], settings: dict) -> Found | None:
    """What a row showed or is computed to be; None for one that has neither."""
    if target.computed is not None:
        figures = getattr(configured, target.computed)(row.config, settings)
        return None if figures is None else Found({name: [[value]] for name, value in figures.items()})
    of_cell = found.get(cell_of(row, target, scale), {})
    return None if row.method is None else of_cell.get(method_of(row, scale))


def _work(text: dict) -> list:
    return [text[name] for name in ("token_ids", "step_tokens", "step_accepted", "step_ngram_accepted", "nodes")]


def figures_of(texts: Sequence[dict], references: Sequence[dict], marks: int) -> Values:
    """The `FIGURES` of texts at so many marks, ``references`` being ar's of the same prompts and runs."""

    def read(name: str, text: dict, reference: dict, place: int) -> float | None:
        # A chat's answer may end before.
        ended = place >= min(len(text["along_length"]), len(reference["along_length"]))
        return None if ended else _figure(name, text, text["along_length"][place], reference["along_length"][place])

    pairs = list(zip(texts, references, strict=True))
    return {name: [[read(name, *pair, place) for pair in pairs] for place in range(marks)] for name in FIGURES}


def _figure(name: str, text: dict, mark: dict, reference: dict) -> float | None:
    taken, ar = mark["ms_per_token"], reference["ms_per_token"]
    match name:
        case "alpha":
            return mark["acceptance_rate"]
        case "beta":
            return mark["ngram_acceptance_rate"]
        case "x":
            return ar / taken if ar and taken else None
        case "ar_minutes" | "minutes":
            each = ar if name == "ar_minutes" else taken
            return each * mark["tokens"] / 60_000 if each else None
        case "loop_start" | "repeated_share":
            return text[name]
    return text["distinct"][name.removeprefix("distinct") or "mean"]
