"""What `ts-eval bench` shows: tables for the terminal, and a plot."""

import textwrap
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Group, RenderableType

from ts_eval.commands.terminal import Columns, indented
from ts_eval.measuring.stopwatch import FORWARDS, PARTS
from ts_eval.report.plots import MARKERS, PALETTE
from ts_eval.report.table import NONE, count_of, drafts_in_words, number, sampling_in_words, times

COLOURS = PALETTE["light"]


def tables(results: dict) -> list[RenderableType]:
    """All figures, the medians of the rounds, with the smallest and largest where they matter."""
    return [
        describe(results),
        small(results),
        Columns(*plain_table(results)),
        Columns(*pass_table(results)),
        Columns(*steps_table(results)),
        *([whole_text(results)] if results["computed"] else []),
        notes(results),
    ]


def whole_text(results: dict) -> Group:
    """The time of a whole text per method, with the arithmetic it comes from."""
    made = results["computed"]
    ar, tokens = made["methods"]["ar"], f"{made['tokens']:,}"
    lines: list[RenderableType] = [f"Computed, not measured: {tokens} tokens from an empty text"]
    for name, row in made["methods"].items():
        if row is ar:
            how = f"{tokens} steps x {row['pass_ms']:,.2f} ms"
        else:
            how = f"{tokens} / {row['tokens_per_step']:g} = {row['steps']:,.0f} steps x ({row['pass_ms']:,.2f} ms to "
            how += f"verify {row['nodes']:,} + {row['besides_ms']:,.2f} ms besides)"
        time = f"{row['seconds']:,.1f} s ({row['seconds'] / 60:,.1f} min)"
        speedup = "" if row is ar else f", {times(row['speedup'])} ar"
        lines.append(indented(f"{name}: {how} = {time}{speedup}"))
    return Group(*lines)


def describe(results: dict) -> str:
    """What was measured, where and how, in one sentence of parts."""
    settings, environment = results["settings"], results["environment"]
    options = settings["options_for_all"]
    return "; ".join(
        [
            settings["model"].rstrip("/").rpartition("/")[2]
            + (", random weights" if settings["random_weights"] else ""),
            f"{environment['device_name']} ({environment['device']}), {count_of(environment['threads'], 'thread')}",
            settings["dtype"],
            sampling_in_words(settings["sampling"]),
            f"{drafts_in_words(options)} where the method names no other",
            f"medians of {count_of(settings['repeats'], 'interleaved round')}",
        ]
    )


def small(results: dict) -> str:
    """What is less than a pass."""
    sampling = results["sampling"]
    found = [f"sampling {ranged(sampling['choose_ms'], 3)} ms per token"]
    found += [f"draft scoring {ranged(sampling['score_ms'], 3)} ms per level"]
    found += [f"a level of {heads['kind']} heads {ranged(heads['level_ms'], 3)} ms" for heads in results["heads"]]
    return "; ".join(found)


def plain_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: plain decoding per length, and the memory's floor."""
    ar, floor, read = ("ar ms/token", "range", "tokens/s"), ("floor ms", "of copy"), ("read GB/s", "of read")
    header = ["text", *ar, "MB read", "copy GB/s", "range", *floor, *read]
    rows = [
        [
            f"{row['length']:,}",
            number(row["ar"]["ms_per_token"]["median"]),
            extremes(row["ar"]["ms_per_token"]),
            number(row["ar"]["tokens_per_second"], 1),
            number(row["ar"]["bytes_read"] / 1e6, 1),
            number(row["bandwidth"]["copy"]["median"], 1),
            extremes(row["bandwidth"]["copy"], 1),
            number(row["ar"]["floor_ms"]["copy"]),
            percent(row["ar"]["bandwidth_share"]["copy"]),
            number(row["bandwidth"]["read"]["median"], 1),
            percent(row["ar"]["bandwidth_share"]["read"]),
        ]
        for row in results["lengths"]
    ]
    return header, rows


def pass_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a pass's milliseconds per length, and how many passes of one node that is."""
    lengths = results["lengths"]
    header = ["pass", *chain.from_iterable((f"ms at {row['length']:,}", "range", "x one") for row in lengths)]
    names = [f"verify {width:,}" for width in results["settings"]["widths"]]
    passes = [[*row["verify"], row["draft"]] for row in lengths]
    rows = []
    for name, found in zip([*names, "draft"], zip(*passes, strict=True), strict=True):
        cells = ((number(cell["ms"]["median"]), extremes(cell["ms"]), times(cell["times_plain"])) for cell in found)
        rows.append([name, *chain.from_iterable(cells)])
    return header, rows


def steps_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a method's step and the shares of its parts."""
    header = ["method", "ms/step", "range", "tok/step", "tokens/s", *PARTS, "bookkeeping", "range"]
    traced = any(row["host_overhead"] for row in results["methods"].values())
    # What is accepted of drafts by random weights means nothing.
    judged = {name for name in results["methods"] if name == "ar" or not results["settings"]["random_weights"]}
    rows = [
        [
            name,
            number(row["step_ms"]["median"]),
            extremes(row["step_ms"]),
            number(row["tokens_per_step"] if name in judged else None),
            number(row["tokens_per_second"] if name in judged else None, 1),
            *(percent(row["shares"][part]["median"]) for part in PARTS),
            percent(row["bookkeeping"]["median"]),
            f"{100 * row['bookkeeping']['min']:.0f}-{percent(row['bookkeeping']['max'], 0)}",
            *([*overhead(row)] if traced else []),
        ]
        for name, row in results["methods"].items()
    ]
    return [*header, *(["host overhead", "range"] if traced else [])], rows


