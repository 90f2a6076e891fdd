"""What a run shows and leaves behind: time left, throughput, memory, checkpoints, heads, the loss curves."""

import errno
import os
import resource
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from matplotlib.figure import Figure
from safetensors import SafetensorError

from heads_train.data import BooksDataModule
from heads_train.divergence import DIVERGED, TrainingDiverged
from heads_train.model_card import loss_name, write_model_card
from heads_train.module import HeadsModule

VERSIONS = ("tokenswift-heads-train", "torch", "transformers", "lightning")


def versions() -> dict[str, str]:
    """What made the heads; of PyTorch the build as well, which its package need not tell."""
    return {package: _version(package) for package in VERSIONS} | {"torch": torch.__version__}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return "not installed"


class ExportHeads(L.Callback):
    """Writes the heads to ``output/last`` after every validation and at the end, the best of them to ``output/best``.

    Best is the lowest ``val_loss``. Raises TrainingDiverged, and writes nothing, when it is no finite number or far
    above what it was before the first step.
    """

    def __init__(self, output: Path):
        self.output = output
        self.untrained: dict[str, float] = {}
        self.best_loss = float("inf")

    def state_dict(self) -> dict:
        return {"untrained": self.untrained, "best_loss": self.best_loss}

    def load_state_dict(self, state: dict) -> None:
        self.untrained, self.best_loss = state["untrained"], state["best_loss"]

    def on_validation_end(self, trainer: L.Trainer, module: HeadsModule) -> None:
        if trainer.state.fn != "fit":
            return
        if trainer.sanity_checking:
            self.untrained = dict(module.val_metrics)
            return
        loss = module.val_metrics["val_loss"]
        limit = DIVERGED * self.untrained.get("val_loss", float("inf"))
        if not loss < limit:
            raise TrainingDiverged(
                f"the validation loss is {loss:.4g} after {trainer.global_step} steps; lower --model.learning_rate and "
                "give another --output (the heads saved last are from before)"
            )
        self._save(trainer, module, "last")
        if loss < self.best_loss:
            self.best_loss = loss
            self._save(trainer, module, "best")

    def on_train_end(self, trainer: L.Trainer, module: HeadsModule) -> None:
        self._save(trainer, module, "last")
        if self.best_loss == float("inf"):
            self._save(trainer, module, "best")

    def _save(self, trainer: L.Trainer, module: HeadsModule, name: str) -> None:
        heads = module.whole_heads()
        if heads is None:
            return
        data: BooksDataModule = trainer.datamodule
        training = {
            "steps": trainer.global_step,
            "max_steps": trainer.max_steps,
            "source": data.source,
            "generated": asdict(data.generated) if data.generated else None,
            "chunk_tokens": data.chunk_tokens,
            "chunks_per_book": data.chunks_per_book,
            "chunks_per_step": data.batch_size * trainer.world_size * trainer.accumulate_grad_batches,
            "train_chunks": len(data.chunks["train"]),
            "start": module.start_heads,
            "fitted_tokens": module.fitted_tokens,
            "learning_rate": module.learning_rate,
            "weight_decay": module.weight_decay,
            "warmup_steps": module.warmup_steps,
            "head_weights": module.head_weights,
            "distill": module.distill,
            "distill_loss": module.distill_loss if module.distill else None,
            "draft_vocab_size": module.draft_vocab_size,
            "precision": str(trainer.precision),
            "untrained": self.untrained,
            "validation": module.val_metrics,
            "validated_at_step": module.val_step,
            "versions": versions(),
        }
        folder = self.output / name
        try:
            heads.save_pretrained(folder, base_model=module.model_name_or_path, training=training)
        except SafetensorError as error:
            # Its writer hides the OSError too.
            raise OSError(errno.ENOSPC, "the heads could not be written", str(folder)) from error
        write_model_card(folder, heads, module.model_name_or_path, training)


class WholeCheckpoints(TorchCheckpointIO):
    """Replaces a checkpoint only when the new one lies whole beside it: a kill or a full disk leaves the old one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".writing-{path.name}")
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except RuntimeError as error:
            # torch's writer hides the OSError below it.
            raise OSError(errno.ENOSPC, "the checkpoint could not be written", str(path)) from error
        finally:
            part.unlink(missing_ok=True)


class Checkpoints(ModelCheckpoint):
    """Keeps ``directory/last.ckpt``, from which a cut run goes on: every ``steps`` steps and after each validation.

    None is made between the batches of one accumulated step, whose gradient it would lose.
    """

    def __init__(self, directory: Path, steps: int):
        super().__init__(
            directory, save_top_k=0, save_last=True, every_n_train_steps=steps, enable_version_counter=False
        )

    def on_validation_end(self, trainer: L.Trainer, module: HeadsModule) -> None:
        # One made at this step before the validation does not know its result, and resuming would not repeat it.
        if trainer.state.fn == "fit" and not trainer.sanity_checking and _step_is_whole(trainer):
            trainer.save_checkpoint(Path(self.dirpath, f"{self.CHECKPOINT_NAME_LAST}.ckpt"))

    def on_train_batch_end(self, trainer: L.Trainer, *args) -> None:
        # A resumed run has not saved this step itself, and would do so at the first batch of the next.
        if _step_is_whole(trainer):
            super().on_train_batch_end(trainer, *args)


def _step_is_whole(trainer: L.Trainer) -> bool:
    """Whether no gradient is pending after the batch seen last."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


