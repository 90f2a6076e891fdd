"""The command `decoder`, and `python -m decoder`: which of its commands is meant, and what they need to start.

Standard output gets what was asked for and nothing else. Exit status: 0 done; 1 the run broke off, for instance on a
full disk; 2 wrong usage or input; 130 interrupted.
"""

import argparse
import difflib
import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import NoReturn

from decoder.allocating import give_back
from decoder.cli.completion import candidates, script
from decoder.cli.doctor import doctor_parser
from decoder.cli.parsers import chat_parser, run_parser
from decoder.cli.processes import first_speaks
from decoder.cli.terminal import WRONG_INPUT, program, say
from decoder.collecting import uncollected
from decoder.jobs.flags import batch_parser
from decoder.serve.flags import serve_parser

_LONGEST_MESSAGE = 300  # characters of what the parser says, which repeats what was typed
_SERVE_PACKAGES = ("uvicorn", "starlette", "prometheus_client")


class Parser(argparse.ArgumentParser):
    """A parser that tells of wrong usage in one sentence, not in the whole usage, and which flag may be meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        known: Iterable[str] = self._option_string_actions
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            unknown, known = choice[1], re.findall(r"[\w.-]+", choice[2])
        near = difflib.get_close_matches(unknown, known, 1)
        meant = f"is {near[0]} meant? " if near else ""
        say(f"{message[:_LONGEST_MESSAGE]} ({meant}--help lists the flags)")
        sys.exit(WRONG_INPUT)


Maker = Callable[[type[argparse.ArgumentParser], str], argparse.ArgumentParser]
PARSERS: dict[str, tuple[Maker, str]] = {
    "run": (run_parser, "go on with a text, or answer one message"),
    "chat": (chat_parser, "talk with a model in the terminal"),
    "serve": (serve_parser, "serve a model by OpenAI's protocol"),
    "batch": (batch_parser, "answer a file of requests"),
    "doctor": (doctor_parser, "tell what runs a model on this machine, and why not the rest"),
}
# Where the functions are that are called as the commands.
_MODULES = {"chat": "decoder.cli.chat", "doctor": "decoder.cli.doctor"}
_MODULES |= {"serve": "decoder.serve.command", "batch": "decoder.jobs.command"}


def _run(name: str, args: argparse.Namespace) -> int:
    """Run a command, whose module is imported here alone: PyTorch and transformers take seconds."""
    give_back()
    with _ahead(args):
        with uncollected():
            if not _beside_others(args):
                from decoder.cli.importing import import_transformers

                import_transformers()
            from decoder.cli import run

        if name == "run":
            args.prompt = args.text if args.prompt is None else args.prompt
            return run.run(args)
        return run.in_words(lambda: _imported(name)(args))


def _ahead(args: argparse.Namespace) -> AbstractContextManager[None]:
    """A block that begins with packing a file's weights, where they will stay in its formats."""
    model, *asked = (str(getattr(args, name, "")) for name in ("model", "dtype", "device"))
    if _beside_others(args) or not model.lower().endswith(".gguf") or asked not in (["auto", "auto"], ["auto", "cpu"]):
        return nullcontext()
    with uncollected():
        from decoder.model.gguf.ahead import packing_ahead
    return packing_ahead(model)


def _beside_others(args: argparse.Namespace) -> bool:
    """Whether the work is that of several processes."""
    return getattr(args, "ray", None) is not None or bool(getattr(args, "tensor_parallel", False))


def _imported(name: str) -> Callable[[argparse.Namespace], None]:
    try:
        with uncollected():
            return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _SERVE_PACKAGES:
            raise
        raise ValueError(
            f"serving needs {package}, which is not installed: pip install 'tokenswift-decoder[serve]'"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        say("standard output is closed: send it somewhere, to /dev/null for instance")
        return WRONG_INPUT
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with first_speaks(arguments):
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("--help", "-h"):
        print(_overview())
        return 0
    if first == "--version":
        # Slow to import, and needed here alone.
        from importlib.metadata import version

        print(f"decoder {version('tokenswift-decoder')}")
        return 0
    if first == "completion":
        return _completion(arguments[1:])
    if first == "__complete":
        print("\n".join(candidates(arguments[1:], {name: make for name, (make, _) in PARSERS.items()}, Parser)))
        return 0
    if first.startswith("-"):
        # As it was called before there were commands.
        name, rest, prog = "run", arguments, program()
    elif first in PARSERS:
        name, rest, prog = first, arguments[1:], f"{program()} {first}"
    else:
        near = difflib.get_close_matches(first, PARSERS, 1)
        meant = f"is {near[0]} meant?" if near else f"use one of {', '.join(PARSERS)}"
        say(f"there is no command {first[:_LONGEST_MESSAGE]}: {meant}")
        return WRONG_INPUT
    return _run(name, PARSERS[name][0](Parser, prog).parse_args(rest))


def _overview() -> str:
    commands = "\n".join(f"  {name:<12}{words}" for name, (_, words) in PARSERS.items())
    return f"""usage: {program()} COMMAND ...

Lossless acceleration of long texts by models of Hugging Face.

commands:
{commands}
  completion  print what a shell (bash, zsh or fish) needs to complete commands and flags

{program()} COMMAND --help lists the flags of a command, {program()} --version tells the version.
Flags without a command are those of run."""


def _completion(arguments: list[str]) -> int:
    shells = ("bash", "zsh", "fish")
    if len(arguments) != 1 or arguments[0] not in shells:
        say(f"completion takes one of {', '.join(shells)}")
        return WRONG_INPUT
    print(script(arguments[0]))
    return 0


def end() -> NoReturn:
    """Run the command and end the process with its status."""
    status = main()
    # Python would look for cycles among all that PyTorch and transformers have made, which takes a second or two.
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    end()
