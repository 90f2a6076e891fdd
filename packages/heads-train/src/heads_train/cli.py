"""The ``heads-train`` command: LightningCLI with shipped configurations and errors of one sentence."""

import errno
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click
import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from decoder.parts import check, decoded, meant, out_of_memory, parse_yaml, shown
from heads_train.callbacks import (
    Checkpoints,
    ExportHeads,
    LossCurves,
    ProgressBar,
    RunSummary,
    Throughput,
    WholeCheckpoints,
)
from heads_train.data import BooksDataModule
from heads_train.divergence import TrainingDiverged
from heads_train.export import export
from heads_train.model_card import expected_tokens_per_step
from heads_train.module import HeadsModule
from heads_train.precision import chosen_precision
from heads_train.push import push
from heads_train.trainer import NOT_FLAGS, Trainer

CONFIGS = Path(__file__).parent / "configs"

COMMANDS = {"export": export, "push": push}
"""Those that Lightning does not know."""
ABOUT = "Train draft heads of a frozen model (fit), and measure them (validate, test)."
MORE = (
    "Two more commands, whose --help lists their flags: export writes an EAGLE-3 draft model for vLLM or SGLang, push "
    "sends heads to the Hugging Face hub."
)

STOPPED = "stopped"
GOES_ON = "the same command goes on from the checkpoint saved last"
NO_CHECKPOINT = (
    "there is no checkpoint yet, so the same command starts anew; tokenised text, generated text and kept states stay"
)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

QUIET = (
    ".*args parameter is intended to run from within Python.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
    ".*is not supported by the model summary.*",
    ".*module\\(s\\) in eval mode at the start of training.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*does not have many workers.*",
    # The order of the books is a function of the step, so resuming inside an epoch is exact.
    ".*dataloader is not resumable.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*smaller than the logging interval.*",
)


