"""Tables and paragraphs on a terminal, set by rich: coloured there, plain text in a file or a pipe."""

import shutil
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LONG_NAME = 24
NARROW = 40
STYLES = {"yes": "green", "found": "green", "tie": "yellow", "no": "red", "own": "green", "not": "yellow"}
"""Of cells that begin with such a word, but for the first column's, which are names."""


def show(*parts: RenderableType) -> None:
    """Print the parts, wrapped to the terminal's width, with an empty line between any two."""
    width = shutil.get_terminal_size((120, 24)).columns
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for place, part in enumerate(parts):
        with console.capture() as shown:
            console.print(part)
        # rich fills lines with spaces, which a file would keep.
        print("\n" * bool(place) + "\n".join(line.rstrip() for line in shown.get().splitlines()))


def indented(text: str) -> Padding:
    """A paragraph that stands two columns to the right."""
    return Padding(text, (0, 0, 0, 2))


class Columns:
    """Cells under a header, the first column to the left and the others to the right.

    Columns that do not fit the terminal, whose cells rich alone would cut, stand in further tables below, each with the
    first column again. A long first cell is broken before its colons. Where a terminal of fewer than `NARROW` columns
    has no room for another cell beside the first ones, the cells of a row stand below each other, behind their titles.
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]]):
        names, *self.others = ([*column] for column in zip(header, *rows, strict=True))
        self.first = [name if len(name) <= LONG_NAME else name.replace(":", "\n  :") for name in names]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        first, *widths = (max(map(cell_len, "\n".join(column).split("\n"))) for column in (self.first, *self.others))
        if options.max_width < min(NARROW, first + 2 + max(widths, default=0)):
            yield from self._stacked()
            return
        # A name that leaves no room for a column beside it is broken anywhere.
        first = max(1, min(first, options.max_width - 2 - max(widths, default=0)))
        block, used = [self.first], first
        for column, width in zip(self.others, widths, strict=True):
            if used + 2 + width > options.max_width and len(block) > 1:
                yield from (_table(block, first), "")
                block, used = [self.first], first
            block.append(column)
            used += 2 + width
        yield _table(block, first)

    def _stacked(self) -> Iterator[Text]:
        room = max(cell_len(title) for title, *_ in self.others) if self.others else 0
        for row, name in enumerate(self.first[1:], 1):
            yield Text(name, "bold", overflow="fold")
            for column in self.others:
                title, cell = column[0], column[row]
                yield Text.assemble(
                    f"  {title}{' ' * (room - cell_len(title))}  ", (cell, _style(cell)), overflow="fold"
                )
            yield Text()


def _style(cell: str) -> str:
    return STYLES.get(cell.partition(" ")[0].rstrip(",").lower(), "")


def _table(columns: Sequence[Sequence[str]], first: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for place, (title, *_) in enumerate(columns):
        if place:
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold", width=first)
    for cells in zip(*(column[1:] for column in columns), strict=True):
        name, *values = cells
        table.add_row(Text(name), *map(Text, values, map(_style, values)))
    return table
