"""The pages of `ts-eval reproduce`: what was found beside the paper's figures, and what agrees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from rich.console import RenderableType

from ts_eval.commands.terminal import Columns
from ts_eval.paper.experiments import Target, Trend
from ts_eval.report.table import NONE, count_of

QUANTILES = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23),
    *(2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09),
    *(2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)
"""Student's t, two-sided 5 %, for 1, 2, ... degrees of freedom; the last is taken for more, too (the limit is 1.96)."""
NAMES = {
    "ar_minutes": "ar min",
    "minutes": "min",
    "distinct": "Distinct",
    **{f"distinct{n}": f"Dist-{n}" for n in range(1, 5)},
    "loop_start": "loop at",
    "repeated_share": "repeated",
    "weights_gb": "weights GB",
    "load_ms": "load ms",
    "gigaflop": "GFLOP",
    "compute_ms": "compute ms",
    "kv_heads": "KV heads",
    "rope_theta": "rope theta",
    "parameters_m": "parameters, 2^20",
}
WHOLE = ("hidden", "intermediate", "layers", "heads", "kv_heads", "positions", "rope_theta", "vocabulary", "loop_start")
MINUTES = ("ar_minutes", "minutes")
TIMED = ("x", *MINUTES)

Values = dict[str, list[list[float | None]]]
"""Figure -> for each length the value of each text."""


@dataclass(frozen=True)
class Found:
    """What the texts of a row showed, or what is computed.

    Args:
        figures: its figures.
        work: digest of the texts and of the steps that made them; "" for what is computed.
        folder: of the comparison that made them, with others.
        about: that comparison in words.
        resumed: how many of the texts were cut and went on.
    """

    figures: Values
    work: str = ""
    folder: str = ""
    about: str = ""
    resumed: int = 0


def page(
    name: str,
    target: Target,
    scale: float,
    rows: Mapping[str, Found | None],
    lacking: Mapping[str, str],
    reports: Sequence[str],
) -> str:
    """The page of an experiment, in Markdown.

    Args:
        rows: what was found by label; None for what was not run.
        lacking: why some were not, by label.
        reports: folders of reports of the texts.
    """
    shown, same = coinciding(rows)
    parts = [f"## {name}: {target.title}", _about(target, scale, rows)]
    parts += [target.note.strip()] if target.note else []
    for header, lines in tables(target, scale, {label: rows[label] for label in shown}):
        rule = ["---", *["---:"] * (len(header) - 1)]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines)))
    for reason in dict.fromkeys(lacking.values()):
        left_out = ", ".join(label for label, why in lacking.items() if why == reason)
        parts.append(f"Not run: {left_out}, since {reason}.")
    if same:
        pairs = "; ".join(f"{label} is {of}" for label, of in same.items())
        parts.append(f"Rows with the same texts and steps at this scale are shown once: {pairs}.")
    cut = {label: row.resumed for label in shown if (row := rows[label]) is not None and row.resumed}
    if cut:
        told = ", ".join(f"{label} ({count_of(texts, 'text')})" for label, texts in cut.items())
        parts.append(f"Cut and resumed, with drafters that began anew there, so that acceptance may differ: {told}.")
    if target.trends:
        parts.append("\n".join(_verdicts(target, rows, same)))
    if reports:
        parts.append(f"The texts, repeated parts marked: {', '.join(f'{folder}/report.html' for folder in reports)}.")
    return "\n\n".join(parts) + "\n"


def _about(target: Target, scale: float, rows: Mapping[str, Found | None]) -> str:
    """What was run, and how its figures are to be read."""
    if target.computed is not None:
        return "In brackets the paper's figures."
    first = next((row for row in rows.values() if row is not None), None)
    texts = len(first.figures[target.figures[0]][0]) if first is not None else 0
    spread = (
        f", ± the standard deviation over {count_of(texts, 'text')} (the paper's: over 5 runs)" if texts > 1 else ""
    )
    timed = [NAMES.get(figure, figure) for figure in target.figures if figure in TIMED]
    about = f"; first row: {first.about}" if first is not None else ""
    words = f"Scale {scale:g}{about}. In brackets the paper's figures, on a larger model and at scale 1{spread}."
    if timed:
        told = ", ".join(timed)
        words += (
            f" What is timed ({told}) holds for this machine, with all else that ran on it; the rest comes out again, "
            "acceptance where no text is cut."
        )
    return words


