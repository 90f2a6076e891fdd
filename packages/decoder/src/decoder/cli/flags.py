"""Command-line flags, made from the fields and docstrings of the settings records, and those for loading."""

import argparse
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

from decoder.allocating import keep
from decoder.checks import check, shown
from decoder.options import (
    CACHES,
    DRAFT_CACHES,
    KV_DTYPES,
    METHOD_NAMES,
    VERIFICATIONS,
    TokenSwiftOptions,
    parse_tree,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decoder.constraints import Grammar
    from decoder.decoder import Decoder

Settings = TypeVar("Settings")
_METAVARS = {bool: None, int: "N", float: "X", str: "NAME"}


def _tree(text: str) -> tuple:
    try:
        return parse_tree(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"token ids are written like 3,17, not {shown(text)}") from None


def _biases(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"biases are written like 3:2.5,17:-100, not {shown(text)}") from None


_CHOICES = {"cache": CACHES, "draft_cache": DRAFT_CACHES, "verification": VERIFICATIONS, "kv_dtype": KV_DTYPES}
# Help texts that differ from the docstring, which writes trees in Python's syntax.
_WORDS = {
    "tree": "branching per depth: candidates for the next token, then those of each head under every parent "
    "(1,3,3,3 is the paper's); or paths of ranks, as in '0.0.0 0.1 1' (default: chosen step by step from what "
    "verifications cost here and what was accepted)"
}
_TUPLES = {"tree": (_tree, "TREE"), "suppress_tokens": (_ids, "IDS"), "logit_bias": (_biases, "ID:X,...")}
_REPEATED = {"bad_words": "TEXT"}
_WITHOUT = {"constraint", "continued_tokens"}  # fields that have flags of their own, or follow from others


def add_loading_flags(parser: argparse.ArgumentParser, tests: str = "kept") -> None:
    """Add the flags for what is loaded, and how; ``tests`` is the default of theirs."""
    parser.add_argument("--model", required=True, metavar="M", help="model folder or hub id")
    parser.add_argument(
        "--heads",
        metavar="H",
        help="heads checkpoint folder or hub id (default: beside the model's folder NAME, the folder heads-NAME or one "
        "of heads that were trained on NAME, or what the model has built in, which mtp names)",
    )
    parser.add_argument("--draft-model", metavar="M", help="small model's folder or hub id, for triforce")
    parser.add_argument("--device", default="auto", metavar="D", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="T",
        help="default: the checkpoint's, on a CPU float32 unless bfloat16 is faster; int8, int4: shorter, on a CPU",
    )
    parser.add_argument(
        "--bitwise",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="the same bits for a token's logits whatever shares its pass (default: where a test shows that it holds)",
    )
    parser.add_argument(
        "--tests",
        choices=("kept", "always", "anew"),
        default=tests,
        help="those at load: kept relies on their last outcome while nothing has changed that they depend on, always "
        f"runs them, anew runs them and keeps the outcome (default: {tests})",
    )
    parser.add_argument(
        "--yarn",
        type=float,
        metavar="FACTOR",
        help="stretch the length that the model was trained for by this factor, with YaRN or what the model has for "
        "that (changes all logits)",
    )


def check_flags(args: argparse.Namespace) -> None:
    """Refuse numbers that no float holds and texts that no UTF-8 holds. Raises ValueError with the flag."""
    for name, value in vars(args).items():
        check(str(value) if isinstance(value, Path) else value, flag(name))


def check_sources(args: argparse.Namespace) -> None:
    """Check that what the flags of `add_loading_flags` name exists. Raises as `decoder.load` does."""
    from decoder.model.loading import check_source

    for name, source in (("model", args.model), ("heads", args.heads), ("draft model", args.draft_model)):
        if source is not None and (name, source) != ("heads", "mtp"):
            check_source(name, source)


def heads_of(args: argparse.Namespace) -> str | None:
    """The heads that --heads names, or else those that the method drafts with beside the model's folder, if any."""
    from decoder.heads_beside import heads_beside

    return args.heads or heads_beside(args.model).get(getattr(args, "method", None) or "auto")


def add_sanitize_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--sanitize-control-tokens",
        action="store_true",
        help="control tokens in the messages of a chat, such as <|im_end|>, are text, and not the end of a turn",
    )


