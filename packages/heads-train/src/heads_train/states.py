"""The frozen model's states of chunks seen before, on the disk: it runs once per chunk, not once per epoch."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class StateCache:
    """States of whole chunks in one model's folder, one float32 file per chunk, found by the chunk's token ids.

    The last d channels of a token's states are h_0, the input of the model's final norm. Before them stand the inputs
    of ``layers``, for a drafter that reads these; c is the number of all channels. Several processes may share a
    folder: every file appears whole or not at all. A chunk of n tokens takes 4 n c bytes.

    Args:
        folder: where the folder of this model lies.
        model: folder of the model, whose files name the folder; a hub id is taken as it is.
        dtype: in which the model runs; states of another dtype are others.
        layers: the numbers of the layers whose inputs are kept, in the order in which they stand.
    """

    def __init__(self, folder: str | Path, model: str, dtype: torch.dtype, layers: Sequence[int] = ()):
        digest = hashlib.sha256(f"{dtype}{''.join(f',{layer}' for layer in layers)}".encode())
        files = sorted(path for path in Path(model).glob("*") if path.suffix in (".safetensors", ".bin", ".gguf"))
        for path in files if files else [Path(model)] if Path(model).is_file() else []:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        if not Path(model).exists():
            digest.update(model.encode())
        self.folder = Path(folder) / f"states-{digest.hexdigest()[:24]}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, token_ids: Tensor) -> Path:
        ids: np.ndarray = token_ids.cpu().numpy().astype(np.uint32)
        return self.folder / f"{hashlib.sha256(ids.tobytes()).hexdigest()[:32]}.npy"

    def get(self, token_ids: Tensor) -> Tensor | None:
        """The states [n, c] of a chunk ``token_ids`` [n], float32 on the CPU; None when they are not there."""
        path = self._path(token_ids)
        return torch.from_numpy(np.load(path)) if path.exists() else None

    def put(self, token_ids: Tensor, states: Tensor) -> None:
        """Keep the states [n, c] of a chunk ``token_ids`` [n]. Raises OSError when the disk is full."""
        path = self._path(token_ids)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.folder) as scratch:
            part = Path(scratch, "states.npy")
            np.save(part, states.float().cpu().numpy())
            os.replace(part, path)
