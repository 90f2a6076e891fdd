"""The command line: `ts-eval compare`, `exactness`, `bench`, `methods`, `metrics`, `needle`, `report`, `plan`, ...

Exit status: 0 done; 1 a method differs from ar (with --check-lossless); 2 wrong usage or missing input, told in one
sentence; 130 interrupted.
"""

import json
import os
from functools import partial
from pathlib import Path

import click

from ts_eval import defaults
from ts_eval.commands.group import SentenceGroup, quiet_libraries, show, told_in_a_sentence
from ts_eval.commands.options import (
    INTEGERS,
    NUMBERS,
    WITHOUT_FLAG,
    Tree,
    bitwise_option,
    books_option,
    cache_options,
    device_options,
    drafting_options,
    from_file,
    model_options,
    number_option,
    numbers_option,
    options_of,
    output_options,
    prompts_options,
    ray_options,
    sampling_of,
    sampling_options,
    sanitize_option,
    seed_option,
    yarn_option,
)

say = partial(click.echo, err=True)


@click.group(cls=SentenceGroup)
@click.version_option(package_name="tokenswift-eval", prog_name="ts-eval")
def main():
    """Compare decoders: speed, acceptance, diversity, and whether the text is the one of plain decoding."""


@main.command()
@click.argument("methods", nargs=-1, required=True, metavar="METHOD[:OPTION=VALUE]...")
@click.option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=from_file,
    metavar="FILE",
    help="YAML file of METHODs (methods: [...]) and flags (max_new_tokens: 512), such as the run.yaml in an output "
    "folder; what is typed comes first.",
)
@model_options
@prompts_options(
    "Text file (one prompt), .jsonl[.gz] or hub dataset (owner/name[:split]) with a field text, or messages of "
    "a chat, whose answer ends where the model ends it.  "
    "[default: PG-19 test books]"
)
@number_option("--max-new-tokens", defaults.MAX_NEW_TOKENS)
@sanitize_option
@number_option("--runs", defaults.RUNS, "Generations per method and prompt.")
@seed_option("Run r (from 0) uses seed + r.")
@number_option("--batch", 1, "Texts (prompts and runs) that are decoded together.")
@device_options
@bitwise_option
@yarn_option
@sampling_options
@drafting_options
@cache_options
@output_options(defaults.OUTPUT, "Folder of results; resumes what is in it.")
@click.option(
    "--check-lossless",
    is_flag=True,
    help="Score all texts again with the plain model, and exit with 1 when a method differs from ar (where bitwise is "
    "on, in a token or a bit of a log-probability) or a text from the model, audited ties aside.",
)
@click.option("--marks", type=INTEGERS, help="New tokens at which to tell latency.  [default: five equal steps]")
@click.option("--embedding-model", help="Sentence-embedding model for the semantic diversity of the texts.")
@click.option(
    "--endpoint",
    metavar="URL",
    help="Time a server with the same model as one more row: vLLM, llama.cpp or `python -m decoder serve`.",
)
@number_option("--processes", 1, "Share the prompts and runs over N processes.")
@click.option("--tensor-parallel", is_flag=True, help="Under torchrun: its processes share the model.")
@ray_options
@books_option
@click.pass_obj
def compare(typed, methods, check_lossless, **arguments):
    """Decode the same prompts with each METHOD, next to ar, and tell speed, acceptance, diversity and identity.

    A METHOD may carry options and heads of its own: tokenswift:tree=1,3,3,3:ngrams=20, auto:heads=DIR. `ts-eval
    methods` lists the names. Under torchrun its processes share the prompts, or with --tensor-parallel the model.
    """
    # Imported here because torch takes seconds, which --help and wrong usage should not cost.
    with told_in_a_sentence(arguments["output"]):
        from ts_eval import compare as experiment
        from ts_eval.comparing.checks import differs
        from ts_eval.report.table import comparison

        quiet_libraries()
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not arguments["tensor_parallel"]:
            arguments |= {"rank": int(os.environ["RANK"]), "processes": int(os.environ["WORLD_SIZE"])}
        sampling = sampling_of(arguments)
        without_flag = click.get_current_context().meta.get(WITHOUT_FLAG, {})
        results = experiment.compare(
            methods,
            sampling=sampling | without_flag.get("sampling", {}),
            options=options_of(arguments) | without_flag.get("options", {}),
            audit=check_lossless,
            arguments=typed,
            say=say,
            **arguments,
        )
    if results is None:
        return 0
    show(*comparison(results))
    click.echo(
        f"\nAll of it: {Path(arguments['output']) / 'results.json'}; as a page: ts-eval report {arguments['output']}"
    )
    if check_lossless and (names := differs(results)):
        how = "where bitwise excuses no tie" if results["settings"].get("bitwise") else "by more than a tie"
        verb = "differs" if len(names) == 1 else "differ"
        click.echo(f"ts-eval: not lossless: {', '.join(names)} {verb} {how}.", err=True)
        return 1
    return 0


