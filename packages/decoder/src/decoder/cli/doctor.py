"""`python -m decoder doctor`: which fast paths a model uses on this machine, and why not."""

import argparse
from collections.abc import Sequence

from decoder.loader import load
from decoder.model.loading import check_source


def doctor(arguments: Sequence[str], parser: type[argparse.ArgumentParser]) -> str:
    """The report of a model that is loaded as it would be for decoding.

    Raises:
        ValueError, OSError: a model, heads or a device that cannot be had.
    """
    asked = parser(
        prog="python -m decoder doctor",
        description="Tell which fast paths a model uses on this machine, and why not: put it into an issue.",
        allow_abbrev=False,
    )
    asked.add_argument("--model", required=True, metavar="M", help="model folder or hub id")
    asked.add_argument("--heads", metavar="H", help="heads checkpoint folder or hub id")
    asked.add_argument("--draft-model", metavar="M", help="small model's folder or hub id, for triforce")
    asked.add_argument("--device", default="auto", metavar="D", help="cpu or cuda (default: cuda where there is one)")
    asked.add_argument("--dtype", default="auto", metavar="T", help="default: float32 on a CPU, else the checkpoint's")
    args = asked.parse_args(arguments)
    for name, source in (("model", args.model), ("heads", args.heads), ("draft model", args.draft_model)):
        if source is not None:
            check_source(name, source)
    decoder = load(args.model, args.heads, draft_model=args.draft_model, device=args.device, dtype=args.dtype)
    return decoder.report()
