"""`python -m decoder doctor`: what runs a model on this machine, and why not the rest."""

import argparse
from collections.abc import Sequence

from decoder.cli.flags import add_loading_flags, check_flags, check_sources, load_from_flags


def doctor(arguments: Sequence[str], parser: type[argparse.ArgumentParser]) -> str:
    """Load a model as it would be for decoding, and return its report.

    Raises:
        ValueError, OSError: as `decoder.load` does.
    """
    asked = parser(
        prog="python -m decoder doctor",
        description="Tell what runs a model on this machine, and why not the rest: put it into an issue.",
        allow_abbrev=False,
    )
    add_loading_flags(asked)
    args = asked.parse_args(arguments)
    check_flags(args)
    check_sources(args)
    return load_from_flags(args).report()
