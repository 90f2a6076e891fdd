"""`decoder batch IN OUT`: answer a file of requests; run again, it goes on where it was cut."""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch

from decoder.checks import parse_json
from decoder.cli.flags import check_flags, check_sources, from_flags, load_from_flags
from decoder.cli.terminal import BrokeOff, StatusLine
from decoder.jobs.answering import Answering, Broken, Row
from decoder.jobs.job import Job
from decoder.jobs.lines import Line, Requests
from decoder.jobs.on_ray import Cluster, Do
from decoder.model.target import Target
from decoder.options import TokenSwiftOptions
from decoder.prefix_reuse import PrefixReuse, prefix_reuse, usual_bytes
from decoder.serve.settings import name_of

# An actor has twice the requests that it decodes together, so that others follow those that are done, in parts: its
# answers come part by part, and where no requests are left, none has many more of them than another.
_BLOCKS = 4
_BATCHES = 2


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
    cluster = cluster_of(args)
    check_sources(args)
    requests = Requests(args.requests, _defaults(args.defaults))
    with Job(requests, args.answers) as job:
        load = partial(answering_from, args, requests.shared_tokens)
        try:
            if cluster is None:
                _here(job, load)
            else:
                _on_cluster(job, load, cluster, -(-args.max_batch * _BATCHES // _BLOCKS))
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


def reuse_for(target: Target, shared_tokens: int | None) -> PrefixReuse | None:
    """What keeps as much of texts as others may begin with; see `Requests.shared_tokens`.

    What is kept of each text costs more than it saves where no prompt begins like another. Of a template it is enough
    to keep that of the text before.
    """
    most = usual_bytes(target)
    if shared_tokens is not None:
        needed = shared_tokens * (target.kv_bytes + torch.int32.itemsize) + target.beside_bytes(shared_tokens)
        most = min(most, needed) if shared_tokens else 0
    return prefix_reuse(target, most)


def answering_from(args: argparse.Namespace, shared_tokens: int | None) -> Answering:
    """Load what the flags name. Raises as `decoder.load` does, and ValueError without a tokenizer."""
    dec = load_from_flags(args)
    if dec.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, which a file of requests needs")
    dec.prefixes = reuse_for(dec.target, shared_tokens)
    return Answering(
        dec, name_of(args.model), args.max_batch, method=args.method, options=from_flags(TokenSwiftOptions, args)
    )


def cluster_of(args: argparse.Namespace) -> Cluster | None:
    """The cluster that the flags name, if any. Raises ValueError for one that goes with none."""
    given = {name: getattr(args, f"ray_{name}") for name in ("actors", "cpus", "gpus")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.ray is not None:
        return Cluster(args.ray, **given)
    if given:
        raise ValueError(f"--ray-{next(iter(given))} goes with --ray")
    return None


def _here(job: Job, load: Callable[[], Answering]) -> None:
    """Answer in this process."""
    answering = load()
    job.open()
    job.begin(answering.identity())
    rest = job.rest()
    if not rest:
        return
    with _Telling(job, len(rest)) as done:
        answering.answer((job.requests[number] for number in rest), job.created, done)


def _on_cluster(job: Job, load: Callable[[], Answering], cluster: Cluster, block: int) -> None:
    """Answer by actors. The first answer tells who answers; where all are there, the first request is asked again."""
    job.open()
    rest = job.rest()
    asked = [job.requests[number] for number in rest or job.requests.order[:1]]
    begun = False
    with (
        _Telling(job, len(rest)) as done,
        closing(cluster.map(partial(_ready, load, job.created), asked, block, _BLOCKS)) as rows,
    ):
        for line, row, identity in rows:
            if not begun:
                job.begin(identity)
                begun = True
            done(line, row)


def _ready(load: Callable[[], Answering], created: int) -> tuple[Do, dict[str, Any]]:
    """What an actor needs to answer."""
    answering = load()

    def do(lines: list[Line]) -> list[Row]:
        rows: dict[int, Row] = {}
        answering.answer(lines, created, lambda line, row: rows.update({line.number: row}))
        return [rows[line.number] for line in lines]

    return do, answering.identity()


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
        left = seconds / self._rows * max(0, self._count - self._rows)  # on a cluster the first one may be asked again
        speed = f"{self._tokens / seconds:,.0f} tokens/s"
        whole = len(self._job.requests)
        self._line.show(f"{self._job.answered:,} of {whole:,} answers, {speed}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
