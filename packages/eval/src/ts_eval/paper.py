"""The paper's experiments (arXiv 2502.18890): what each ran, what it found, and what its figures were to show.

Lengths are in tokens at the paper's scale. Figures are the paper's, for Llama-3.1-8B where several models were used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

K = 1024
LENGTHS = (20 * K, 40 * K, 60 * K, 80 * K, 100 * K)
PROMPT = 4096
SAMPLERS = {
    "top-p": {"top_p": 0.9, "min_p": 0.0},
    "eta": {"eta_cutoff": 2e-4, "min_p": 0.0},
    "min-p": {"min_p": 0.1},
}


@dataclass(frozen=True)
class Cell:
    """One comparison with ar.

    Args:
        name: of its folder.
        rows: label in the table -> method as `ts-eval compare` takes it.
        prompt_tokens, max_new_tokens: at the paper's scale.
        sampling: over the paper's temperature 1, min-p 0.1, penalty 1.2 over 1,024.
    """

    name: str
    rows: dict[str, str]
    prompt_tokens: int = PROMPT
    max_new_tokens: int = LENGTHS[-1]
    sampling: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Trend:
    """What the paper's figures show at the end: ``figure`` of the row ``above`` is higher than of the row ``below``."""

    says: str
    figure: str
    above: str
    below: str


@dataclass(frozen=True)
class Target:
    """A table or figure.

    Args:
        title: what it shows.
        cells: its grid.
        figures: what is told per row and length: alpha, beta, x, ar_minutes, minutes, distinct1..4, distinct,
            loop_start, repeated_share.
        at: lengths at which it is told, at the paper's scale.
        paper: row -> figure -> the paper's values at these lengths.
        trends: what should come out on another model, too.
        pages: also write a page per cell, with the repeated spans marked.
        scaled: whether output lengths follow the scale; short ones do not.
        grid: another target whose runs these are, too.
    """

    title: str
    cells: tuple[Cell, ...]
    figures: tuple[str, ...]
    at: tuple[int, ...] = LENGTHS
    paper: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    trends: tuple[Trend, ...] = ()
    pages: bool = False
    scaled: bool = True
    grid: str | None = None


def _pairs(text: str) -> dict[str, list[float]]:
    """The paper's cells "alpha/x", one per length."""
    cells = [cell.split("/") for cell in text.split()]
    return {"alpha": [float(alpha) for alpha, _ in cells], "x": [float(x) for _, x in cells]}


def _values(text: str) -> list[float]:
    return [float(value) for value in text.split()]


_TABLE_3 = {
    "Medusa* 2K": ".35/1.20 .35/1.26 .35/1.29 .35/1.30 .35/1.31",
    "Medusa* 4K": ".39/1.29 .40/1.39 .40/1.42 .40/1.43 .41/1.45",
    "Medusa* 8K": ".34/1.21 .34/1.26 .34/1.29 .34/1.29 .34/1.29",
    "TriForce* 2K": ".89/1.13 .93/1.18 .94/1.21 .95/1.23 .95/1.25",
    "TriForce* 4K": ".89/1.08 .94/0.99 .95/0.96 .95/0.94 .96/0.92",
    "TriForce* 8K": ".99/1.16 .99/1.18 1.0/1.19 1.0/1.21 .99/1.22",
    "TokenSwift 2K": ".64/1.87 .72/2.39 .75/2.73 .77/2.96 .79/3.13",
    "TokenSwift 4K": ".65/1.93 .73/2.47 .79/2.88 .82/3.13 .84/3.27",
    "TokenSwift 8K": ".72/1.99 .81/2.54 .85/2.93 .88/3.19 .90/3.38",
}
_WINDOWS = (20, 50, 128, 256, 512, 1024, 2048)
_DISTINCT = ("distinct1", "distinct2", "distinct3", "distinct4", "distinct")
_END = LENGTHS[-1:]


def _each(figures: str, labels: Sequence, **columns: str) -> dict[str, dict[str, list[float]]]:
    """One value per row and figure, at the last length."""
    read = {name: _values(text) for name, text in columns.items()}
    return {
        figures.format(label): {name: [values[i]] for name, values in read.items()} for i, label in enumerate(labels)
    }


def _distinct(text: str) -> dict[str, list[float]]:
    return {name: [value] for name, value in zip((*_DISTINCT, "x"), _values(text), strict=True)}


