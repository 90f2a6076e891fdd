"""Answers a file of requests on a cluster, by Ray: actors that each hold a decoder, over blocks of requests.

Scheduling, transport and retries are Ray's. A block whose actor dies is answered again elsewhere, by the same texts,
and the journal takes each answer once.
"""

import argparse
import json
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from decoder.jobs.answering import Answering, Row
from decoder.jobs.job import Job
from decoder.jobs.lines import Line

_BATCHES = 2  # of requests in a block, so that few are answered again where an actor dies

Load = Callable[[], Answering]
Telling = Callable[[int], AbstractContextManager[Callable[[Line, Row], None]]]


def answer_on_ray(job: Job, args: argparse.Namespace, load: Load, telling: Telling) -> None:
    """Answer all requests of ``job`` that have no answer.

    Args:
        args: the command's flags.
        load: makes what answers, in the process of an actor.
        telling: gives what records the rows of so many requests.

    Raises:
        ValueError: Ray is not installed.
        OSError: there is no cluster at the address, or an actor has failed: its node is named.
    """
    cpus, gpus, actors = args.ray_cpus or 1, args.ray_gpus or 0, args.ray_actors or 1
    with _cluster(args.ray) as ray:
        try:
            # One worker says first what answers here, so that all others must be the same.
            identity = ray.get(ray.remote(num_cpus=cpus, num_gpus=gpus)(_identity).remote(load, cpus))
            job.begin(identity)
            rest = job.rest()
            if not rest:
                return
            size = args.max_batch * _BATCHES
            asked = [{"line": json.dumps(job.requests[number])} for number in rest]
            # Ray starts an actor that has died again, elsewhere if it must, and gives it its blocks once more.
            answered = ray.data.from_items(asked, override_num_blocks=math.ceil(len(rest) / size)).map_batches(
                _Actor,
                fn_constructor_args=(load, cpus, identity, job.created),
                batch_size=size,
                compute=ray.data.ActorPoolStrategy(size=actors),
                num_cpus=cpus,
                num_gpus=gpus,
            )
            with telling(len(rest)) as done:
                for answer in answered.iter_rows():
                    done(Line(*json.loads(answer["line"])), json.loads(answer["row"]))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            words = " ".join(str(cause).split())[-300:]
            raise OSError(f"Ray: {words}") from error


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """The module `ray`, connected to a cluster."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise ValueError("--ray needs Ray: pip install 'tokenswift-decoder[ray]'") from None
    for logger in ("ray", "ray.data"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    given: dict[str, Any] = {"include_dashboard": False} if address == "auto" else {"address": address}
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR, **given)
    except (ConnectionError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())[:200]
        raise OSError(f"there is no Ray cluster at {address} ({words}): start one, or use --ray auto") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield ray
    finally:
        ray.shutdown()


def _loaded(load: Load, cpus: int) -> Answering:
    torch.set_num_threads(cpus)
    return load()


def _identity(load: Load, cpus: int) -> dict[str, Any]:
    """What tells the answers of this worker from those of others."""
    return _loaded(load, cpus).identity()


class _Actor:
    """A process of the cluster that answers blocks of requests."""

    def __init__(self, load: Load, cpus: int, identity: dict[str, Any], created: int):
        self._answering, self._created = _loaded(load, cpus), created
        own = self._answering.identity()
        if own != identity:
            name = next(name for name in identity if own.get(name) != identity[name])
            raise ValueError(
                f"the worker on {socket.gethostname()} has another {name.replace('_', ' ')} than the first one: "
                f"give all nodes the same model and versions"
            )

    def __call__(self, block: dict[str, Sequence[str]]) -> dict[str, list[str]]:
        asked = [Line(*json.loads(line)) for line in block["line"]]
        rows: dict[int, Row] = {}
        self._answering.answer(asked, self._created, lambda line, row: rows.update({line.number: row}))
        return {"line": list(block["line"]), "row": [json.dumps(rows[line.number]) for line in asked]}