def coinciding(rows: Mapping[str, Found | None]) -> tuple[list[str], dict[str, str]]:
    """The labels to show, and of the others which of these has the same texts, made by the same steps."""
    shown: dict[tuple[str, str] | str, str] = {}
    same = {}
    for label, row in rows.items():
        key = label if row is None or not row.work else (row.folder, row.work)
        if shown.setdefault(key, label) != label:
            same[label] = shown[key]
    return list(shown.values()), same


def tables(target: Target, scale: float, rows: Mapping[str, Found | None]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and lines of a table per figure over the lengths, or of one of all figures where there is one length."""
    names = [NAMES.get(figure, figure) for figure in target.figures]
    if len(target.places) == 1:
        columns = [[(figure, 0) for figure in target.figures]]
        headers = [["row", *names]]
    else:
        lengths = [f"{round(tokens * scale):,}" for tokens in target.at]
        columns = [[(figure, column) for column in range(len(lengths))] for figure in target.figures]
        headers = [[f"{name} at", *lengths] for name in names]
    return [
        (header, [[label, *(_cell(target, label, row, *column) for column in each)] for label, row in rows.items()])
        for header, each in zip(headers, columns, strict=True)
    ]


def _cell(target: Target, label: str, row: Found | None, figure: str, column: int) -> str:
    paper, std = (
        figures.get(figure, [])[column : column + 1] for figures in (target.rows[label].paper, target.rows[label].std)
    )
    found = [] if row is None else row.figures[figure][target.places[column]]
    values = [value for value in found if value is not None]
    digits = 0 if figure in WHOLE else 2
    ours = 3 if figure in MINUTES else digits
    shown = _with_spread(fmean(values), stdev(values) if len(values) > 1 else None, ours) if values else NONE
    if not paper or paper[0] is None:
        return shown
    return f"{shown} ({_with_spread(paper[0], std[0] if std else None, digits)})"


def _with_spread(mean: float, std: float | None, digits: int) -> str:
    return f"{mean:,.{digits}f}" + ("" if std is None else f"±{std:,.{digits}f}")


def _verdicts(target: Target, rows: Mapping[str, Found | None], same: Mapping[str, str]) -> list[str]:
    """A line for each trend, of the rows that are shown; once for those of the same rows."""
    told: dict[tuple[str, str, str], Trend] = {}
    for trend in target.trends:
        above, below = (same.get(row, row) for row in (trend.above, trend.below))
        told.setdefault((above, below, trend.figure), replace(trend, above=above, below=below))
    return [
        f"- {trend.says}: "
        + ("the same texts and steps here" if trend.above == trend.below else verdict(*_at_end(target, rows, trend)))
        for trend in told.values()
    ]


def _at_end(target: Target, rows: Mapping[str, Found | None], trend: Trend) -> tuple[list, list]:
    above, below = rows[trend.above], rows[trend.below]
    if above is None or below is None:
        return [], []
    return above.figures[trend.figure][target.places[-1]], below.figures[trend.figure][target.places[-1]]


def verdict(above: Sequence[float | None], below: Sequence[float | None]) -> str:
    """Whether the one is higher than the other, text for text of the same prompts and seeds.

    The mean difference must be beyond Student's t (two-sided, 5 %) times its standard error.
    """
    pairs = [(a, b) for a, b in zip(above, below, strict=True) if a is not None and b is not None]
    if not pairs:
        return "not measured"
    means = " and ".join(f"{fmean(column):.3f}" for column in zip(*pairs, strict=True))
    if len(pairs) == 1:
        return f"one text does not tell ({means})"
    differences = [a - b for a, b in pairs]
    difference, error = fmean(differences), stdev(differences) / sqrt(len(differences))
    word = "agrees" if difference > 0 else "does not agree"
    if abs(difference) <= QUANTILES[min(len(pairs) - 1, len(QUANTILES)) - 1] * error or not difference:
        word = "no difference"
    return f"{word} ({means}; difference {difference:+.3f}, standard error {error:.3f})"


def on_terminal(page: str) -> list[RenderableType]:
    """A page with its tables set for the terminal."""
    parts: list[RenderableType] = []
    for block in page.strip().split("\n\n"):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        parts.append(Columns(cells[0], cells[2:]) if block.startswith("|") else block)
    return parts
