"""`decoder batch IN OUT`: answer a file of requests; run again, it goes on where it was cut."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from decoder.checks import parse_json
from decoder.cli.flags import check_flags, check_sources, from_flags, load_from_flags
from decoder.cli.terminal import BrokeOff, StatusLine
from decoder.jobs.answering import Answering, Broken, Row
from decoder.jobs.job import Job
from decoder.jobs.lines import Line, Requests
from decoder.options import TokenSwiftOptions
from decoder.prefix_reuse import prefix_reuse, usual_bytes
from decoder.serve.settings import name_of


def batch(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError, OSError: as `decoder.load` does; or a line of the file is no request.
        BrokeOff: the answers cannot be written, or the decoder has failed.
    """
    check_flags(args)
    if args.max_batch < 1:
        raise ValueError(f"--max-batch must be at least 1, not {args.max_batch}")
    if from_flags(TokenSwiftOptions, args).verification != "exact":
        raise ValueError(f"a file needs exact verification, not {args.verification}: texts share its passes")
    for name in ("ray_actors", "ray_cpus", "ray_gpus"):
        if getattr(args, name) is not None and args.ray is None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --ray")
    check_sources(args)
    requests = Requests(args.requests, _defaults(args.defaults))
    with Job(requests, args.answers) as job:
        load = partial(answering_from, args, requests.shares_beginnings)
        try:
            if args.ray is None:
                _here(job, load)
            else:
                from decoder.jobs.on_ray import answer_on_ray

                answer_on_ray(job, args, load, partial(_Telling, job))
            errors = job.finish()
        except (OSError, Broken) as error:
            if not job.begun:
                raise
            raise BrokeOff(f"{job.answered:,} of {len(requests):,} answers are kept: run it again") from error
    failed = f", {errors:,} of them errors" if errors else ""
    print(f"{args.answers}: {len(requests):,} answers{failed}", file=sys.stderr)


def _defaults(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    found = parse_json(text, "--defaults")
    if not isinstance(found, dict):
        raise ValueError("--defaults must be a JSON object with fields of a request")
    return found


def answering_from(args: argparse.Namespace, shares_beginnings: bool) -> Answering:
    """Load what the flags name. Raises as `decoder.load` does, and ValueError without a tokenizer."""
    dec = load_from_flags(args)
    if dec.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, which a file of requests needs")
    # What is kept of each text costs more than it saves where no prompt begins like another.
    dec.prefixes = prefix_reuse(dec.target, usual_bytes(dec.target)) if shares_beginnings else None
    return Answering(
        dec, name_of(args.model), args.max_batch, method=args.method, options=from_flags(TokenSwiftOptions, args)
    )


def _here(job: Job, load: Callable[[], Answering]) -> None:
    """Answer in this process."""
    answering = load()
    job.begin(answering.identity())
    rest = job.rest()
    if not rest:
        return
    with _Telling(job, len(rest)) as done:
        answering.answer((job.requests[number] for number in rest), job.created, done)


class _Telling:
    """Records rows, and shows what is done on the terminal.

    Args:
        count: how many requests have no answer yet.
    """

    def __init__(self, job: Job, count: int):
        self._job, self._count, self._tokens, self._rows = job, count, 0, 0
        self._began, self._line = time.monotonic(), StatusLine(sys.stderr)

    def __enter__(self) -> Callable[[Line, Row], None]:
        self._line.__enter__()
        return self._done

    def __exit__(self, *error: object) -> None:
        self._line.__exit__(*error)

    def _done(self, line: Line, row: Row) -> None:
        self._job.record(line.number, row)
        self._rows += 1
        self._tokens += row["response"]["body"].get("usage", {}).get("completion_tokens", 0)
        seconds = time.monotonic() - self._began
        left = seconds / self._rows * (self._count - self._rows)
        speed = f"{self._tokens / seconds:,.0f} tokens/s"
        whole = len(self._job.requests)
        self._line.show(f"{self._job.answered:,} of {whole:,} answers, {speed}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
