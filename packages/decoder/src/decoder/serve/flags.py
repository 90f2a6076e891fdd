"""The flags of `decoder serve`."""

import argparse
from pathlib import Path

from decoder.cli.flags import add_drafting_flags, add_loading_flags, add_sanitize_flag
from decoder.serve.settings import Settings


def serve_parser(parser: type[argparse.ArgumentParser], prog: str) -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    asked = parser(
        prog=prog,
        description="Serve a model by OpenAI's protocol: /v1/completions, /v1/chat/completions, /v1/models.",
        allow_abbrev=False,
    )
    add_loading_flags(asked)
    server = asked.add_argument_group("server")
    default = Settings("")
    server.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: %(default)s; 0 takes a free one")
    server.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin, such as https://example.org, use the server from a browser; may be repeated, "
        "and * is any (default: none)",
    )
    add_sanitize_flag(server)
    server.add_argument("--api-key-file", type=Path, metavar="F", help="file with the key that clients must send")
    for name, words in (
        ("max_batch", "texts that are decoded together"),
        ("max_queue", "texts that may wait; others are refused (429)"),
        ("max_tokens", "new tokens that a text may have, also where a chat asks for no number"),
    ):
        flag, value = "--" + name.replace("_", "-"), getattr(default, name)
        server.add_argument(flag, type=int, default=value, metavar="N", help=words + " (default: %(default)s)")
    server.add_argument(
        "--prefix-cache-bytes",
        type=int,
        metavar="N",
        help="kept of the caches of ended texts, for prompts that begin alike (default: 1 GiB with bitwise, else 0)",
    )
    for name, words in (
        ("timeout", "seconds that a request may take, the queue included"),
        ("grace", "seconds that running requests have to end when the server is told to stop"),
    ):
        value = getattr(default, name)
        server.add_argument(f"--{name}", type=float, default=value, metavar="S", help=words + " (default: %(default)s)")
    add_drafting_flags(asked, "for requests that do not name one (default: auto)")
    return asked