@main.command()
@click.argument("methods", nargs=-1, metavar="[METHOD[:OPTION=VALUE]...]...")
@model_options
@prompts_options("As for compare.  [default: PG-19 test books]")
@number_option("--max-new-tokens", defaults.EXACTNESS_NEW_TOKENS, "Of each text.")
@seed_option("Of the sampled texts, and of the first draw.")
@number_option("--draws", defaults.EXACTNESS_DRAWS, "Seeds for the chi-square test; 0 leaves it out.")
@device_options
@bitwise_option
@sampling_options
@output_options(defaults.EXACTNESS_OUTPUT, "Folder of texts and table; resumes there.")
@ray_options
@books_option
@click.pass_obj
def exactness(typed, methods, **arguments):
    """Tell of each engine how many texts with drafts are its own plain ones, greedy and sampled, and how fast it is.

    METHODs as for compare; without any, all of ours, of transformers' and of llama.cpp's rows that can run here. A
    chi-square test tells whether sampled tokens are from the model's distribution.
    """
    with told_in_a_sentence(arguments["output"]):
        from ts_eval import exactness as scoreboard
        from ts_eval.commands.terminal import Columns
        from ts_eval.report.exactness import notes, table

        quiet_libraries()
        sampling = {name: arguments.pop(name) for name in defaults.SAMPLING}
        results = scoreboard.exactness(methods, sampling=sampling, arguments=typed, say=say, **arguments)
    show(Columns(*table(results)), " ".join(notes(results)))
    names = (scoreboard.RESULTS, scoreboard.PAGE)
    click.echo(f"\nAll of it: {' and '.join(str(Path(arguments['output']) / name) for name in names)}")
    return 0


@main.command()
@click.argument("methods", nargs=-1, metavar="[METHOD[:OPTION=VALUE]...]...")
@model_options
@click.option("--prompts", help="As for compare; the first one is taken.  [default: a PG-19 test book]")
@sanitize_option
@number_option("--prompt-tokens", defaults.BENCH_PROMPT_TOKENS, "First N tokens of the prompt.")
@number_option("--new-tokens", defaults.BENCH_NEW_TOKENS, "Of the generations whose steps are taken apart.")
@numbers_option("--lengths", INTEGERS, defaults.BENCH_LENGTHS, "Tokens of text to time passes over.")
@numbers_option("--widths", INTEGERS, defaults.BENCH_WIDTHS, "Nodes of the verifications to time.")
@number_option("--repeats", defaults.BENCH_REPEATS, "Rounds; figures are their medians.")
@seed_option("Of the noise, and of random weights.")
@click.option(
    "--random-weights",
    metavar="CONFIG",
    help="Time a model of this shape with random weights, heads and prompt: config.json, or a name such as "
    "llama-3.1-8b.",
)
@click.option(
    "--tokens-per-step",
    multiple=True,
    metavar="METHOD=TOKENS@NODES",
    help="Compute the time of a text as long as the longest of --lengths, taking METHOD to bring so many tokens per "
    "step with trees of so many nodes; may be repeated.",
)
@device_options
@bitwise_option
@sampling_options
@drafting_options
@output_options(
    defaults.BENCH_OUTPUT, "Folder of figures and plot.", "Measure again, whatever the output folder holds."
)
@books_option
@click.pass_obj
def bench(typed, methods, **arguments):
    """Measure what steps cost here: memory, plain decoding, verifications, drafts, and the parts of a step.

    METHODs as for compare; without any, all of ours whose heads and draft model are at hand.
    """
    with told_in_a_sentence():
        from ts_eval.measuring import bench as measure
        from ts_eval.measuring.bench_page import tables

        quiet_libraries()
        sampling = sampling_of(arguments)
        results = measure.bench(
            methods,
            sampling=sampling,
            options=options_of(arguments),
            arguments=typed,
            say=say,
            **arguments,
        )
        # Shown before it is written: a full disk loses no figure.
        show(*tables(results))
        paths = measure.save(results, Path(arguments["output"]))
    click.echo(f"\nAll of it: {' and '.join(map(str, paths))}")
    return 0


