"""Processes that share the work of one experiment."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from ts_eval.compare import Experiment


@contextmanager
def working_beside(experiment: "Experiment") -> Iterator[Callable[[], None]]:
    """Start the processes beside this one; gives a check that raises OSError when one of them has failed.

    None are started where a launcher has, or where one process is all that was asked for.
    """
    if experiment.rank is not None or experiment.processes == 1:
        yield lambda: None
        return
    context = multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    children = []
    for rank in range(1, experiment.processes):
        arguments = (replace(experiment, rank=rank), torch.get_num_threads(), failures)
        children.append(context.Process(target=_work, args=arguments, daemon=True))
    for child in children:
        child.start()

    def check() -> None:
        if not failures.empty():
            raise OSError(failures.get())
        codes = [child.exitcode for child in children if child.exitcode]
        if codes:
            raise OSError(f"one of the {experiment.processes} processes ended with status {codes[0]}")

    try:
        yield check
    finally:
        for child in children:
            child.terminate()
            child.join()


def _work(experiment: "Experiment", threads: int, failures) -> None:
    """What a process beside rank 0 does; its failure is told to rank 0 in a sentence."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        experiment.run()
    except (ValueError, OSError, MemoryError) as error:
        failures.put(str(error))
    except KeyboardInterrupt:
        sys.exit(1)
