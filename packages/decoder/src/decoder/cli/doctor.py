"""`decoder doctor`: what runs a model on this machine, and why not the rest."""

import argparse

from decoder.cli.flags import add_loading_flags, check_flags, check_sources, load_from_flags


def doctor_parser(parser: type[argparse.ArgumentParser], prog: str) -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    asked = parser(
        prog=prog,
        description="Tell what runs a model on this machine, and why not the rest: put it into an issue.",
        allow_abbrev=False,
    )
    add_loading_flags(asked, "anew")
    return asked


def doctor(args: argparse.Namespace) -> None:
    """Load a model as it would be for decoding, and print its report.

    Raises:
        ValueError, OSError: as `decoder.load` does.
    """
    check_flags(args)
    check_sources(args)
    print(load_from_flags(args).report())