@main.command()
def methods():
    """List what `compare` takes: the decoder's methods, transformers' own generate (hf, ...), and llama.cpp."""
    from ts_eval.comparing.method_spec import row_names

    for name in row_names():
        click.echo(name)


@main.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--tokenizer", help="Folder or hub id; measures are then over its tokens, not over words.")
@click.option("--model", help="Folder or hub id; its tokens, and the perplexity under it.")
@click.option(
    "--perplexity/--no-perplexity", default=True, show_default=True, help="Take the pass over each text that it costs."
)
@click.option("--embedding-model", help="Folder or hub id of a sentence-embedding model; adds semantic diversity.")
@click.option(
    "--reference",
    metavar="HUMAN_FILE",
    help="Human text, or as compare's --prompts; adds MAUVE against it in the features of --model.",
)
@number_option("--piece-tokens", defaults.PIECE_TOKENS, "Of the pieces MAUVE compares.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def metrics(files, as_json, **arguments):
    """Measure any text FILE: diversity, repetition, compression and, with a model, perplexity and MAUVE.

    A text that is too short for a measure gets none.
    """
    # Imported here because torch takes seconds, which --help and wrong usage should not cost.
    from ts_eval.metrics import text_files

    with told_in_a_sentence():
        quiet_libraries()
        rows = text_files.measure(files, **arguments)
    click.echo(json.dumps(rows, indent=1)) if as_json else show(*text_files.table(rows))
    return 0


@main.command()
@click.argument("methods", nargs=-1, metavar="[METHOD[:OPTION=VALUE]...]...")
@model_options
@click.option("--prompts", help="As for compare, the texts one behind the other.  [default: PG-19 test books]")
@numbers_option("--lengths", INTEGERS, defaults.NEEDLE_LENGTHS, "Tokens of text and question.")
@numbers_option("--depths", NUMBERS, defaults.NEEDLE_DEPTHS, "Shares of the text before the hidden sentence.")
@number_option("--phrases", defaults.NEEDLE_PHRASES, "Hidden at each place.")
@number_option("--max-new-tokens", defaults.NEEDLE_NEW_TOKENS, "Of an answer.")
@seed_option("Of pass phrases: phrase i (from 0) has seed + i.")
@device_options
@bitwise_option
@yarn_option
@cache_options
@output_options(
    defaults.NEEDLE_OUTPUT,
    "Folder of the answers; resumes what is in it.",
    "Ask again, whatever the output folder holds.",
)
@books_option
@click.pass_obj
def needle(typed, methods, kv_dtype, offload, **arguments):
    """Hide a pass phrase at several depths of long texts, ask for it, and tell whether each METHOD answers as ar does.

    METHODs as for compare, auto without any. A model that cannot answer still shows in the phrase's log-probability
    whether it has read it.
    """
    with told_in_a_sentence():
        from ts_eval import needle as probe

        quiet_libraries()
        results = probe.needle(
            methods,
            options={"kv_dtype": kv_dtype, "offload": offload},
            arguments=typed,
            say=say,
            **arguments,
        )
    show(*probe.table(results))
    click.echo(f"\nAll of it: {Path(arguments['output']) / probe.RESULTS}")
    return 0


@main.command()
@click.argument("folder", metavar="DIR")
def report(folder):
    """Write report.html, report.md and report.csv into the folder of a finished comparison."""
    with told_in_a_sentence():
        from ts_eval.report import write_report

        for path in write_report(Path(folder)):
            click.echo(path)
    return 0


@main.command()
@click.option(
    "--model", help="Model folder, hub id, config.json, or a name such as llama-3.1-8b.  [default: the reference model]"
)
@click.option("--draft-model", help="The same of the small model that drafts for triforce.")
@number_option("--max-new-tokens", 102_400)
@number_option("--prompt-tokens", 0)
@click.option("--dtype", default="auto", show_default=True, help="auto: the configuration's. int8, int4: on a CPU.")
@number_option("--num-heads", 3, "Draft heads.")
@click.option("--tree", type=Tree(), help="Branching per depth, or paths of ranks.  [default: 1,3,3,3]")
@click.option("--ngrams", type=int, help="n-grams retrieved per step.  [default: 20]")
@number_option("--budget", defaults.PLAN_BUDGET, "Slots of the partial cache.")
@cache_options
@click.option("--gpu", multiple=True, help="A100, H100 or H200; may be repeated.  [default: all three]")
@click.option("--bandwidth", type=float, help="Memory bandwidth of another device, in GB/s.")
@click.option("--measure", is_flag=True, help="Measure this machine's memory bandwidth.")
@click.option(
    "--acceptance",
    type=float,
    multiple=True,
    help="chance that a drafted token is accepted; may be repeated.  [default: 0.5, 0.7, 0.9]",
)
@number_option(
    "--tensor-parallel-size", 1, "Processes that share the model, each on a device of its own; bytes are those of one."
)
@click.option("--data-dir", envvar="TS_DATA_DIR", help="Folder of the reference model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(as_json, **arguments):
    """Tell the memory that a generation needs, and the time per step that reading it costs at least."""
    with told_in_a_sentence():
        from ts_eval.planning import command as planning

        quiet_libraries()
        made = planning.plan_from(**arguments)
    click.echo(json.dumps(made, indent=1)) if as_json else show(*planning.table(made))
    return 0


@main.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@number_option("--scale", 1.0, "Of the paper's prompt and output lengths.")
@model_options
@click.option("--prompts", help="As for compare.  [default: PG-19 test books]")
@click.option("--num-prompts", type=int, help="At most so many prompts.  [default: 1 book]")
@number_option("--runs", defaults.REPRODUCE_RUNS, "Texts per row and prompt.")
@seed_option("Run r (from 0) uses seed + r.")
@device_options
@output_options(defaults.REPRODUCE_OUTPUT, "Folder; resumes what is in it.")
@books_option
def reproduce(targets, scale, output, **settings):
    """Run experiments of the paper and print them beside its figures.

    TARGET is table-1 to 8, 11 to 16, figure-1, 3, 4, 5 or 6 (table-3, figure-5), or all. Each text is generated once,
    whichever TARGETs need it.
    """
    with told_in_a_sentence(output):
        from ts_eval.paper import experiments as paper
        from ts_eval.paper import reproduce as runner
        from ts_eval.paper import reproduced_page

        quiet_libraries()
        names = [name for target in targets for name in (paper.targets() if target == "all" else [target])]
        for page in runner.reproduce(names, scale, Path(output), say, **settings):
            show(*reproduced_page.on_terminal(page))
            click.echo()
    return 0


if __name__ == "__main__":
    main()
