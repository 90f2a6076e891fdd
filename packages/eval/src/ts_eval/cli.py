"""The command line: `ts-eval compare`, `ts-eval methods` and `ts-eval metrics`.

Exit status: 0 done; 1 a method differs from ar (with --check-lossless); 2 wrong usage or missing input, told in one
sentence; 130 interrupted.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ts_eval import defaults

WRONG_INPUT = 2
INTERRUPTED = 130


class SentenceGroup(click.Group):
    """A group whose errors end in one sentence; a command's return value is its exit status."""

    def main(self, args=None, prog_name=None, complete_var=None, standalone_mode=True, **extra):
        def run():
            return super(SentenceGroup, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        try:
            status = run()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = WRONG_INPUT
        except click.ClickException as error:
            click.echo(f"ts-eval: {error.format_message()}", err=True)
            status = WRONG_INPUT
        except click.Abort:
            click.echo("ts-eval: interrupted.", err=True)
            status = INTERRUPTED
        sys.exit(status)


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Turn the errors that an input can cause into one line without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.filename and error.strerror:
            sentence = f"{error.filename}: {error.strerror}"
        raise click.ClickException(sentence) from error


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


class IntegerList(click.ParamType):
    """Integers with commas between them, such as 1,3,3,3."""

    name = "N,N,..."

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(number) for number in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 1,3,3,3.", param, ctx)


def sampling_option(flag: str, help: str):
    """An option for the field of `decoder.SamplingParams` of that name."""
    default = defaults.SAMPLING[flag.removeprefix("--").replace("-", "_")]
    return click.option(flag, type=type(default), default=default, show_default=True, help=help)


@click.group(cls=SentenceGroup)
@click.version_option(package_name="tokenswift-eval", prog_name="ts-eval")
def main():
    """Compare decoders: speed, acceptance, diversity, and whether the text is the one of plain decoding."""


@main.command()
@click.argument("methods", nargs=-1, required=True, metavar="METHOD[:OPTION=VALUE]...")
@click.option("--model", help="Model folder or hub id.  [default: the reference model]")
@click.option("--heads", multiple=True, help="Heads checkpoint, or METHOD=CHECKPOINT; may be repeated.")
@click.option("--draft-model", help="Small model that drafts for triforce.")
@click.option("--prompts", help="Text file (one prompt) or .jsonl[.gz] with a field text.  [default: PG-19 test books]")
@click.option("--prompt-tokens", type=int, help="First N tokens of each prompt.  [default: all; 1,024 of a PG-19 book]")
@click.option("--max-new-tokens", type=int, default=defaults.MAX_NEW_TOKENS, show_default=True)
@click.option("--num-prompts", type=int, help="At most so many prompts.  [default: all; 1 of the PG-19 books]")
@click.option("--runs", type=int, default=defaults.RUNS, show_default=True, help="Generations per method and prompt.")
@click.option("--seed", type=int, default=0, show_default=True, help="Run r (from 0) uses seed + r.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="auto: float32 on a CPU, the checkpoint's on CUDA.")
@sampling_option("--temperature", "0 is greedy.")
@sampling_option("--top-k", "0 switches off.")
@sampling_option("--top-p", "1 switches off.")
@sampling_option("--min-p", "0 switches off.")
@sampling_option("--eta-cutoff", "0 switches off.")
@sampling_option("--repetition-penalty", "1 switches off.")
@sampling_option("--penalty-window", "Last tokens that are penalised.")
@click.option("--tree", type=IntegerList(), help="Branching per depth.  [default: 1,3,3,3]")
@click.option("--ngrams", type=int, help="n-grams retrieved per step, the paper's k.  [default: 20]")
@click.option("--budget", type=int, help="Slots of the partial cache.  [default: the prompt's length]")
@click.option("--output", default=defaults.OUTPUT, show_default=True, help="Folder of results; resumes what is in it.")
@click.option("--overwrite", is_flag=True, help="Drop what other settings left in the output folder.")
@click.option("--check-lossless", is_flag=True, help="Exit with 1 when a method differs from ar, audited ties aside.")
@click.option("--data-dir", envvar="TS_DATA_DIR", help="Folder of the reference model and books.")
def compare(methods, tree, ngrams, budget, check_lossless, **arguments):
    """Decode the same prompts with each METHOD, next to ar, and tell speed, acceptance, diversity and identity.

    A METHOD may carry options of its own: tokenswift:tree=1,3,3,3:ngrams=20. `ts-eval methods` lists the names.
    """
    # Imported here because torch takes seconds, which --help and wrong usage should not cost.
    with told_in_a_sentence():
        import huggingface_hub
        import transformers

        from ts_eval import compare as experiment
        from ts_eval.table import comparison

        transformers.utils.logging.disable_progress_bar()
        # Its retries would stand between the user and the one sentence that says what is missing.
        huggingface_hub.utils.logging.set_verbosity_error()
        sampling = {name: arguments.pop(name) for name in defaults.SAMPLING}
        options = {"tree": tree, "ngrams": ngrams, "budget": budget}
        try:
            results = experiment.compare(
                methods,
                sampling=sampling,
                options={name: value for name, value in options.items() if value is not None},
                say=lambda sentence: click.echo(sentence, err=True),
                **arguments,
            )
        except KeyboardInterrupt:
            kept = f"finished generations are kept in {arguments['output']}; the same command resumes there."
            click.echo(f"\nts-eval: interrupted; {kept}", err=True)
            return INTERRUPTED
    differing = experiment.differs(results)
    ties = [name for name, row in results["methods"].items() if not row["identical_to_ar"] and name not in differing]
    click.echo(comparison(results, ties, _width()))
    click.echo(f"\nAll of it: {Path(arguments['output']) / 'results.json'}")
    if check_lossless and differing:
        click.echo(f"ts-eval: not lossless: {', '.join(differing)} differs from ar by more than a tie.", err=True)
        return 1
    return 0


@main.command()
def methods():
    """List the decoding methods."""
    import decoder

    for name in decoder.methods():
        click.echo(name)


@main.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--tokenizer", "--model", help="Folder or hub id; Distinct-n is then over its tokens, not over words.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def metrics(files, tokenizer, as_json):
    """Measure any text FILE: Distinct-1..4 and their mean, Self-BLEU-2..5 (texts too short for one get none)."""
    # Imported here because torch takes seconds, which --help and wrong usage should not cost.
    from ts_eval import metrics as measures
    from ts_eval.table import DISTINCT, DISTINCT_HEADER, format_table, number

    rows = {}
    with told_in_a_sentence():
        tokenize = str.split
        if tokenizer is not None:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(tokenizer)

            def tokenize(text: str) -> list[int]:
                return loaded(text, add_special_tokens=False, verbose=False)["input_ids"]

        for file in files:
            try:
                text = Path(file).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text") from error
            units = tokenize(text)
            rows[file] = {
                "tokens" if tokenizer else "words": len(units),
                "distinct": measures.distinct(units),
                "self_bleu": measures.self_bleu(text),
            }
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return 0
    unit = "tokens" if tokenizer else "words"
    header = ["file", unit, *DISTINCT_HEADER, *(f"Self-BLEU-{n}" for n in measures.BLEU_ORDERS)]
    table = [
        [
            file,
            f"{row[unit]:,}",
            *(number(row["distinct"][n], 3) for n in DISTINCT),
            *(number(row["self_bleu"][str(n)], 3) for n in measures.BLEU_ORDERS),
        ]
        for file, row in rows.items()
    ]
    click.echo(format_table(header, table, _width()))
    return 0


if __name__ == "__main__":
    main()