class Throughput(L.Callback):
    """Logs ``tokens_per_second`` (all devices, validation not counted) and this process's ``peak_memory_gib``.

    The memory is the device's where there is CUDA, else the resident memory of the process.
    """

    def __init__(self):
        self.tokens, self.seconds, self.began = 0, 0.0, 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.tokens += batch.numel() * trainer.world_size
        self.seconds += time.perf_counter() - self.began
        if trainer.global_step % trainer.log_every_n_steps == 0:
            module.log("tokens_per_second", self.tokens / self.seconds, prog_bar=True)
            module.log("peak_memory_gib", peak_memory_bytes(module.device) / 2**30)
            self.tokens, self.seconds = 0, 0.0


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: on a CUDA ``device``, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class RunSummary(L.Callback):
    """Says before the first step what is trained, on what, and for how long.

    Attributes:
        trained: whether there was a step left to make.
    """

    trained = False

    def on_train_start(self, trainer: L.Trainer, module: HeadsModule) -> None:
        self.trained = True

    def on_fit_start(self, trainer: L.Trainer, module: HeadsModule) -> None:
        if not trainer.is_global_zero:
            return
        heads, data = module.heads, trainer.datamodule
        trained = sum(one.numel() for one in heads.parameters() if one.requires_grad)
        frozen = sum(one.numel() for one in module.backbone.parameters())
        vocabulary = module.config.vocab_size
        lines = [f"training {heads.num_heads} {heads.kind} heads of {trained / 1e6:.1f}M parameters"]
        lines[0] += f" for a frozen model of {frozen / 1e6:.0f}M, on {module.device} in {trainer.precision}"
        if heads.draft_to_target is not None:
            lines.append(f"the heads draft {len(heads.draft_to_target)} of the model's {vocabulary} tokens")
        if trainer.max_steps > 0:
            per_step = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
            times = trainer.max_steps * per_step / len(data.chunks["train"])
            lines.append(f"{trainer.max_steps} steps of {per_step} chunks: {times:.2g} times the training text")
        print("\n".join(lines), flush=True)


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with the time left until the last step, validations included."""

    sanity_check_description = "measuring the untrained heads"
    train_description = "training"
    validation_description = "validating"
    test_description = "testing"

    def __init__(self):
        super().__init__()
        self.began, self.first_step = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.began, self.first_step = time.perf_counter(), trainer.global_step
        super().on_train_start(trainer, module)

    def get_metrics(self, trainer: L.Trainer, module: L.LightningModule) -> dict:
        items = super().get_metrics(trainer, module)
        items.pop("v_num", None)
        steps = trainer.global_step - self.first_step
        if steps and trainer.max_steps > 0:
            each = (time.perf_counter() - self.began) / steps
            left = timedelta(seconds=round(each * (trainer.max_steps - trainer.global_step)))
            items = {"step": f"{trainer.global_step}/{trainer.max_steps}", "left": str(left)} | items
        return items


class LossCurves(L.Callback):
    """Draws ``path`` at the end: each head's training and validation loss over the steps, as nats per token."""

    def __init__(self, path: Path):
        self.path = path
        self.train: list[dict[str, float]] = []
        self.validation: list[dict[str, float]] = []

    def state_dict(self) -> dict:
        return {"train": self.train, "validation": self.validation}

    def load_state_dict(self, state: dict) -> None:
        self.train, self.validation = state["train"], state["validation"]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and (not self.train or self.train[-1]["step"] < step):
            metrics = trainer.callback_metrics.items()
            losses = {name: value.item() for name, value in metrics if name.startswith("train_loss_")}
            self.train.append({"step": step} | losses)

    def on_validation_end(self, trainer: L.Trainer, module: HeadsModule) -> None:
        if trainer.state.fn == "fit":
            losses = {name: value for name, value in module.val_metrics.items() if name.startswith("val_loss_")}
            self.validation.append({"step": trainer.global_step} | losses)

    def on_train_end(self, trainer: L.Trainer, module: HeadsModule) -> None:
        if not trainer.is_global_zero:
            return
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for i in range(1, module.heads.num_heads + 1):
            for rows, name, style in ((self.train, "train", "-"), (self.validation, "val", "o--")):
                points = [(row["step"], row[f"{name}_loss_head{i}"]) for row in rows if f"{name}_loss_head{i}" in row]
                if points:
                    alpha = 0.4 if name == "train" else 1.0
                    axes.plot(
                        *zip(*points, strict=True), style, color=f"C{i - 1}", alpha=alpha, label=f"head {i} {name}"
                    )
        axes.set(xlabel="step", title=f"{module.heads.kind} heads")
        axes.set_ylabel(f"{loss_name(module.distill_loss)} (nats per token)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path, dpi=120)