class Parser(LightningArgumentParser):
    """Reports a wrong command line in one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> None:
        if message.endswith("Got value: None"):
            message += " (it is missing: give it as a flag, or a --config that has it)"
        if message.startswith(('expected "subcommand"', "argument subcommand")):
            message = f"{message.rstrip('.')}; {' and '.join(COMMANDS)} are commands, too"
        raise ValueError(message) from ex


class SaveConfig(SaveConfigCallback):
    """Keeps the settings of a training run, and of no other, beside its results."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class HeadsCLI(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return NOT_FLAGS

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--output",
            type=str,
            default="runs/heads",
            help="folder of the results: heads in last/ and best/, checkpoints/, logs, loss_curves.png; "
            "a cut run goes on when it is given again",
        )
        parser.add_argument("--base", type=str | None, default=None, help="configuration that a file builds on")
        parser.add_argument("--save_every", type=int, default=50, help="steps between checkpoints to go on from")
        parser.link_arguments("model.model_name_or_path", "data.tokenizer")

    def before_instantiate_classes(self) -> None:
        # What is saved beside the results holds the base's settings, too, and builds on nothing.
        self.config[self.subcommand]["base"] = None

    @property
    def output(self) -> Path:
        return Path(self._get(self.config, "output"))

    def instantiate_trainer(self, **kwargs) -> L.Trainer:
        config = self._get(self.config_init, "trainer")
        every = config["log_every_n_steps"]
        if every is not None and every < 1:
            raise ValueError(f"trainer.log_every_n_steps must be at least 1, got {every}")
        if config["precision"] is None:
            config["precision"] = chosen_precision(config["accelerator"])
            print(f"trainer.precision: {config['precision']}, chosen for this machine", file=sys.stderr)
        if config["logger"] in (None, True):
            config["logger"] = TensorBoardLogger(self.output, name="", version="")
        if config["default_root_dir"] is None:
            config["default_root_dir"] = str(self.output)
        if config["strategy"] == "fsdp":
            config["strategy"] = self._fully_sharded(config)
        if self.subcommand == "fit":
            given = config["callbacks"] or []
            given = [given] if isinstance(given, L.Callback) else given
            config["callbacks"] = [*given, *self._results(config)]
        return super().instantiate_trainer(**config, **kwargs)

    @staticmethod
    def _fully_sharded(trainer: dict) -> ModelParallelStrategy:
        """Lightning's FSDP2 over all devices; its FSDP1 would gather the frozen model into every checkpoint."""
        devices = str(trainer["devices"])
        if not devices.isdecimal():
            raise ValueError("--trainer.strategy fsdp needs the number of devices of a node: give --trainer.devices")
        return ModelParallelStrategy(
            data_parallel_size=int(devices) * trainer["num_nodes"],
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )

    def _results(self, trainer: dict) -> list[L.Callback]:
        callbacks = [RunSummary(), Throughput(), ExportHeads(self.output), LossCurves(self.output / "loss_curves.png")]
        if trainer["logger"]:
            callbacks.append(LearningRateMonitor("step"))
        if trainer["enable_progress_bar"] is not False:
            callbacks.append(ProgressBar())
        if trainer["enable_checkpointing"] is not False:
            every = self._get(self.config, "save_every")
            callbacks.append(Checkpoints(self.output / "checkpoints", every))
            trainer["plugins"] = [*(trainer["plugins"] or []), WholeCheckpoints()]
        return callbacks

    def _parse_ckpt_path(self) -> None:
        """Lightning would look for settings in the checkpoint; ours hold none, and may be no checkpoints at all."""

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except (KeyboardInterrupt, SystemExit, SIGTERMException) as error:
            if subcommand == "fit":
                saved = (self.output / "checkpoints" / "last.ckpt").is_file()
                error.add_note(GOES_ON if saved else NO_CHECKPOINT)
            raise

    def after_fit(self) -> None:
        if not self.trainer.is_global_zero:
            return
        told = next(callback for callback in self.trainer.callbacks if isinstance(callback, RunSummary))
        if not told.trained:
            print(f"all {self.trainer.max_steps} steps were made before; more --trainer.max_steps go on")
        print(f"\nheads in {self.output / 'best'}; figures and settings in its README.md", flush=True)
        if self.model.val_metrics:
            print(expected_tokens_per_step(self.model.heads.kind, self.model.val_metrics), flush=True)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        last = self.output / "checkpoints" / "last.ckpt"
        if kwargs["ckpt_path"] == "last":
            if not last.is_file():
                raise FileNotFoundError(f"there is no checkpoint {last} to go on from")
            kwargs["ckpt_path"] = str(last)
        elif kwargs["ckpt_path"] is None and subcommand == "fit" and last.is_file():
            print(f"going on from {last}; give another --output to start afresh", file=sys.stderr)
            kwargs["ckpt_path"] = str(last)
        elif kwargs["ckpt_path"] is None and subcommand != "fit" and self._get(self.config, "model.heads") is None:
            print("measuring untrained heads; give --ckpt_path or --model.heads to measure others", file=sys.stderr)
        if kwargs["ckpt_path"] is not None:
            _check_checkpoint(Path(kwargs["ckpt_path"]))
        # Lightning tells hooks of it too late: what the checkpoint brings would be computed before.
        self.trainer.ckpt_path, kwargs["ckpt_path"] = kwargs["ckpt_path"], None
        # A checkpoint is the user's own file and holds Lightning's callback states beside tensors.
        kwargs["weights_only"] = False
        return kwargs


def _check_checkpoint(path: Path) -> None:
    """Raise OSError for a file that is no whole checkpoint; its numbers are not read."""
    if not path.is_file():
        return
    try:
        torch.load(path, map_location="meta", weights_only=False)
    except Exception as error:
        # Unpickling bytes of any kind raises errors of any type.
        raise OSError(
            f"{path} cannot be read as a checkpoint; give another --ckpt_path, or another --output to start afresh"
        ) from error


def find_config(name: str) -> str:
    """The path of a configuration: the file itself, else the shipped one of that name.

    Raises FileNotFoundError that lists the shipped names.
    """
    if Path(name).is_file():
        return name
    shipped = CONFIGS / name
    if Path(name).name == name and shipped.is_file():
        return str(shipped)
    names = sorted(path.name for path in CONFIGS.glob("*.yaml"))
    # Without what all of them end in, by which any two would be alike.
    near = meant(Path(name).stem, [Path(one).stem for one in names])
    raise FileNotFoundError(f"there is no configuration {name}{near}; shipped are {', '.join(names)}")


