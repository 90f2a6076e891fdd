"""The command `heads-train` until it is known what is asked for.

Help, version and a mistyped command are answered here. To import Lightning and to make its parser takes 4 to 8 seconds
of processor time, so the help texts are kept in `help/` as the parser writes them for a terminal of 80 columns.
``python -m heads_train.keep_help`` writes them, and a test compares them with the parser's.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KEPT = Path(__file__).parent / "help"
COMMANDS = ("fit", "validate", "test", "push", "export")
LIGHTNING = "2.6"
"""Whose flags the kept texts list: another version has its parser asked."""
_HELP = ("--help", "-h")
_WRONG_INPUT = 2


def kept_help(args: Sequence[str]) -> str | None:
    """The help that is asked for, if nothing else is and the installed Lightning is the one whose flags it has."""
    asked = [*args] if args else ["--help"]
    if asked[-1] not in _HELP or len(asked) > 2 or (len(asked) == 2 and asked[0] not in COMMANDS):
        return None
    if ".".join(version("lightning").split(".")[:2]) != LIGHTNING:
        return None
    return (KEPT / f"{asked[0] if len(asked) == 2 else 'heads-train'}.txt").read_text(encoding="utf-8")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, as `heads_train.cli.main` says."""
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        try:
            print(f"heads-train {version('tokenswift-heads-train')}")
        except PackageNotFoundError:
            print("heads-train, which is on the path and not installed")
        return 0
    if (text := kept_help(args)) is not None:
        print(text, end="")
        return 0
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0][:80], COMMANDS, 1)
        words = f"is {near[0]} meant?" if near else f"use one of {', '.join(COMMANDS)}"
        print(f"heads-train: there is no command {args[0][:80]}: {words}", file=sys.stderr)
        return _WRONG_INPUT

    from heads_train.cli import main as with_lightning

    return with_lightning(args)
