"""What a run leaves behind: heads after every validation, throughput, the loss curves."""

import time
from importlib.metadata import version
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.figure import Figure

from heads_train.data import BooksDataModule
from heads_train.module import HeadsModule, TrainingDiverged

VERSIONS = ("tokenswift-heads-train", "torch", "transformers", "lightning")


class ExportHeads(L.Callback):
    """Writes the heads to ``output/last`` after every validation and at the end, the best of them to ``output/best``.

    Best is the lowest ``val_loss``. Raises TrainingDiverged, and writes nothing, when it is no finite number.
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
        if not loss < float("inf"):
            raise TrainingDiverged(
                f"the validation loss is {loss} after {trainer.global_step} steps; lower --model.learning_rate"
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
        if not trainer.is_global_zero:
            return
        data: BooksDataModule = trainer.datamodule
        module.heads.save_pretrained(
            self.output / name,
            base_model=module.model_name_or_path,
            training={
                "steps": trainer.global_step,
                "max_steps": trainer.max_steps,
                "source": data.source,
                "chunk_tokens": data.chunk_tokens,
                "chunks_per_book": data.chunks_per_book,
                "chunks_per_step": data.batch_size * trainer.world_size * trainer.accumulate_grad_batches,
                "learning_rate": module.learning_rate,
                "weight_decay": module.weight_decay,
                "warmup_steps": module.warmup_steps,
                "precision": str(trainer.precision),
                "untrained": self.untrained,
                "validation": module.val_metrics,
                "versions": {package: version(package) for package in VERSIONS},
            },
        )


class Checkpoints(ModelCheckpoint):
    """Keeps ``directory/last.ckpt``, from which a cut run goes on: every ``steps`` steps and after each validation."""

    def __init__(self, directory: Path, steps: int):
        super().__init__(
            directory, save_top_k=0, save_last=True, every_n_train_steps=steps, enable_version_counter=False
        )

    def on_validation_end(self, trainer: L.Trainer, module: HeadsModule) -> None:
        # One made at this step before the validation does not know its result, and resuming would not repeat it.
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            trainer.save_checkpoint(Path(self.dirpath, f"{self.CHECKPOINT_NAME_LAST}.ckpt"))


class TokensPerSecond(L.Callback):
    """Logs ``tokens_per_second`` of the training steps, all devices together, validation not counted."""

    def __init__(self):
        self.tokens, self.seconds, self.began = 0, 0.0, 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.tokens += batch.numel() * trainer.world_size
        self.seconds += time.perf_counter() - self.began
        if trainer.global_step % trainer.log_every_n_steps == 0:
            module.log("tokens_per_second", self.tokens / self.seconds, prog_bar=True)
            self.tokens, self.seconds = 0, 0.0


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
        axes.set(xlabel="step", ylabel="cross entropy (nats per token)", title=f"{module.heads.kind} heads")
        axes.grid(alpha=0.3)
        axes.legend()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path, dpi=120)
