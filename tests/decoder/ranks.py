"""Runs a function in several processes that share a model, forked from this one, so that nothing is imported again."""

import multiprocessing
import os
import socket
import time
import traceback

from tests.forked import make_thread_pool

_FORK = multiprocessing.get_context("fork")


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def on_ranks(size, function, *arguments, seconds=300, hanging=()):
    """What ``function(rank, *arguments)`` returns in each of ``size`` processes; an exception is returned as one.

    A process that ends by itself leaves None, as do those that are known as ``hanging``. All others must end within
    ``seconds``.
    """
    port, pipes, children = free_port(), [], []
    for rank in range(size):
        receiving, sending = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_run, args=(rank, size, port, sending, function, arguments), daemon=True)
        child.start()
        sending.close()
        pipes.append(receiving)
        children.append(child)
    end = time.monotonic() + seconds
    try:
        return [None if rank in hanging else _received(pipe, end) for rank, pipe in enumerate(pipes)]
    finally:
        for child in children:
            child.kill()
            child.join()


def _received(pipe, end):
    if not pipe.poll(max(0, end - time.monotonic())):
        raise TimeoutError("a process did not end in time")
    try:
        return pipe.recv()
    except EOFError:
        return None


def _run(rank, size, port, sending, function, arguments):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    make_thread_pool()
    try:
        sending.send(function(rank, *arguments))
    except BaseException as error:
        traceback.print_exc()
        try:
            sending.send(error)
        except Exception:
            sending.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        sending.close()
        # Nothing that this process has inherited is to be cleaned up by it.
        os._exit(0)