def load_from_flags(
    args: argparse.Namespace, tensor_parallel: bool = False, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "Decoder":
    """Load what the flags of `add_loading_flags` name; a ``tokenizer`` that was read before is not read again.

    Raises as `decoder.load` does.
    """
    from decoder.loader import load

    loaded = load(
        args.model,
        heads_of(args),
        tokenizer=tokenizer,
        draft_model=args.draft_model,
        device=args.device,
        dtype=args.dtype,
        bitwise=args.bitwise,
        tensor_parallel=tensor_parallel,
        sanitize_control_tokens=getattr(args, "sanitize_control_tokens", False),
        tests=args.tests,
        yarn=args.yarn,
    )
    keep()
    return loaded


def add_flags(group: argparse._ArgumentGroup, settings: type) -> None:
    """Add a flag for each field of a dataclass; its help is in `_WORDS` or in the class's docstring."""
    hints, words = get_type_hints(settings), _documented(settings)
    for field in fields(settings):
        default: Any = field.default
        if field.name in _WITHOUT:
            continue
        kind: Any = str
        metavar = _REPEATED.get(field.name)
        if field.name in _REPEATED:
            default = None
        elif field.name in _TUPLES:
            kind, metavar = _TUPLES[field.name]
            default = ",".join(map(str, default or ())) or None
        else:
            hint = hints[field.name]
            kind, metavar = next((k, m) for k, m in _METAVARS.items() if k is hint or k in get_args(hint))
        if kind is bool:
            typed: dict[str, Any] = dict(action=argparse.BooleanOptionalAction)
        elif field.name in _CHOICES:
            typed = dict(choices=_CHOICES[field.name])
        else:
            typed = dict(type=kind, metavar=metavar)
        if field.name in _REPEATED:
            typed["action"] = "append"
        shown = "" if default is None or kind is bool else " (default: %(default)s)"
        group.add_argument(
            flag(field.name),
            default=default,
            help=_WORDS.get(field.name, words[field.name]).replace("%", "%%") + shown,
            **typed,
        )


def from_flags(settings: type[Settings], args: argparse.Namespace) -> Settings:
    """Make the record from the parsed flags; it validates itself."""
    given = {field.name: getattr(args, field.name, None) for field in fields(cast(Any, settings))}
    return settings(**{name: value for name, value in given.items() if value is not None})


def add_drafting_flags(parser: argparse.ArgumentParser, default: str = "default: auto", but: str = "") -> None:
    """Add the flags for how to draft; ``default`` says what the method is for that is named."""
    group = parser.add_argument_group("drafting", f"changes the speed, never the text{but}")
    group.add_argument("--method", choices=METHOD_NAMES, help=default)
    add_flags(group, TokenSwiftOptions)


def add_constraint_flags(group: Any) -> None:
    """Add the flags for what the output must be; ``group`` lets one of them be given."""
    group.add_argument("--json-schema", metavar="F", help="JSON that holds to the schema in this file")
    group.add_argument("--regex", metavar="PATTERN", help="text that this regular expression matches as a whole")
    group.add_argument("--grammar", metavar="F", help="text of the Lark or GBNF grammar in this file")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; may be repeated")


def constraint_of(args: argparse.Namespace) -> "Grammar | None":
    """The constraint that the flags of `add_constraint_flags` ask for, if any.

    Raises:
        ValueError: it cannot be kept, or its file holds no text.
        OSError: its file cannot be read.
    """
    from decoder.constraints import choice, grammar, json_schema, regex

    if args.json_schema is not None:
        return json_schema(_text_of(args.json_schema))
    if args.regex is not None:
        return regex(args.regex)
    if args.grammar is not None:
        return grammar(_text_of(args.grammar))
    return None if args.choice is None else choice(args.choice)


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text") from error


def flag(name: str) -> str:
    """The flag for a field: ``--min-p`` for ``min_p``."""
    return "--" + name.replace("_", "-")


def _documented(settings: type) -> dict[str, Any]:
    """The entries of the docstring's ``Args``, by field."""
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(settings), re.MULTILINE)
    return {name: " ".join(text.split()).replace("`", "") for name, text in entries}
