"""The flags of `decoder run` and `decoder chat`."""

import argparse
from pathlib import Path

from decoder.cli.flags import add_constraint_flags, add_drafting_flags, add_flags, add_loading_flags, add_sanitize_flag
from decoder.cli.processes import FLAG
from decoder.sampling.params import SamplingParams


def run_parser(parser: type[argparse.ArgumentParser], prog: str) -> argparse.ArgumentParser:
    """The parser of `decoder run`."""
    asked = parser(prog=prog, description="Stream a continuation of a prompt to the terminal.", allow_abbrev=False)
    add_loading_flags(asked)
    asked.add_argument(FLAG, action="store_true", help="the processes that torchrun has started share the model")
    prompts = asked.add_argument_group("prompt", "one of these, or text piped into standard input")
    prompt = prompts.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-file", metavar="F", help="UTF-8 text; - is standard input")
    prompt.add_argument("--prompt", metavar="TEXT", help="the text itself")
    prompt.add_argument("text", nargs="?", metavar="PROMPT", help="the same")
    prompt.add_argument("--chat", metavar="TEXT", help="a message to a chat model")
    prompts.add_argument("--system", metavar="TEXT", help="the system message before it")
    add_sanitize_flag(prompts)
    length = asked.add_argument_group("length")
    length.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="default: until a stop or the model's last position"
    )
    length.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    length.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    output = asked.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="write the text there too, as it comes, and FILE.tokens beside it"
    )
    output.add_argument("--resume", action="store_true", help="go on with what a cut run has left in --output, if any")
    output.add_argument("--audit", action="store_true", help="score the text again afterwards and say what was found")
    add_flags(asked.add_argument_group("sampling"), SamplingParams)
    shape = asked.add_argument_group("shape", "one of these says what the output must be")
    add_constraint_flags(shape.add_mutually_exclusive_group())
    add_drafting_flags(asked, "default: auto, which needs exact verification", " (but see --verification)")
    return asked


def chat_parser(parser: type[argparse.ArgumentParser], prog: str) -> argparse.ArgumentParser:
    """The parser of `decoder chat`."""
    asked = parser(
        prog=prog,
        description="Talk with a chat model: a line is a message, /new begins another chat, Ctrl-C stops an answer, "
        "Ctrl-D ends.",
        allow_abbrev=False,
    )
    add_loading_flags(asked)
    asked.add_argument("--system", metavar="TEXT", help="the system message")
    add_sanitize_flag(asked)
    asked.add_argument("--max-new-tokens", type=int, metavar="N", help="of an answer; default: as far as it goes")
    add_flags(asked.add_argument_group("sampling"), SamplingParams)
    shape = asked.add_argument_group("shape", "one of these says what each answer must be")
    add_constraint_flags(shape.add_mutually_exclusive_group())
    add_drafting_flags(asked)
    return asked