def overhead(row: dict) -> tuple[str, str]:
    """The share of a step in which the device had nothing to do, and its range."""
    found = row["host_overhead"]
    if found is None:
        return NONE, NONE
    return percent(found["median"]), f"{100 * found['min']:.1f}-{percent(found['max'])}"


def notes(results: dict) -> str:
    """How the tables are to be read."""
    settings = results["settings"]
    slots = ", ".join(f"{row['draft']['slots']:,}" for row in results["lengths"])
    sentences = [
        "Texts of the given lengths are not prefilled: their cache holds the prompt's pairs over and over.",
        "Floor: the time to read weights and cache once at the speed of a large copy, bytes read and written both "
        "counted; of copy, of read: how fast ar reads them as a share of that copy's, of a large sum's speed; what "
        "the processor's caches hold can be faster.",
        "x one: times a pass of one node over the same text, the median over rounds; draft: TokenSwift's pass over a "
        f"partial cache of {slots} slots.",
        f"Steps are those of {count_of(settings['new_tokens'], 'token')} behind {settings['prompt_tokens']:,} of "
        f"{settings['prompt_name']!r}, prefill not counted, and the shares of steps timed part by part: verify and "
        "draft are model forwards; bookkeeping is scoring of drafts, sampling and the rest.",
    ]
    if any(row["host_overhead"] for row in results["methods"].values()):
        sentences.append(
            "Host overhead: the share of a step in which the device had nothing to do, from a trace of its operations, "
            "a launched graph counted as one."
        )
    if settings["random_weights"]:
        sentences.append(
            "Weights are random: costs are real, but what is accepted means nothing, and no method is judged by it."
        )
    if results["computed"]:
        sentences.append(
            "Computed times take tokens per step and nodes as given, passes along the length on straight lines between "
            "the lengths measured, and what else a step takes from the generations, timed part by part."
        )
    return " ".join(sentences)


def plot(results: dict, path: Path) -> None:
    """Draw verification by width and length, and the parts of a step. Raises OSError when it cannot be written."""
    look = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(14, 4.6), layout="constrained")
        cost, relative, parts = figure.subplots(1, 3)
        _verifications(cost, results, lambda cell: cell["ms"]["median"])
        for place, row in enumerate(results["lengths"]):
            widths = [cell["width"] for cell in row["verify"]]
            ends = ([cell["ms"][end] for cell in row["verify"]] for end in ("min", "max"))
            cost.fill_between(widths, *ends, color=COLOURS[place % len(COLOURS)], alpha=0.2, linewidth=0)
        cost.set_ylabel("ms per verification, median and range")
        cost.set_yscale("log")
        cost.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        cost.yaxis.set_major_formatter("{x:g}")
        cost.yaxis.set_minor_locator(NullLocator())
        cost.set_title("Verification")
        cost.legend(title="tokens of text", frameon=False)
        _verifications(relative, results, lambda cell: cell["times_plain"])
        relative.set_ylabel("passes of one node")
        relative.set_ylim(bottom=0)
        relative.set_title("Verification against plain decoding")
        _steps(parts, results)
        figure.suptitle(textwrap.fill(describe(results), 160), fontsize=9)
        figure.savefig(path, dpi=130)


def _verifications(axes: Axes, results: dict, value) -> None:
    for place, row in enumerate(results["lengths"]):
        look: dict[str, Any] = {
            "color": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 4.5,
        }
        widths = [cell["width"] for cell in row["verify"]]
        axes.plot(widths, [value(cell) for cell in row["verify"]], label=f"{row['length']:,}", **look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("nodes")
    axes.grid(axis="y", linewidth=0.4)


def _steps(axes: Axes, results: dict) -> None:
    """A bar per method, as long as its unwatched step, cut into the shares of its parts."""
    names = list(results["methods"])
    left = [0.0] * len(names)
    for place, part in enumerate(PARTS):
        lengths = [row["shares"][part]["median"] * row["step_ms"]["median"] for row in results["methods"].values()]
        hatch = None if part in FORWARDS else "///"
        axes.barh(
            names, lengths, left=left, label=part, color=COLOURS[place], hatch=hatch, edgecolor="white", height=0.7
        )
        left = [end + length for end, length in zip(left, lengths, strict=True)]
    for number_, row in enumerate(results["methods"].values()):
        axes.text(left[number_], number_, f" {percent(row['bookkeeping']['median'])}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms per step; behind it bookkeeping's share (hatched)")
    axes.set_title("Parts of a step")
    axes.grid(axis="x", linewidth=0.4)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.13), ncols=len(PARTS), frameon=False, columnspacing=1.2)


def ranged(figure: dict, digits: int) -> str:
    """A median with its smallest and largest value in brackets."""
    return f"{number(figure['median'], digits)} ({extremes(figure, digits)})"


def extremes(figure: dict, digits: int = 2) -> str:
    """Smallest and largest value: 1.07-1.27."""
    return f"{number(figure['min'], digits)}-{number(figure['max'], digits)}"


def percent(share: float, digits: int = 1) -> str:
    """A share as 11.3%."""
    return f"{100 * share:.{digits}f}%"
