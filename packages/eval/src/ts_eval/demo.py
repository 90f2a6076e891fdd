"""`make demo`: tokenswift and auto against plain decoding on the reference model, sampled and greedy, in two commands.

The prompt is 2,048 tokens of a novel. Tree and k of tokenswift suit a CPU, where a verification of 4 nodes costs little
more than a single step and one of the paper's tree with its n-grams several; the paper's own setting runs beside it.
The partial cache holds half of the prompt.
"""

import sys

import click

from ts_eval.cli import main as ts_eval

TREE, NGRAMS, BUDGET = "1,2", "0", "1024"
PAPER = "tokenswift:tree=1,3,3,3:ngrams=20"
COMMON = [
    *("compare", "ar", PAPER, "tokenswift", "auto", "--tree", TREE, "--ngrams", NGRAMS),
    *("--budget", BUDGET, "--prompt-tokens", "2048", "--max-new-tokens", "1024", "--check-lossless", "--overwrite"),
]
SETTINGS = {
    "Sampled (temperature 1, min-p 0.1, penalty 1.2 over 1,024)": ["--output", "runs/demo"],
    "Greedy (temperature 0)": ["--temperature", "0", "--output", "runs/demo-greedy"],
}


def main(arguments: list[str] | None = None) -> int:
    """Run both settings, ``arguments`` added to each command; the worse of their exit statuses."""
    statuses = []
    for title, setting in SETTINGS.items():
        command = [*COMMON, *setting, *(arguments if arguments is not None else sys.argv[1:])]
        click.echo(f"\n== {title}\n$ ts-eval {' '.join(command)}\n")
        try:
            ts_eval(command)
        except SystemExit as done:
            statuses.append(int(done.code or 0))
        if statuses[-1] == 130:
            break
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
