"""Tables and paragraphs on terminals of several widths, and in a pipe."""

import pytest
from rich.cells import cell_len

from ts_eval.commands.terminal import Columns, indented, show

HEADER = ["method", "identical", *(f"figure {n}" for n in range(9))]
ROWS = [
    ["ar", "yes", *["0.5"] * 9],
    ["tokenswift:tree=1,3,3,3:ngrams=20", "no, at 1,234", *["12,345.678"] * 9],
    ["[bold]:smile:", "tie at 7", *["-"] * 9],
]
PARTS = (HEADER, ROWS)


@pytest.fixture
def shown(monkeypatch, capsys):
    def shown(*parts, width: int = 80, **environment: str) -> list[str]:
        for name, value in {"COLUMNS": str(width), **environment}.items():
            monkeypatch.setenv(name, value)
        show(*parts)
        return capsys.readouterr().out.splitlines()

    return shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_cell_is_whole_and_no_line_is_wider_than_the_terminal(shown, width):
    lines = shown("words " * 50, Columns(*PARTS), indented("words " * 50), width=width)
    assert max(map(cell_len, lines)) <= width and not any(line.endswith(" ") for line in lines)
    words = " ".join(lines).split()
    for cell in (*HEADER[1:], *(cell for row in ROWS for cell in row[1:]), "[bold]:smile:", ":tree=1,3,3,3"):
        assert set(cell.split()) <= set(words)
    assert words.count("12,345.678") == 9 and words.count("words") == 100


def test_columns_that_do_not_fit_stand_below_with_the_first_column_again(shown):
    lines = shown(Columns(*PARTS))
    assert lines[0].split()[:2] == ["method", "identical"] and set(lines[1]) == {"─"}
    assert lines[3].startswith("tokenswift  ") and lines[4] == "  :tree=1,3,3,3"
    assert [line.split()[0] for line in lines if line.startswith(("method", "ar"))] == ["method", "ar"] * 2
    assert len(shown(Columns(*PARTS), width=200)) == 7


def test_on_a_narrow_terminal_cells_stand_behind_their_titles(shown):
    # 15 columns of name, 2 between and 12 of "no, at 1,234" fit into 30, and not into 28.
    assert shown(Columns(*PARTS), width=30)[0].split() == ["method", "identical"]
    lines = shown(Columns(*PARTS), width=28)
    assert lines[:3] == ["ar", "  identical  yes", "  figure 0   0.5"]
    at = lines.index("tokenswift")
    assert lines[at - 1 : at + 3] == ["", "tokenswift", "  :tree=1,3,3,3", "  :ngrams=20"]
    assert lines[at + 3 : at + 5] == ["  identical  no, at 1,234", "  figure 0   12,345.678"]
    assert max(map(cell_len, lines)) <= 28 and "".join(lines).count("12,345.678") == 9
    assert "[bold]:smile:" in lines
    # A wider one keeps its columns, however long a name is.
    long = Columns(["method", "x"], [["a" * 80, "1"]])
    assert shown(long, width=40)[0].split() == ["method", "x"] and shown(long, width=39)[0] == "a" * 39


@pytest.mark.parametrize("width", [1, 5, 12])
def test_no_terminal_is_too_narrow(shown, width):
    letters = "".join(shown("words", Columns(*PARTS), width=width)).replace(" ", "")
    assert letters.count("12,345.678") == 9 and letters.count("tokenswift:tree=1,3,3,3:ngrams=20") == 1


def test_colours_are_for_terminals_alone(shown):
    plain = shown(Columns(*PARTS))
    coloured = shown(Columns(*PARTS), FORCE_COLOR="1", TERM="xterm-256color")
    assert not any("\x1b" in line for line in plain)
    named = shown(Columns(["row", "x"], [["no penalty", "0.5"]]), FORCE_COLOR="1", TERM="xterm-256color")
    assert not any("\x1b[3" in line for line in named)
    assert "\x1b[32m         yes\x1b[0m" in coloured[2] and "\x1b[31mno, at 1,234\x1b[0m" in coloured[3]
    assert not any("\x1b[3" in line for line in shown(Columns(*PARTS), FORCE_COLOR="1", NO_COLOR="1"))
