"""Callbacks that tests add to a run by ``--trainer.callbacks``."""

import json
import signal
import time
from pathlib import Path

import lightning as L
import torch


class Slow(L.Callback):
    """Makes every step last at least ``seconds``, so that a run can be interrupted in its middle."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_train_batch_end(self, *_) -> None:
        time.sleep(self.seconds)


class Cut(L.Callback):
    """Ends the run as a power cut would, before step ``step``."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_) -> None:
        if trainer.global_step == self.step:
            raise OSError("power cut")


class Terminate(L.Callback):
    """Sends SIGTERM, as a cluster's scheduler does, before step ``step``."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


class Hungry(L.Callback):
    """Asks for more memory than there is, before the first step."""

    def on_train_batch_start(self, *_) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)


class Shares(L.Callback):
    """Writes to ``folder/RANK.json`` how many numbers of the layers and of the heads this process holds."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_) -> None:
        held = {}
        for name, part in (("layers", module.backbone.get_decoder().layers), ("heads", module.heads)):
            held[name] = sum(getattr(p, "_local_tensor", p).numel() for p in part.parameters())
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(held))