TARGETS = {
    "table-1": Target(
        "Earlier long-context decoders on short outputs",
        (
            Cell("triforce", {"TriForce, 256 tokens": "triforce"}, max_new_tokens=256),
            Cell("magicdec", {"MagicDec, 64 tokens": "magicdec"}, max_new_tokens=64),
        ),
        ("alpha", "x"),
        at=(),
        paper={"TriForce, 256 tokens": {"x": [1.02]}, "MagicDec, 64 tokens": {"x": [1.20]}},
        scaled=False,
    ),
    "table-3": Target(
        "Methods by prompt length",
        tuple(
            Cell(
                f"prompt-{n}K",
                {f"Medusa* {n}K": "medusa", f"TriForce* {n}K": "triforce", f"TokenSwift {n}K": "tokenswift"},
                prompt_tokens=n * K,
            )
            for n in (2, 4, 8)
        ),
        ("alpha", "x"),
        paper={row: _pairs(text) for row, text in _TABLE_3.items()},
        trends=tuple(
            Trend(f"TokenSwift is faster than {other} ({n}K)", "x", f"TokenSwift {n}K", f"{other} {n}K")
            for n in (2, 4, 8)
            for other in ("Medusa*", "TriForce*")
        ),
    ),
    "table-4": Target(
        "Time of long texts (the paper's figures: Qwen2.5-7B)",
        (Cell("tokenswift", {"TokenSwift": "tokenswift"}),),
        ("alpha", "x", "ar_minutes", "minutes"),
        paper={
            "TokenSwift": {
                **_pairs(".64/2.00 .77/2.64 .78/2.86 .80/3.07 .82/3.23"),
                "ar_minutes": _values("15.6 47.4 95.4 161.4 244.2"),
                "minutes": _values("7.8 18.0 33.6 52.8 75.6"),
            }
        },
    ),
    "table-5": Target(
        "Management of the draft pass's cache, k = 0",
        (
            Cell(
                "caches",
                {
                    "full cache": "tokenswift:cache=full:ngrams=0",
                    "chosen once": "tokenswift:cache=static:ngrams=0",
                    "dynamic": "tokenswift:cache=dynamic:ngrams=0",
                },
            ),
        ),
        ("alpha", "x"),
        paper={
            "full cache": _pairs(".42/1.36 .42/1.42 .42/1.45 .42/1.46 .42/1.47"),
            "chosen once": _pairs(".19/0.94 .16/1.03 .18/1.19 .19/1.31 .21/1.44"),
            "dynamic": _pairs(".45/1.56 .43/1.75 .42/1.88 .42/1.97 .40/1.96"),
        },
        trends=(
            Trend("a dynamic cache accepts more than one chosen once", "alpha", "dynamic", "chosen once"),
            Trend("a dynamic cache is faster than the full one", "x", "dynamic", "full cache"),
        ),
    ),
    "table-6": Target(
        "The penalty (1.2 over 1,024) with each sampler",
        tuple(
            Cell(f"{name}-{theta}", {f"{name}{words}": "tokenswift"}, sampling={**sampler, "repetition_penalty": theta})
            for name, sampler in SAMPLERS.items()
            for theta, words in ((1.2, ""), (1.0, ", no penalty"))
        ),
        (*_DISTINCT, "x"),
        at=_END,
        paper={
            "top-p": _distinct(".15 .25 .29 .31 .25 3.42"),
            "top-p, no penalty": _distinct(".09 .15 .18 .20 .16 3.53"),
            "eta": _distinct(".25 .43 .49 .53 .43 3.42"),
            "eta, no penalty": _distinct(".06 .10 .12 .13 .11 3.57"),
            "min-p": _distinct(".41 .71 .81 .82 .69 3.27"),
            "min-p, no penalty": _distinct(".07 .11 .14 .15 .12 3.58"),
        },
        trends=tuple(
            Trend(f"the penalty raises Distinct-n ({name})", "distinct", name, f"{name}, no penalty")
            for name in SAMPLERS
        ),
    ),
    "table-7": Target(
        "Branching of the tree, k = 0",
        (Cell("trees", {f"[{t}]": f"tokenswift:tree={t}:ngrams=0" for t in ("3,3,3,3", "1,9,9,9", "1,3,3,3")}),),
        ("alpha", "x"),
        paper={
            "[3,3,3,3]": _pairs(".44/1.34 .43/1.58 .43/1.75 .43/1.85 .42/1.91"),
            "[1,9,9,9]": _pairs(".50/0.53 .52/0.67 .53/0.78 .55/0.88 .57/0.96"),
            "[1,3,3,3]": _pairs(".45/1.56 .43/1.75 .42/1.88 .42/1.97 .40/1.96"),
        },
        trends=(
            Trend("a larger tree accepts more", "alpha", "[1,9,9,9]", "[1,3,3,3]"),
            Trend("and may run slower", "x", "[1,3,3,3]", "[1,9,9,9]"),
        ),
    ),
    "table-8": Target(
        "Strength of the penalty",
        tuple(
            Cell(f"theta-{theta}", {f"theta {theta}": "tokenswift"}, sampling={"repetition_penalty": theta})
            for theta in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
        ),
        ("distinct", "x"),
        at=_END,
        paper=_each("theta {}", (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), distinct=".12 .13 .69 .83 .70 .92"),
        trends=(Trend("a penalty of 1.2 raises Distinct-n", "distinct", "theta 1.2", "theta 1.0"),),
    ),
    "table-12": Target(
        "Samplers",
        tuple(Cell(name, {name: "tokenswift"}, sampling=sampler) for name, sampler in SAMPLERS.items()),
        ("alpha", "x"),
        paper={
            "top-p": _pairs(".68/2.10 .81/2.80 .84/3.07 .86/3.28 .87/3.42"),
            "min-p": _pairs(".66/2.01 .75/2.58 .79/2.94 .81/3.15 .82/3.26"),
            "eta": _pairs(".56/1.85 .71/2.59 .78/2.99 .81/3.24 .84/3.42"),
        },
    ),
    "table-13": Target(
        "Temperature, with top-p 0.9",
        tuple(
            Cell(
                f"temperature-{t}", {f"temperature {t}": "tokenswift"}, sampling={"temperature": t, **SAMPLERS["top-p"]}
            )
            for t in (0.4, 0.6, 0.8, 1.0, 1.2)
        ),
        ("alpha", "x"),
        at=_END,
        paper=_each(
            "temperature {}", (0.4, 0.6, 0.8, 1.0, 1.2), alpha=".89 .90 .85 .87 .83", x="3.39 3.41 3.45 3.42 3.42"
        ),
    ),
    "table-14": Target(
        "Prompt length, k = 0",
        tuple(
            Cell(f"prompt-{n}K", {f"{n}K": "tokenswift:ngrams=0"}, prompt_tokens=n * K) for n in (2, 3, 4, 5, 6, 7, 8)
        ),
        ("alpha", "x"),
        at=_END,
        paper=_each(
            "{}K", (2, 3, 4, 5, 6, 7, 8), alpha=".34 .30 .35 .31 .39 .36 .36", x="1.87 1.69 1.85 1.70 1.94 1.88 1.77"
        ),
    ),
    "table-15": Target(
        "Penalty window",
        tuple(Cell(f"window-{w}", {f"window {w}": "tokenswift"}, sampling={"penalty_window": w}) for w in _WINDOWS),
        ("alpha", "x"),
        at=_END,
        paper=_each("window {}", _WINDOWS, alpha=".95 .93 .82 .92 .90 .82 .86", x="3.58 3.52 3.29 3.48 3.43 3.26 3.31"),
    ),
    "table-16": Target(
        "Penalty window and diversity",
        tuple(Cell(f"window-{w}", {f"window {w}": "tokenswift"}, sampling={"penalty_window": w}) for w in _WINDOWS),
        ("distinct",),
        at=_END,
        grid="table-15",
        paper=_each("window {}", _WINDOWS, distinct=".79 .86 .69 .86 .79 .78 .80"),
    ),
    "figure-3": Target(
        "Reutilised n-grams",
        (Cell("ngrams", {f"k = {k}": f"tokenswift:ngrams={k}" for k in (20, 0)}),),
        ("alpha", "beta", "x"),
        paper={
            "k = 20": {
                **_pairs(".66/2.01 .75/2.58 .79/2.94 .81/3.15 .82/3.26"),
                "beta": _values(".52 .66 .72 .75 .76"),
            },
            "k = 0": _pairs(".45/1.56 .43/1.75 .42/1.88 .42/1.97 .40/1.96"),
        },
        trends=(
            Trend("k = 20 accepts more than k = 0", "alpha", "k = 20", "k = 0"),
            Trend("k = 20 is faster than k = 0", "x", "k = 20", "k = 0"),
        ),
    ),
    "figure-4": Target(
        "Number of reutilised n-grams",
        (Cell("ngrams", {f"k = {k}": f"tokenswift:ngrams={k}" for k in (0, 10, 20, 50, 100)}),),
        ("alpha", "beta", "x"),
        at=_END,
        trends=(
            Trend("more n-grams raise beta", "beta", "k = 100", "k = 10"),
            Trend("and cost verification", "x", "k = 20", "k = 100"),
        ),
    ),
    "figure-5": Target(
        "Repetition with and without the penalty",
        tuple(
            Cell(f"theta-{theta}", {words: "tokenswift"}, sampling={"repetition_penalty": theta})
            for theta, words in ((1.0, "no penalty"), (1.2, "penalty 1.2"))
        ),
        ("distinct", "repeated_share", "loop_start"),
        at=_END,
        paper={"no penalty": {"loop_start": [5000]}},
        trends=(Trend("the penalty lowers the share of repeated text", "repeated_share", "no penalty", "penalty 1.2"),),
        pages=True,
    ),
}