def with_bases(name: str) -> list[Path]:
    """The files of a configuration: its ``base``, that one's base, and so on, the first of them first.

    A base is looked for beside the file that names it, then by :func:`find_config`. Raises ValueError for files that
    are each other's base or no YAML, and as `find_config`.
    """
    files = [Path(find_config(name))]
    while (base := _base_of(files[0])) is not None:
        beside = files[0].parent / base
        file = beside if beside.is_file() else Path(find_config(base))
        if file in files:
            raise ValueError(f"{file} is the base of a configuration that it builds on itself: take its base away")
        files.insert(0, file)
    return files


def _base_of(file: Path) -> str | None:
    content = parse_yaml(decoded(file.read_bytes(), str(file)), str(file))
    base = content.get("base") if isinstance(content, dict) else None
    if base is not None and not isinstance(base, str):
        raise ValueError(f"base in {file} must be the name of a configuration, not {shown(base)}")
    return base


def _with_configs(args: Sequence[str]) -> list[str]:
    """``args`` with every ``--config`` resolved by :func:`with_bases`."""
    found: list[str] = []
    is_name = False
    for arg in args:
        option, equals, value = arg.partition("=")
        if option == "--base":
            raise ValueError("base is a line of a configuration file: give several --config instead, the base first")
        if is_name or (option == "--config" and equals):
            found += [f"--config={file}" for file in with_bases(arg if is_name else value)]
            is_name = False
        elif arg in ("--config", "-c"):
            is_name = True
        else:
            found.append(arg)
    return [*found, "--config"] if is_name else found


def _check_values(args: Sequence[str]) -> None:
    """Refuse integers that no float holds, at which the parser fails without the argument's name, and repeated keys."""
    for before, arg in pairwise(["", *args]):
        option, equals, value = arg.partition("=")
        if not equals or not option.startswith("-"):
            option, value = before, arg
        for digits in re.findall(r"(?<![\d.])\d{309,}", value):
            check(int(digits[:310]), option)
        if value.startswith("{"):
            parse_yaml(value, option)


def run(args: Sequence[str]) -> HeadsCLI:
    """Run ``heads-train`` with these arguments; errors are raised."""
    for message in QUIET:
        warnings.filterwarnings("ignore", message=message)
    _check_values(args)
    # What Lightning says of itself; what a run does is said by `RunSummary`.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return HeadsCLI(
        HeadsModule,
        BooksDataModule,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        # The sampler shards by rank itself; the check before training measures the untrained heads.
        trainer_class=Trainer,
        trainer_defaults={
            "use_distributed_sampler": False,
            "num_sanity_val_steps": -1,
            "enable_model_summary": False,
        },
        seed_everything_default=0,
        parser_class=Parser,
        parser_kwargs={"prog": "heads-train", "description": ABOUT, "epilog": MORE},
        auto_configure_optimizers=False,
        args=_with_configs(args),
    )


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    0: done; 1: training diverged; 2: wrong usage, missing input, a full disk or memory; 130: stopped by Ctrl-C;
    143: stopped by SIGTERM.
    """
    args = sys.argv[1:] if args is None else list(args)
    try:
        if args and args[0] in COMMANDS:
            COMMANDS[args[0]].main(args[1:], prog_name=f"heads-train {args[0]}", standalone_mode=False)
        else:
            run(args)
    except SIGTERMException as error:
        return _fail(_stopped(error), 143)
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return _fail(_stopped(error), 130)
    except TrainingDiverged as error:
        return _fail(error, 1)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except (OSError, ValueError, MisconfigurationException) as error:
        if getattr(error, "errno", None) in DISK_FULL:
            error = f"{error}: free some space and give the same command again; what was saved before is whole"
        return _fail(error, 2)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return _fail("memory ran out; lower --data.batch_size or --model.loss_chunk_tokens", 2)
    return 0


def _stopped(error: BaseException) -> str:
    return "; ".join([STOPPED, *getattr(error, "__notes__", [])])


def _fail(error: Exception | str, status: int) -> int:
    print("heads-train:", " ".join(str(error).split()), file=sys.stderr)
    return status
