"""`ts-eval reproduce`: an experiment of the paper on a given model, beside the paper's figures."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from decoder.options import PAPER_NGRAMS, PAPER_TREE
from ts_eval import defaults
from ts_eval.compare import compare
from ts_eval.paper import TARGETS, Cell, Target
from ts_eval.report import write_report
from ts_eval.results import write_text
from ts_eval.table import NONE, describe
from ts_eval.terminal import Columns

SHORTEST = 16
NAMES = {
    "ar_minutes": "ar min",
    "minutes": "min",
    "distinct": "Distinct",
    **{f"distinct{n}": f"Dist-{n}" for n in range(1, 5)},
    "loop_start": "loop at",
    "repeated_share": "repeated",
}


def reproduce(
    name: str, scale: float, output: Path, say: Callable[[str], None] = lambda sentence: None, **settings
) -> str:
    """Run the grid of `paper.TARGETS` [name], each cell into a folder below ``output``, and compare with the paper.

    Finished cells, and parts of others, are taken over. Returns the page, which is written to ``output/NAME.md``.

    Args:
        scale: of prompt and output lengths and with them the partial cache; 1 is the paper's. Samplers and penalty
            windows stay as they are.
        settings: fields of `compare.Experiment`: the model, its heads, prompts, device, runs, seed, ...

    Raises:
        ValueError: an unknown target, or a scale that leaves its first length fewer than 16 tokens; else as
            `compare.Experiment`.
    """
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}: choose from {', '.join(TARGETS)}")
    target = TARGETS[name]
    least = SHORTEST / target.at[0] if target.at else 0.0
    if not scale > 0 or scale < least:
        raise ValueError(f"scale must be at least {max(least, 1e-6):.2g} for {name}, not {scale:g}")
    figures: dict[str, dict[str, list[float | None]]] = {}
    about = ""
    for number, cell in enumerate(target.cells, 1):
        say(f"{name}: {cell.name} ({number} of {len(target.cells)})")
        folder = output / (target.grid or name) / cell.name
        results = compare(tuple(cell.rows.values()), say=say, output=folder, **_scaled(target, cell, scale), **settings)
        about = about or describe(results)
        for label, method in cell.rows.items():
            figures[label] = _figures(target, results, method)
        if target.pages:
            write_report(folder)
    page = _page(name, target, scale, about, figures)
    write_text(output / f"{name}.md", page)
    return page


def _scaled(target: Target, cell: Cell, scale: float) -> dict:
    def length(tokens: int) -> int:
        return max(SHORTEST, round(tokens * scale))

    new = length(cell.max_new_tokens) if target.scaled else cell.max_new_tokens
    return {
        "prompt_tokens": length(cell.prompt_tokens),
        "max_new_tokens": new,
        "marks": [min(length(mark), new) for mark in target.at] or [new],
        "sampling": {**defaults.SAMPLING, **cell.sampling},
        "options": {"tree": PAPER_TREE, "ngrams": PAPER_NGRAMS},
    }


def _figures(target: Target, results: dict, method: str) -> dict[str, list[float | None]]:
    """What the target tells of a row, per length."""
    row, ar = results["methods"][method], results["methods"]["ar"]

    def minutes(mark: dict) -> float:
        return mark["ms_per_token"] * mark["tokens"] / 60_000

    def distinct(n: str, mark: dict, at_ar: dict) -> float:
        return row["distinct"][n]

    readers: dict[str, Callable[[dict, dict], Any]] = {
        "alpha": lambda mark, at_ar: mark["acceptance_rate"],
        "beta": lambda mark, at_ar: mark["ngram_acceptance_rate"],
        "x": lambda mark, at_ar: mark["speedup"],
        "ar_minutes": lambda mark, at_ar: minutes(at_ar),
        "minutes": lambda mark, at_ar: minutes(mark),
        "distinct": lambda mark, at_ar: row["distinct"]["mean"],
        **{f"distinct{n}": partial(distinct, str(n)) for n in range(1, 5)},
        "loop_start": lambda mark, at_ar: row["loop_start"],
        "repeated_share": lambda mark, at_ar: row["repeated_share"],
    }
    marks = list(zip(row["along_length"], ar["along_length"], strict=True))
    return {name: [readers[name](*mark) for mark in marks] for name in target.figures}


def _page(name: str, target: Target, scale: float, about: str, figures: dict) -> str:
    header, rows = comparison(target, scale, figures)
    lines = ["| " + " | ".join(line) + " |" for line in (header, ["---", *["---:"] * (len(header) - 1)], *rows)]
    parts = [
        f"## {name}: {target.title}",
        f"Scale {scale:g}; the first comparison: {about}.",
        "In brackets the paper's figures, on a larger model and at scale 1.",
        "\n".join(lines),
    ]
    if target.trends:
        parts.append("\n".join(f"- {says}: {verdict}" for says, verdict in trends(target, figures)))
    return "\n\n".join(parts) + "\n"


def comparison(target: Target, scale: float, figures: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: every figure at every length, the paper's in brackets behind it."""
    lengths = [max(SHORTEST, round(mark * scale)) for mark in target.at]
    single = len(lengths) < 2
    count = max(len(lengths), 1)
    header = ["row"]
    for place in range(count):
        header += [NAMES.get(f, f) + ("" if single else f" at {lengths[place]:,}") for f in target.figures]
    rows = []
    for label, found in figures.items():
        cells = [label]
        for place in range(count):
            for figure in target.figures:
                paper = target.paper.get(label, {}).get(figure)
                cells.append(_cell(found[figure][place], None if paper is None else paper[place]))
        rows.append(cells)
    return header, rows


def _cell(value: float | None, paper: float | None) -> str:
    shown = NONE if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
    return shown if paper is None else f"{shown} ({paper:,.2f})" if paper < 1000 else f"{shown} ({paper:,.0f})"


def trends(target: Target, figures: dict) -> list[tuple[str, str]]:
    """What the paper's figures show, and whether these do, at the last length."""
    found = []
    for trend in target.trends:
        above, below = (figures[row][trend.figure][-1] for row in (trend.above, trend.below))
        if above is None or below is None:
            verdict = "not measured"
        else:
            shown = (f"{above:.2f}", f"{below:.2f}")
            word = "no difference" if shown[0] == shown[1] else "agrees" if above > below else "does not agree"
            verdict = f"{word} ({' and '.join(shown)})"
        found.append((trend.says, verdict))
    return found


def on_terminal(page: str) -> list[RenderableType]:
    """A page of `reproduce` with its table set for the terminal."""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [Columns(table[0], table[2:]) if part[0] == "|" else part for part in page.strip().split("\n\n")]
