"""The frozen model's last states of chunks seen before, on the disk: it runs once per chunk, not once per epoch."""

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class StateCache:
    """h_0 of whole chunks in one model's folder, one float32 file per chunk, found by the chunk's token ids.

    Several processes may share a folder: every file appears whole or not at all. A chunk of n tokens takes 4 n d bytes.

    Args:
        folder: where the folder of this model lies.
        model: folder of the model, whose files name the folder; a hub id is taken as it is.
        dtype: in which the model runs; states of another dtype are others.
    """

    def __init__(self, folder: str | Path, model: str, dtype: torch.dtype):
        digest = hashlib.sha256(f"{dtype}".encode())
        files = sorted(path for path in Path(model).glob("*") if path.suffix in (".safetensors", ".bin", ".gguf"))
        for path in files if files else [Path(model)] if Path(model).is_file() else []:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        if not Path(model).exists():
            digest.update(model.encode())
        self.folder = Path(folder) / f"states-{digest.hexdigest()[:24]}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, token_ids: Tensor) -> Path:
        ids = token_ids.cpu().numpy().astype(np.uint32)
        return self.folder / f"{hashlib.sha256(ids.tobytes()).hexdigest()[:32]}.npy"

    def get(self, token_ids: Tensor) -> Tensor | None:
        """The states [n, d] of a chunk ``token_ids`` [n], float32 on the CPU; None when they are not there."""
        path = self._path(token_ids)
        return torch.from_numpy(np.load(path)) if path.exists() else None

    def put(self, token_ids: Tensor, states: Tensor) -> None:
        """Keep the states [n, d] of a chunk ``token_ids`` [n]. Raises OSError when the disk is full."""
        path = self._path(token_ids)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.folder) as scratch:
            part = Path(scratch, "states.npy")
            np.save(part, states.float().cpu().numpy())
            os.replace(part, path)
