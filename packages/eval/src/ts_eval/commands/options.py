"""The options that several commands of `ts-eval` share; free of heavy imports, so that --help is quick."""

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from ts_eval import defaults

WITHOUT_FLAG = "ts_eval.without_flag"
"""Where a click context keeps what a --config file gives for fields that have no flag."""


class Tree(click.ParamType):
    """A token tree: 1,3,3,3 (branching), or "0.0.0 0.1 1" (paths of ranks)."""

    name = "N,N,..."

    def convert(self, value, param, ctx):
        # Imported here because torch takes seconds, which --help should not cost.
        from decoder.options import parse_tree

        if isinstance(value, list):
            # From a file: 1, 3, 3, 3, or the ranks of paths.
            paths = isinstance(value[0], list) if value else False
            ranks = [".".join(map(str, path)) for path in value] if paths else value
            value = (" " if paths else ",").join(map(str, ranks))
        try:
            return parse_tree(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Lists(click.ParamType):
    """Numbers of one kind with commas between them."""

    def __init__(self, kind: type[int] | type[float], name: str, words: str):
        self.kind, self.name, self.words = kind, name, words

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        if isinstance(value, list):
            value = ",".join(map(str, value))
        try:
            return tuple(self.kind(number) for number in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of {self.words}.", param, ctx)


INTEGERS = Lists(int, "N,N,...", "integers such as 100,200")
NUMBERS = Lists(float, "X,X,...", "numbers such as 0,0.5,1")


def number_option(flag: str, default: int | float, help: str | None = None):
    """An option for a number of the kind of its default."""
    return click.option(flag, type=type(default), default=default, show_default=True, help=help)


def numbers_option(flag: str, kind: Lists, default: Iterable[int | float], help: str):
    """An option for a list of numbers."""
    written = ",".join(str(number).removesuffix(".0") for number in default)
    return click.option(flag, type=kind, default=written, show_default=True, help=help)


def sampling_option(flag: str, help: str):
    """An option for the field of `decoder.SamplingParams` of that name."""
    return number_option(flag, defaults.SAMPLING[flag.removeprefix("--").replace("-", "_")], help)


def together(*options):
    """Several options as one decorator, in their order."""

    def add(command):
        for option in reversed(options):
            command = option(command)
        return command

    return add


def from_file(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """The callback of --config: what the file holds becomes the default of the flags that are not typed."""
    if path is None or context.resilient_parsing:
        return path
    # Imported here because it brings torch, which --help should not cost.
    from ts_eval.commands.run_file import read_run_file

    try:
        given = read_run_file(path)
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    known = {each.name: each for each in context.command.params if each.name != parameter.name}
    flags, context.meta[WITHOUT_FLAG] = _by_flag(path, given, known)
    for key, value in flags.items():
        if isinstance(value, str) and (known[key].nargs == -1 or getattr(known[key], "multiple", False)):
            flags[key] = value = [value]
        try:
            known[key].type_cast_value(context, value)
        except (click.BadParameter, TypeError, AttributeError, OverflowError) as error:
            reason = error.message if isinstance(error, click.BadParameter) else f"{value!r} does not fit"
            raise click.ClickException(f"{path}: {key}: {reason}") from error
    context.default_map = flags
    return path


def _by_flag(path: str, given: dict, known: Collection[str | None]) -> tuple[dict, dict[str, dict]]:
    """What a file gives for flags, and for the fields of "options" and "sampling" that only Python can set."""
    from decoder import SamplingParams, TokenSwiftOptions

    kinds: dict[str, type[TokenSwiftOptions] | type[SamplingParams]]
    kinds = {"options": TokenSwiftOptions, "sampling": SamplingParams}
    flags: dict = {}
    without_flag: dict[str, dict] = {name: {} for name in kinds}
    for key, value in given.items():
        section = next((name for name, kind in kinds.items() if key in {field.name for field in fields(kind)}), None)
        if key in known:
            flags[key] = value
        elif section is None:
            raise click.ClickException(f"{path} has an unknown key {key!r}: keys are {', '.join(map(str, known))}")
        else:
            field: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value}
            try:
                kinds[section](**field)
            except (ValueError, TypeError) as error:
                raise click.ClickException(f"{path}: {key}: {error}") from error
            without_flag[section] |= field
    return flags, without_flag


def sampling_of(arguments: dict) -> dict:
    """Take the sampling options out of ``arguments``: those given, and for others the preset's or the defaults.

    To be called before `options_of`, within a command.

    Returns:
        Fields of `decoder.SamplingParams`.
    """
    sampling = {name: arguments.pop(name) for name in defaults.SAMPLING}
    if arguments["preset"] != "paper":
        return sampling
    # Imported here because it reads a file, which --help should not cost.
    from ts_eval.paper.experiments import sampler_for

    context = click.get_current_context()
    given = {name for name in sampling if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    of_model = sampler_for(arguments.get("random_weights") or arguments.get("model"))
    return {name: value if name in given else of_model[name] for name, value in sampling.items()}


def options_of(arguments: dict) -> dict:
    """Take the drafting and cache options out of ``arguments``: those given, and for others the preset's.

    Returns:
        Fields of `decoder.TokenSwiftOptions`.
    """
    # Imported here because it brings torch, which --help should not cost.
    from decoder.options import PAPER_NGRAMS, PAPER_TREE

    paper = {"tree": PAPER_TREE, "ngrams": PAPER_NGRAMS} if arguments.pop("preset") == "paper" else {}
    given = {name: arguments.pop(name, None) for name in ("tree", "ngrams", "budget", "kv_dtype", "offload")}
    return paper | {name: value for name, value in given.items() if value is not None and value is not False}


model_options = together(
    click.option("--model", help="Model folder or hub id.  [default: the reference model]"),
    click.option(
        "--heads",
        multiple=True,
        help="Heads checkpoint, or METHOD=CHECKPOINT; may be repeated.  "
        "[default: the folder heads-NAME beside the model's folder NAME]",
    ),
    click.option("--draft-model", help="Small model that drafts for draft-model, auto, triforce and hf-assisted."),
)
device_options = together(
    click.option("--device", default="auto", show_default=True),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        help="auto: the checkpoint's, on a CPU float32 unless bfloat16 is faster. int8, int4: shorter, on a CPU.",
    ),
)
sanitize_option = click.option(
    "--sanitize-control-tokens",
    is_flag=True,
    help="Control tokens in the messages of a chat, such as <|im_end|>, are text, and not the end of a turn.",
)
bitwise_option = click.option(
    "--bitwise/--no-bitwise",
    default=None,
    help="The same bits for a token's logits whatever shares its pass.  [default: where a test shows that it holds]",
)
yarn_option = click.option(
    "--yarn", type=float, metavar="FACTOR", help="Stretch the length that the model was trained for, with YaRN."
)
sampling_options = together(
    sampling_option("--temperature", "0 is greedy."),
    sampling_option("--top-k", "0 switches off."),
    sampling_option("--top-p", "1 switches off."),
    sampling_option("--min-p", "0 switches off."),
    sampling_option("--eta-cutoff", "0 switches off."),
    sampling_option("--repetition-penalty", "1 switches off."),
    sampling_option("--penalty-window", "Last tokens that are penalised."),
)
drafting_options = together(
    click.option(
        "--preset",
        type=click.Choice(["paper"]),
        help="paper: the paper's tree 1,3,3,3 and k = 20, and the sampler of its Table 10 for the --model, by its name "
        "(for others Llama-3.1-8B's), where other flags say nothing else.",
    ),
    click.option(
        "--tree",
        type=Tree(),
        help="Branching per depth, or paths of ranks (0.0 0.1 1).  [default: chosen step by step by what pays here]",
    ),
    click.option(
        "--ngrams", type=int, help="n-grams retrieved per step, the paper's k.  [default: those of 20 that pay here]"
    ),
    click.option("--budget", type=int, help="Slots of the partial cache.  [default: the prompt's length]"),
)
cache_options = together(
    click.option(
        "--kv-dtype",
        type=click.Choice(["int8", "fp8"]),
        help="Keep the full cache in one byte per number, which makes another text: ar's with the same cache.",
    ),
    click.option("--offload", is_flag=True, help="Keep the full cache in host memory; the text is the same."),
)


ray_options = together(
    click.option("--ray", metavar="ADDRESS", help="Share the prompts over a Ray cluster; auto starts Ray here."),
    number_option("--ray-actors", 1, "Its processes with the model."),
    number_option("--ray-cpus", 1, "Processors and threads of each."),
    number_option("--ray-gpus", 0.0, "GPUs of each."),
)


def prompts_options(help: str):
    """The options for several prompts; ``help`` says what may be given for them."""
    return together(
        click.option("--prompts", help=help),
        click.option(
            "--prompt-tokens", type=int, help="First N tokens of each prompt.  [default: all; 1,024 of a book]"
        ),
        click.option("--num-prompts", type=int, help="At most so many prompts.  [default: all of a file; 1 book]"),
    )


def seed_option(help: str):
    """The option for the seed; ``help`` says what is drawn with it."""
    return number_option("--seed", 0, help)


def output_options(default: str, help: str, overwrite: str = "Drop what other settings left in the output folder."):
    """The options for the folder of results; ``help`` says what is in it."""
    return together(
        click.option("--output", default=default, show_default=True, help=help),
        click.option("--overwrite", is_flag=True, help=overwrite),
    )


books_option = click.option("--data-dir", envvar="TS_DATA_DIR", help="Folder of the reference model and books.")
