"""Work on a cluster, by Ray: actors that each hold what it takes, over blocks of items.

Scheduling, transport and retries are Ray's. A block whose actor dies is done again elsewhere.
"""

import logging
import pickle
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from decoder.cli.transcript import fingerprint
from decoder.decoder import Decoder
from decoder.model.quantising import dtype_name

Do = Callable[[list[Any]], list[Any]]
"""Does the items of a block: the result of each. It may be called in several threads."""

logger = logging.getLogger(__name__)

_OWN = "auto"  # the address of a cluster that is started on this machine
_SECONDS_TO_CONNECT = 10

Identity = dict[str, Any]
"""What must be the same in all actors, by name."""


def identity_of(dec: Decoder) -> Identity:
    """What tells the texts of a decoder from those of another model, another version or other kernels."""
    return {
        "model": fingerprint(dec.model),
        "dtype": dtype_name(dec.model),
        "version": version("tokenswift-decoder"),
        "batch_invariance": dec.target.backend.computed_by() if dec.bitwise else "none",
    }


Ready = Callable[[], tuple[Do, Identity]]
"""Called in the process of each actor: what does its blocks, and its identity."""


@dataclass(frozen=True)
class Cluster:
    """Where work is done.

    Args:
        address: of a cluster; ``auto`` starts Ray on this machine.
        actors: how many processes hold a decoder, each with weights of its own.
        cpus: processors, and threads, of each.
        gpus: of each.
    """

    address: str
    actors: int = 1
    cpus: int = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        for name in ("actors", "cpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"Ray's {name} must be at least 1, not {getattr(self, name)}")
        if self.gpus < 0:
            raise ValueError(f"Ray's gpus must not be below 0, but is {self.gpus:g}")

    def map(
        self, ready: Ready, items: Sequence[Any], block: int, together: int = 1
    ) -> Generator[tuple[Any, Any, Identity], None, None]:
        """Each item with its result, as blocks are done, and who has done it.

        Args:
            ready: see `Ready`; it is sent to the actors.
            block: how many items an actor is given at once, at most.
            together: how many blocks an actor does at a time, each in a thread, and again where it dies.

        Raises:
            ValueError: Ray is not installed; this machine has less than the actors ask for; or an actor is not like the
                first one: its node is named.
            OSError: there is no cluster at the address, or an actor has failed.
        """
        if not items:
            return
        with _connected(self.address) as ray:
            self._check_room(ray.cluster_resources())
            try:
                yield from self._map(ray, ready, items, block, together)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                words = " ".join(str(cause).split())[-300:]
                raise OSError(f"Ray: {words}") from error

    def _check_room(self, resources: Mapping[str, float]) -> None:
        """Tell where Ray has less than the actors ask for: those that find no room wait for it, silently."""
        for name, each in (("CPU", self.cpus), ("GPU", self.gpus)):
            asked, there = each * self.actors, resources.get(name, 0)
            if asked > there:
                words = f"{asked:g} {name}s are asked for, for {self.actors} actors, and Ray has {there:g}"
                if self.address == _OWN:  # it will not grow
                    raise ValueError(f"{words}: ask for less")
                logger.warning("%s: what finds no room waits", words)

    def _map(
        self, ray: Any, ready: Ready, items: Sequence[Any], block: int, together: int
    ) -> Generator[tuple[Any, Any, Identity], None, None]:
        block = min(block, -(-len(items) // self.actors))  # so that none is idle where there are few
        blocks = -(-len(items) // block)
        asked = ray.data.from_items([{"item": pickle.dumps(item)} for item in items], override_num_blocks=blocks)
        # Ray starts an actor that has died again, elsewhere if it must, and gives it its blocks once more.
        done = asked.map_batches(
            _Actor,
            fn_constructor_args=(ready, self.cpus),
            batch_size=block,
            # No more are sent to an actor than it does and one more, so that none is left to one where another is idle.
            compute=ray.data.ActorPoolStrategy(
                size=self.actors,
                max_tasks_in_flight_per_actor=together + 1,
                max_concurrent_calls_per_actor=together,
                enable_true_multi_threading=True,
            ),
            num_cpus=self.cpus,
            num_gpus=self.gpus,
        )
        first: Identity | None = None
        for row in done.iter_rows():
            node, identity = pickle.loads(row["by"])
            first = first or identity
            if identity != first:
                name = next(name for name in first if identity.get(name) != first[name])
                raise ValueError(
                    f"the worker on {node} has another {name.replace('_', ' ')} than the first one: "
                    f"give all nodes the same model and versions"
                )
            yield pickle.loads(row["item"]), pickle.loads(row["result"]), identity


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected to a cluster."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise ValueError("--ray needs Ray: pip install 'tokenswift-decoder[ray]'") from None
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    own = {"address": "local", "include_dashboard": False}
    given: dict[str, Any] = own if address == _OWN else {"address": address}
    try:
        _reach(address)
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR, **given)
    except (OSError, ValueError, RuntimeError) as error:
        words = " ".join(str(error).split())[:200]
        raise OSError(f"there is no Ray cluster at {address} ({words}): start one, or use --ray auto") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError where nobody listens at an address HOST:PORT, for which Ray itself would wait for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()


class _Actor:
    """A process of the cluster that does blocks of items."""

    def __init__(self, ready: Ready, cpus: int):
        torch.set_num_threads(cpus)
        self._cpus, (self._do, identity) = cpus, ready()
        self._by = pickle.dumps((socket.gethostname(), identity))

    def __call__(self, block: dict[str, Sequence[bytes]]) -> dict[str, list[bytes]]:
        torch.set_num_threads(self._cpus)  # of this thread
        items = [bytes(item) for item in block["item"]]
        results = self._do([pickle.loads(item) for item in items])
        return {"item": items, "result": [pickle.dumps(one) for one in results], "by": [self._by] * len(items)}
