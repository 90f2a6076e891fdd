"""`decoder chat`: a conversation in the terminal."""

import argparse
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from decoder.checks import decoded
from decoder.cli.flags import check_flags, check_sources, constraint_of, from_flags, load_from_flags
from decoder.cli.run import put
from decoder.cli.terminal import StatusLine, rates
from decoder.decoder import Decoder
from decoder.options import TokenSwiftOptions
from decoder.prefix_reuse import prefix_reuse
from decoder.sampling.params import SamplingParams

_KEPT_BYTES = 2**30  # of the caches of earlier turns, at most
_NEW, _END = "/new", "/exit"


def chat(args: argparse.Namespace) -> None:
    """Answer one line after the other until the input ends.

    Raises:
        ValueError, OSError: as `decoder.load` does; or a flag is out of range, or the model has no chat template.
    """
    check_flags(args)
    check_sources(args)
    sampling, options = from_flags(SamplingParams, args), from_flags(TokenSwiftOptions, args)
    sampling = replace(sampling, constraint=constraint_of(args))
    dec = load_from_flags(args)
    if dec.tokenizer is None or not dec.tokenizer.chat_template:
        raise ValueError(f"{args.model} has no chat template, as base models have none: use decoder run")
    if dec.bitwise:
        # The next turn begins with all that was said before.
        dec.prefixes = prefix_reuse(dec.target, _KEPT_BYTES)
    begin = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(begin)
    while (line := _line()) is not None and line != _END:
        if line == _NEW:
            messages = list(begin)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(dec, messages, args, sampling, options)
            messages.append({"role": "assistant", "content": answer})


def _line() -> str | None:
    """The next line of the input; None at its end."""
    if sys.stdin is None:
        return None
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.readline()
        return decoded(data, "standard input").strip() if data else None
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` a history)
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _answer(
    dec: Decoder,
    messages: list[dict[str, str]],
    args: argparse.Namespace,
    sampling: SamplingParams,
    options: TokenSwiftOptions,
) -> str:
    """Stream one answer; Ctrl-C ends it where it is."""
    text, last = "", None
    stream: Any = dec.stream(messages, args.max_new_tokens, args.method, sampling, options)
    with closing(stream), StatusLine(sys.stderr) as status:
        try:
            for last in stream:
                text += last.text
                put(last.text)
                status.show(f"{last.stats.generated:,} tokens{rates(last.stats)}")
        except KeyboardInterrupt:
            pass
    put("\n")
    if last is not None and sys.stderr.isatty():
        print(f"{last.stats.generated:,} tokens{rates(last.stats)}", file=sys.stderr)
    return text
