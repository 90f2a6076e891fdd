"""`ts-eval report`: a finished comparison as one self-contained page, as Markdown and as CSV."""

import csv
import io
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from ts_eval.comparing.results import write_text
from ts_eval.report import plots
from ts_eval.report.headline import MARKS, cards
from ts_eval.report.table import (
    NONE,
    acceptance_table,
    describe,
    distinct_table,
    length_table,
    notes,
    remarks,
    speed_table,
    speedups_table,
    text_table,
    title_of,
)
from ts_eval.report.texts import coloured_texts

TABLES: dict[str, Callable[[dict], tuple[list, list]]] = {
    "Speed, acceptance, identity": partial(speed_table, distinct=False),
    "Milliseconds per token along the length": partial(length_table, speedups=False),
    "Speed-up along the length": speedups_table,
    "Acceptance": acceptance_table,
    "Distinct-n": distinct_table,
    "Texts": text_table,
}


def write_report(folder: Path) -> list[Path]:
    """Write report.html, report.md and report.csv into ``folder``, from its results.json; returns their paths.

    Raises:
        OSError: there are no results, or the reports cannot be written.
        ValueError: the results are not of this version.
    """
    results = read_results(folder)
    pages = {"report.html": html(results), "report.md": markdown(results), "report.csv": table_of_all(results)}
    for name, page in pages.items():
        write_text(folder / name, page)
    return [folder / name for name in pages]


def read_results(folder: Path) -> dict:
    """The content of a folder's results.json; raises as `write_report`."""
    path = folder / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no results.json: `ts-eval compare ... --output {folder}` writes it")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        complete = all("speedup_interval" in row and row["runs"] for row in results["methods"].values())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of ts-eval compare") from error
    if not complete:
        raise ValueError(f"{path} was written by another version of ts-eval: run its compare command again")
    return results


def html(results: dict) -> str:
    """One page with tables, plots, coloured texts, settings and provenance; needs no network, in light and dark."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ts_eval.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        cards=cards(results),
        marks=MARKS,
        title=title_of(results),
        about=describe(results),
        remarks=remarks(results),
        tables={title: make(results) for title, make in TABLES.items()},
        plots=[(plot, svg) for plot in plots.PLOTS if (svg := plots.draw(plot, results)) is not None],
        palette=plots.PALETTE,
        texts=coloured_texts(results),
        settings=list(_flat(results["settings"])),
        provenance=list(_flat(_provenance(results))),
    )


def markdown(results: dict) -> str:
    """The tables, settings and provenance as Markdown."""
    parts = [f"# {title_of(results)}", describe(results)]
    for title, make in TABLES.items():
        parts += [f"## {title}", _markdown_table(*make(results))]
    parts.append(notes(results))
    for title, content in (("Settings", results["settings"]), ("Provenance", _provenance(results))):
        rows = [[name, NONE if value is None else value] for name, value in _flat(content)]
        parts += [f"## {title}", _markdown_table(["name", "value"], rows)]
    return "\n\n".join(parts) + "\n"


def _provenance(results: dict) -> dict:
    """The environment, the command in it as it can be typed again; from Python there was none."""
    arguments = results["environment"]["arguments"]
    return {**results["environment"], "arguments": arguments and shlex.join(["ts-eval", *arguments])}


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def table_of_all(results: dict) -> str:
    """CSV with a row per method and a column per figure (``distinct.1``, ``along_length.0.speedup``), runs left out."""
    rows = []
    for name, row in results["methods"].items():
        rows.append({"method": name, **dict(_flat({key: value for key, value in row.items() if key != "runs"}))})
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(content: dict | list, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything nested in ``content``; lists of numbers or texts stay together."""
    items: Iterable[tuple[Any, Any]] = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in items:
        nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
        if nested:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else value
