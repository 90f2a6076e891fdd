"""The flags of `decoder batch`."""

import argparse
from pathlib import Path

from decoder.cli.flags import add_drafting_flags, add_loading_flags, add_sanitize_flag

_MAX_BATCH = 16


def batch_parser(parser: type[argparse.ArgumentParser], prog: str) -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    asked = parser(
        prog=prog,
        description="Answer a file of requests. What has been answered when the command ends, however it ends, is kept "
        "in OUT.journal, and the same command goes on from there.",
        allow_abbrev=False,
    )
    asked.add_argument(
        "requests",
        type=Path,
        metavar="IN",
        help="JSON lines, or Parquet if it ends in .parquet: OpenAI's batch requests, or objects with a prompt or "
        "messages and further fields of a request",
    )
    asked.add_argument("answers", type=Path, metavar="OUT", help="the answers, in the order of the requests")
    add_loading_flags(asked)
    asked.add_argument(
        "--defaults", metavar="JSON", help="""fields for requests that lack them, such as '{"max_tokens": 200}'"""
    )
    asked.add_argument(
        "--max-batch", type=int, default=_MAX_BATCH, metavar="N", help="texts that are decoded together (%(default)s)"
    )
    add_sanitize_flag(asked.add_argument_group("chats"))
    ray = asked.add_argument_group("ray", "answer on a cluster; needs the extra `ray`")
    ray.add_argument("--ray", metavar="ADDRESS", help="of a cluster; auto starts Ray on this machine")
    ray.add_argument("--ray-actors", type=int, metavar="N", help="decoders, each with weights of its own (default: 1)")
    ray.add_argument("--ray-cpus", type=int, metavar="N", help="processors, and threads, of each (default: 1)")
    ray.add_argument("--ray-gpus", type=float, metavar="X", help="GPUs of each (default: 0)")
    add_drafting_flags(asked, "for requests that do not name one (default: auto)")
    return asked
