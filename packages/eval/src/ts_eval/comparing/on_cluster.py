"""The generations of an experiment by the processes of a Ray cluster, each with the models and a log of its own."""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from decoder.parts import Cluster
from ts_eval.comparing.results import GenerationLog
from ts_eval.comparing.rounds import Rounds
from ts_eval.comparing.setup import Setup, set_up

if TYPE_CHECKING:
    from ts_eval.compare import Experiment

Change = Callable[[Setup], Setup]


def cluster_of(experiment: "Experiment") -> Cluster | None:
    """The cluster that an experiment runs on, if any. Raises ValueError for one that cannot be."""
    if experiment.ray is None:
        return None
    if experiment.processes > 1 or experiment.tensor_parallel or experiment.rank is not None or experiment.endpoint:
        raise ValueError("--ray shares the prompts by itself: leave out --processes, --tensor-parallel and --endpoint")
    return Cluster(experiment.ray, experiment.ray_actors, experiment.ray_cpus, experiment.ray_gpus)


def generate_on(
    cluster: Cluster, experiment: "Experiment", setup: Setup, log: GenerationLog, change: Change | None = None
) -> None:
    """Generate what is missing in ``log``, a batch with all its rows at a time.

    Args:
        setup: of the experiment, made here; all processes must come to the same.
        change: as the processes must change theirs.

    Raises:
        ValueError, OSError: as `Cluster.map`; or a process has other versions or another kind of machine.
    """
    missing = sorted(
        {turn.batch for turn in setup.turns() if any(log.get(turn.spec.text, *pair) is None for pair in turn.pairs)}
    )
    # The folder is this machine's, and the processes start nothing of their own.
    alone = replace(experiment, ray=None, overwrite=False, extend=False)
    ready = partial(_ready, alone, change)
    total = sum(len(setup.batches()[batch]) for batch in missing)
    interval = 0.2 if sys.stderr.isatty() else 10
    with (
        tqdm(total=total, unit="text", leave=False, mininterval=interval) as bar,
        closing(cluster.map(ready, missing, 1)) as done,
    ):
        for batch, records, identity in done:
            if identity["settings or machine"] != log.fingerprint:
                raise ValueError(
                    "the processes of the cluster have other settings, versions or another kind of machine than this "
                    "one: start ts-eval on a machine like theirs"
                )
            for record in records:
                if log.get(record["method"], record["prompt_index"], record["run"]) is None:
                    log.append(record)
            bar.update(len(setup.batches()[batch]))


def _ready(experiment: "Experiment", change: Change | None) -> tuple[Callable[[list[int]], list[Any]], dict[str, str]]:
    """What a process of the cluster needs to generate batches."""
    setup = set_up(experiment)
    setup = setup if change is None else change(setup)
    warm = False

    def do(batches: Sequence[int]) -> list[list[dict]]:
        nonlocal warm
        found = []
        for batch in batches:
            with TemporaryDirectory() as folder, _log(setup, folder) as log:
                log.begin()
                Rounds(setup, log, batches={batch}).run(lambda sentence: None, warm_up=not warm)
                found.append(log.records())
                warm = True
        return found

    with TemporaryDirectory() as folder, _log(setup, folder) as log:
        return do, {"settings or machine": log.fingerprint}


def _log(setup: Setup, folder: str) -> GenerationLog:
    return GenerationLog(Path(folder), setup.settings, setup.environment)
