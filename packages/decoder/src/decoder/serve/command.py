"""`decoder serve`: load a model and serve it until SIGTERM or Ctrl-C."""

import argparse
import asyncio
import logging
import math
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from decoder.backends.memory import available_memory
from decoder.checks import decoded, shown
from decoder.cli.flags import check_flags, check_sources, from_flags, load_from_flags
from decoder.decoder import Decoder
from decoder.options import TokenSwiftOptions
from decoder.prefix_reuse import prefix_reuse, usual_bytes
from decoder.serve.app import make_app
from decoder.serve.metrics import Metrics
from decoder.serve.service import Service
from decoder.serve.settings import Settings, name_of

logger = logging.getLogger("decoder.serve")
_SECONDS_TO_TELL = 15.0  # for answers that say that the server stops, after the time of grace


def serve(args: argparse.Namespace) -> None:
    """Run the command; returns when the server has stopped.

    Raises:
        ValueError, OSError: as `decoder.load` does; or a flag is out of range, the port cannot be had, or the file with
            the key cannot be read.
    """
    check_flags(args)
    for name, least in (("max_batch", 1), ("max_queue", 0), ("max_tokens", 1), ("timeout", 1), ("grace", 0)):
        if not getattr(args, name) >= least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name in ("timeout", "grace"):
        if math.isinf(getattr(args, name)):
            raise ValueError(f"--{name} must be a finite number of seconds")
    if args.prefix_cache_bytes is not None and args.prefix_cache_bytes < 0:
        raise ValueError(f"--prefix-cache-bytes must be at least 0, not {args.prefix_cache_bytes}")
    options = from_flags(TokenSwiftOptions, args)
    if options.verification != "exact":
        raise ValueError(f"a server needs exact verification, not {options.verification}: texts share its passes")
    for origin in args.allow_origin:
        _check_origin(origin)
    check_sources(args)
    api_key = None if args.api_key_file is None else _key(args.api_key_file)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # Before the model is loaded, which takes long.
    with _listening(args.host, args.port) as listener:
        dec = load_from_flags(args)
        dec.prefixes = prefix_reuse(dec.target, _prefix_cache_bytes(args, dec))
        if dec.tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer, which a server needs")
        settings = Settings(
            name_of(args.model),
            args.max_batch,
            args.max_queue,
            min(args.max_tokens, dec.model.config.max_position_embeddings),
            args.timeout,
            args.grace,
            args.method,
            options,
            api_key,
            tuple(args.allow_origin),
        )
        _run(Service(dec, settings, Metrics()), listener)


def _prefix_cache_bytes(args: argparse.Namespace, dec: Decoder) -> int:
    memory, asked = available_memory(dec.target.device), args.prefix_cache_bytes
    if asked is None:
        return usual_bytes(dec.target)
    if asked > memory // 2:
        raise ValueError(f"--prefix-cache-bytes {asked:,} is more than half of the {memory:,} bytes that are available")
    return asked


def _check_origin(origin: str) -> None:
    """Browsers send an origin in one form alone, and what has another form would never be equal to it."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:\d{1,5})?", origin):
        raise ValueError(
            f"--allow-origin {shown(origin)} is no origin: write scheme://host or scheme://host:port in small letters, "
            "without a path, or *"
        )


def _key(file: Path) -> str:
    if not file.is_file():
        raise FileNotFoundError(f"there is no key file {file}")
    key = decoded(file.read_bytes(), f"the key file {file}").strip()
    if not key or len(key.splitlines()) > 1:
        raise ValueError(f"the key file {file} must hold one key, in one line")
    return key


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens there. Raises OSError or ValueError, in words, if there can be none."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be between 0 and 65,535, not {port}")
    try:
        [family, kind, protocol, _, address], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise ValueError(f"--host {shown(host)} is no address of this machine: {reason}") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            words = f"cannot listen at {host}, port {port} ({error.strerror}): choose another --port or --host"
            raise ValueError(words) from None
        # Now, so that no other process can take the port while the model is loaded.
        listener.listen(128)
        yield listener


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals first tell the worker to stop, and do not end the process by themselves."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    async def main_loop(self) -> None:
        await super().main_loop()
        # Here and not in the handler of the signal, which may interrupt whoever holds the worker's lock.
        logger.info("stopping: running requests have %g seconds to end", self.service.settings.grace)
        self.service.stop()


def _run(service: Service, listener: socket.socket) -> None:
    settings = service.settings
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        log_level="warning",
        # Lines with paths and queries, where clients may have put text.
        access_log=False,
        lifespan="off",
        # Longer than clients keep a connection (5 seconds with httpx): else they send into one that is being closed.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.grace + _SECONDS_TO_TELL),
    )
    host, port = listener.getsockname()[:2]
    if host not in ("127.0.0.1", "::1") and settings.api_key is None:
        logger.warning("listening at %s without --api-key-file: whoever reaches it can use it", host)
    service.worker.start()
    logger.info("serving %s at http://%s:%d/v1", settings.model, f"[{host}]" if ":" in host else host, port)
    asyncio.run(_Server(config, service).serve([listener]))
    # A second Ctrl-C does not wait for the time of grace.
    service.worker.stop(0)
    service.worker.join(_SECONDS_TO_TELL)
    logger.info("stopped")
    if service.reading.busy:
        # A tokenizer cannot be interrupted, and Python would wait for its thread.
        logging.shutdown()
        os._exit(0)
