"""The report's plots, as SVG whose colours follow the page."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ts_eval.commands.terminal import LONG_NAME
from ts_eval.comparing.summary import along_length, along_rows

POINTS = 40
MARKERS = "os^Dvp*X"
INK, GRID = "#010101", "#020202"
WIDTH, HEIGHT, LINE = 5.4, 3.3, 0.2
"""Of a figure without its legend, and of a line of text, in inches: small, as the page scales figures to its own width
and letters should be legible on a phone."""
LEGEND_LETTERS = 66
"""Letters that stand side by side in a line of the legend."""

PALETTE = {
    "light": ("#3b4252", "#c2410c", "#1d4ed8", "#15803d", "#a21caf", "#0e7490", "#92400e", "#be123c"),
    "dark": ("#d8dee9", "#fb923c", "#7aa2ff", "#4ade80", "#e879f9", "#22d3ee", "#fcd34d", "#fb7185"),
}
"""Colours of the methods, in their order, by the page's theme; a marker each tells them apart as well."""


@dataclass(frozen=True)
class Plot:
    """A title, what to say below, and how to draw: returns False when the results have nothing to show.

    ``grid`` is the axis of the values.
    """

    title: str
    caption: str
    draw: Callable[[Axes, dict], bool]
    grid: Literal["x", "y"] = "y"


def _series(place: int) -> str:
    return f"#0300{place % len(PALETTE['light']):02x}"


def _style(place: int, points: int) -> dict:
    # Behind the last colour they begin again, with dashes and other markers.
    again = place // len(PALETTE["light"])
    return {
        "color": _series(place),
        "linestyle": ("-", "--", ":")[again % 3],
        "marker": MARKERS[(place + 3 * again) % len(MARKERS)],
        "markersize": 4.5,
        "markevery": max(1, points // 8),
        "clip_on": False,
    }


def _fine(results: dict) -> dict[str, list[dict]]:
    """Per method, what `along_rows` tells at many marks."""
    length = max(record["new_tokens"] for row in results["methods"].values() for record in row["runs"])
    marks = sorted({length * part // POINTS for part in range(1, POINTS + 1)} - {0})
    fine = {
        name: [{"along_length": along_length(record, marks)} for record in row["runs"]]
        for name, row in results["methods"].items()
    }
    at_marks = [record["along_length"] for record in fine["ar"]]
    return {name: along_rows(records, at_marks) for name, records in fine.items()}


def _broken(name: str) -> str:
    """A method's name, its options on lines of their own."""
    return name.replace(":", "\n:")


def _legend(figure: Figure, axes: Axes) -> None:
    """The methods above the axes, in as many columns as there is room for; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [label if len(label) <= LONG_NAME else _broken(label) for label in labels]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, LEGEND_LETTERS // (longest + len("-o-  ")))
    lines = ceil(len(labels) / columns) + sum(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + lines * LINE)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)


def _line(axes: Axes, results: dict, name: str, label: str, most: float | None = None) -> bool:
    """Draw a figure along the length; lines that lie above ``most`` times ar's largest value are named, not drawn."""
    fine = _fine(results)
    lines = {
        place: (method, [(row["tokens"], row[name]) for row in rows if row[name] is not None])
        for place, (method, rows) in enumerate(fine.items())
    }
    top = None if most is None else most * max(row[name] for row in fine["ar"])
    for place, (method, known) in lines.items():
        values = [value for _, value in known]
        if not known:
            continue
        if top is not None and min(values) > top:
            axes.plot([], label=f"{method} ({values[-1]:,.1f}, above the plot)", **_style(place, 1))
        else:
            axes.plot(
                *zip(*known, strict=True), label=method, **_style(place, len(known)) | {"clip_on": top is not None}
            )
    axes.set_xlabel("new tokens")
    axes.set_ylabel(label)
    axes.set_ylim(0, None if top is None else min(top, axes.get_ylim()[1]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return True


def _latency(axes: Axes, results: dict) -> bool:
    return _line(axes, results, "ms_per_token", "ms per token", most=2)


def _speedup(axes: Axes, results: dict) -> bool:
    return _line(axes, results, "speedup", "speed-up over ar")


def _by_depth(axes: Axes, results: dict) -> bool:
    drawn = False
    for place, (method, row) in enumerate(results["methods"].items()):
        shares = row["acceptance_by_depth"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, label=method, **_style(place, len(shares)))
            drawn = True
    axes.set_xlabel("depth of the drafted token")
    axes.set_ylabel("share of steps that accepted it")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawn


def _memory(axes: Axes, results: dict) -> bool:
    rows = {
        name: (row["planned_memory_above_model_bytes"], row["memory_above_model_bytes"])
        for name, row in results["methods"].items()
        if row["memory_above_model_bytes"] is not None
    }
    for shift, (label, color, part) in enumerate((("plan", _series(2), 0), ("measured peak", _series(1), 1))):
        known = [(place, values[part] / 1e6) for place, values in enumerate(rows.values()) if values[part] is not None]
        if known:
            places, lengths = zip(*known, strict=True)
            axes.barh([place + 0.36 * shift - 0.18 for place in places], lengths, 0.33, label=label, color=color)
    # Names side by side would overlap.
    labels = list(map(_broken, rows))
    axes.set_yticks(range(len(rows)), labels)
    axes.margins(y=0.03)
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(4 * LINE + sum(max(2, 1 + label.count("\n")) for label in labels) * LINE)
    return bool(rows)


PLOTS = (
    Plot(
        "Latency along the length",
        "Median decode time per token up to that length; prefill is not counted. The plot ends at twice ar's time: "
        "slower methods are named with theirs.",
        _latency,
    ),
    Plot("Speed-up along the length", "Median over pairs of ar's time per token over the method's.", _speedup),
    Plot("Acceptance by depth", "How often a step accepted a drafted token that deep in its tree.", _by_depth),
    Plot(
        "Memory above the loaded model",
        "Plan: full cache, draft cache, tree and logits. Measured: the peak above what was held once all models were "
        "loaded and warm; on a GPU tensors, on a CPU the whole process, with activations and what the allocator keeps.",
        _memory,
        grid="x",
    ),
)


def draw(plot: Plot, results: dict) -> str | None:
    """The plot as an <svg> element, or None when there is nothing to show."""
    look = {
        "svg.fonttype": "none",
        "svg.hashsalt": plot.title,
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
    }
    with matplotlib.rc_context(look):
        drawn = figure_of(plot, results)
        if drawn is None:
            return None
        out = io.StringIO()
        drawn[0].savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _themed(out.getvalue())


def figure_of(plot: Plot, results: dict) -> tuple[Figure, Axes] | None:
    """The plot as matplotlib's, and its axes; None when there is nothing to show."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    if not plot.draw(axes, results):
        return None
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=plot.grid)
    axes.set_axisbelow(True)
    _legend(figure, axes)
    return figure, axes


def _themed(svg: str) -> str:
    """The bare element, as wide as the page lets it, its colours the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r"#0300([0-9a-f]{2})", lambda found: f"var(--s{int(found[1], 16)})", svg)
