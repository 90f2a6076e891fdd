"""What every experiment on a model is asked for, whichever command it belongs to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ts_eval.comparing.method_spec import MethodSpec

Say = Callable[[str], None]
"""Is called with a sentence for the user now and then."""


def silent(sentence: str) -> None:
    """A `Say` that says nothing."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The fields that all experiments have.

    Args:
        methods: specifications as in `MethodSpec`.
        model: folder or hub id; None takes the reference model of the data folder, with its heads and draft model.
        heads: one checkpoint for every method, or METHOD=CHECKPOINT pairs.
        draft_model: folder or hub id of the model that drafts for ``triforce`` and ``hf-assisted``.
        prompts: text file (one prompt), .jsonl(.gz), or hub dataset, with its split if that is not test
            (owner/name:split); None takes the shipped PG-19 test books.
        device, dtype, bitwise: as in `decoder.load`; of bitwise None is "auto".
        sampling: fields of `decoder.SamplingParams` over the defaults temperature 1, min-p 0.1, penalty 1.2 over 1,024.
        data_dir: the data folder; None finds the checkout's.
        overwrite: drop what other settings left in the output folder instead of refusing.
        arguments: the command line, for the record.
    """

    methods: tuple[str, ...] = field(kw_only=False)
    model: str | None = None
    heads: Sequence[str] = ()
    draft_model: str | None = None
    prompts: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    bitwise: bool | None = None
    sampling: dict | None = None
    data_dir: str | Path | None = None
    overwrite: bool = False
    arguments: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class AskedOfMany(Asked):
    """The fields of experiments whose prompts are many, and may be shared among processes.

    Args:
        prompt_tokens: the first so many tokens of each prompt; None takes the whole text, but 1,024 of a book that is
            shipped or on the hub.
        num_prompts: at most so many prompts; None takes all of a file, one of the shipped books or of a hub dataset.
        ray: address of a Ray cluster whose processes share the prompts and runs; ``auto`` starts Ray on this machine.
        ray_actors, ray_cpus, ray_gpus: how many processes, and of each the processors and threads, and GPUs.
    """

    prompt_tokens: int | None = None
    num_prompts: int | None = None
    ray: str | None = None
    ray_actors: int = 1
    ray_cpus: int = 1
    ray_gpus: float = 0


def refuse_outside(specs: Sequence[MethodSpec], why: str) -> None:
    """Raise ValueError if a row is not decoded here, and say ``why`` that does not do."""
    theirs = next((spec.name for spec in specs if spec.is_outside), None)
    if theirs:
        raise ValueError(f"{theirs} is not decoded here{why}")
