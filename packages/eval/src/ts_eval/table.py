"""What `ts-eval` prints: plain text that fits the terminal and reads the same in a file."""

import textwrap
from collections.abc import Sequence

NONE = "-"
DISTINCT = ("1", "2", "3", "4", "mean")
DISTINCT_HEADER = ("Dist-1", "Dist-2", "Dist-3", "Dist-4", "mean")
LONG_NAME = 24


def number(value: float | None, digits: int = 2) -> str:
    """A number with thousands separators, or a dash for None."""
    return NONE if value is None else f"{value:,.{digits}f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Columns under a header, the first to the left and the others to the right, each line within ``width``.

    Columns that do not fit stand in further blocks below, each with the first column again. A long first cell is
    broken before its colons.
    """
    lines = [[_broken(row[0]), *([cell] for cell in row[1:])] for row in [header, *rows]]
    widths = [max(len(part) for row in lines for part in row[column]) for column in range(len(header))]
    blocks, used = [[0]], widths[0]
    for column in range(1, len(header)):
        if used + 2 + widths[column] > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(column)
        used += 2 + widths[column]
    return "\n\n".join(_block(lines, widths, columns) for columns in blocks)


def _block(lines: list[list[list[str]]], widths: list[int], columns: list[int]) -> str:
    text = []
    for index, row in enumerate(lines):
        for part in range(len(row[0])):
            cells = [row[column][part] if part < len(row[column]) else "" for column in columns]
            aligned = [cells[0].ljust(widths[0])]
            aligned += [cell.rjust(widths[column]) for cell, column in zip(cells[1:], columns[1:], strict=True)]
            text.append("  ".join(aligned).rstrip())
        if index == 0:
            text.append("-" * (sum(widths[column] for column in columns) + 2 * (len(columns) - 1)))
    return "\n".join(text)


def _broken(name: str) -> list[str]:
    if len(name) <= LONG_NAME:
        return [name]
    first, *rest = name.split(":")
    return [first, *(f"  :{option}" for option in rest)]


def comparison(results: dict, ties: Sequence[str], width: int) -> str:
    """The header, table and beginning of the text of a comparison, from the content of results.json.

    Args:
        ties: rows that differ from ar by audited ties only.
    """
    settings, methods = results["settings"], results["methods"]
    header = ["method", "tokens/s", "speed-up", "alpha", "beta", "tok/step", "identical", *DISTINCT_HEADER]
    rows = [
        [
            name,
            number(row["tokens_per_second"], 1),
            number(row["speedup"]) + ("" if row["speedup"] is None else "x"),
            number(row["acceptance_rate"]),
            number(row["ngram_acceptance_rate"]),
            number(row["tokens_per_step"]),
            _identity(row, name in ties),
            *(number(row["distinct"][order], 3) for order in DISTINCT),
        ]
        for name, row in methods.items()
    ]
    parts = [
        textwrap.fill(describe(results), width, subsequent_indent="  "),
        "",
        format_table(header, rows, width),
        "",
        textwrap.fill(_notes(settings, methods), width),
        "",
        beginning(methods, width),
    ]
    return "\n".join(parts)


def describe(results: dict) -> str:
    """What was measured, where and how, in one sentence of parts."""
    settings, environment = results["settings"], results["environment"]
    tree, ngrams = settings["options_for_all"]["tree"], settings["options_for_all"]["ngrams"]
    lengths = sorted(set(settings["prompt_lengths"]))
    prompt_tokens = " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))
    return "; ".join(
        [
            settings["model"].rstrip("/").rpartition("/")[2],
            f"{environment['device_name']} ({environment['device']}), {_count(environment['threads'], 'thread')}",
            settings["dtype"],
            f"{_count(settings['num_prompts'], 'prompt')} of {prompt_tokens} tokens",
            f"{settings['max_new_tokens']:,} new tokens",
            sampling_in_words(settings["sampling"]),
            f"seed {settings['seed']}",
            f"tree {','.join(map(str, tree))} and k = {ngrams} where the method names no other",
        ]
    )


def sampling_in_words(sampling: dict) -> str:
    """The sampling settings that are switched on, as in "temperature 1, min-p 0.1, penalty 1.2 over 1,024"."""
    if sampling["temperature"] == 0:
        words = ["greedy"]
    else:
        words = [f"temperature {sampling['temperature']:g}"]
        off = {"top_k": 0, "top_p": 1, "min_p": 0, "eta_cutoff": 0}
        words += [f"{name.replace('_', '-')} {sampling[name]:g}" for name in off if sampling[name] != off[name]]
    if sampling["repetition_penalty"] != 1:
        words.append(f"penalty {sampling['repetition_penalty']:g} over {sampling['penalty_window']:,}")
    return ", ".join(words)


def _identity(row: dict, tie: bool) -> str:
    if row["identical_to_ar"]:
        return "yes"
    return f"{'tie' if tie else 'no,'} at {row['first_divergence']:,}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _notes(settings: dict, methods: dict) -> str:
    ar = methods["ar"]
    runs = len(ar["runs"])
    spread = ""
    if runs > 1 and ar["tokens_per_second_range"] is not None:
        low, high = ar["tokens_per_second_range"]
        spread = f" (ar: {number(low, 1)} to {number(high, 1)} tokens/s)"
    how = f"Medians of {runs} interleaved generations per method" if runs > 1 else "One generation per method"
    return (
        f"{how}, {_count(settings['runs'], 'run')} of {_count(settings['num_prompts'], 'prompt')}{spread}; prefill is "
        "not counted. alpha: share of drafted tokens accepted; beta: the part of alpha that n-grams reached; "
        "identical: to ar, token for token; Dist-n: unique n-grams over all n-grams."
    )


def beginning(methods: dict, width: int, lines: int = 6) -> str:
    """The first lines of the text that the first prompt got from the last method, and whose text it is."""
    name, row = list(methods.items())[-1]
    record = row["runs"][0]
    # A model may well generate control characters, which would upset a terminal.
    printable = "".join(letter if letter.isprintable() else " " for letter in record["text"])
    text = textwrap.fill(
        " ".join(printable.split()),
        width,
        initial_indent="  ",
        subsequent_indent="  ",
        max_lines=lines,
        placeholder=" ...",
    )
    title = textwrap.fill(f"{record['prompt']}, continued by {name}:", width)
    return f"{title}\n{text}"
