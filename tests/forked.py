"""A command in a process of its own, forked from this one, so that nothing is imported again.

To import PyTorch and transformers takes a process as long as ten short tests. A forked one can be killed, interrupted
and waited for like any other. It cannot show what a fresh interpreter would import, and cannot use CUDA where this
process has: commands are to be given the CPU.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch

_FORK = multiprocessing.get_context("fork")


def forked(
    main: Callable[[Sequence[str]], int | None],
    arguments: Sequence[object],
    stdout: int | None = None,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> multiprocessing.Process:
    """Start ``main(arguments)``, with its standard streams on these file descriptors; its exit code is what it returns.

    By default what it writes is lost.
    """
    process = _FORK.Process(target=_run, args=(main, arguments, stdout, stderr, environment or {}), daemon=True)
    process.start()
    return process


def make_thread_pool() -> None:
    """Make PyTorch's thread pool in a forked process, from its only thread.

    PyTorch makes it anew there, and fails ("Invalid thread pool!") where two threads ask for it at the same time, as
    those do that read a model's weights.
    """
    torch.set_num_threads(torch.get_num_threads())


def _run(main, arguments, stdout, stderr, environment):
    os.environ |= environment
    make_thread_pool()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, given in enumerate((nowhere, stdout, stderr)):
        os.dup2(nowhere if given is None else given, number)
    # pytest has put its own objects in the place of these.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.exit(main([str(argument) for argument in arguments]))
