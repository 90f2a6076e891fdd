"""Text of the model's own, to train its heads on what they will have to predict (self-distillation)."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

import decoder
from decoder.parts import Cluster, Manner, Text, write_texts
from heads_train.sources import files_key

FASTER = ("heads", "tree", "ray", "ray_actors", "ray_cpus", "ray_gpus")
"""Settings that speed the generation up and change no text."""


@dataclass(frozen=True)
class GeneratedText:
    """How the model writes its own training text (``--data.source generated``).

    Every text is one chunk: a prompt cut out of a book, and what the decoder makes of it. The fields from
    ``temperature`` on mean what they mean in ``decoder.SamplingParams``; choose them as they will be in use.

    Args:
        prompts: where the prompts come from: whatever ``--data.source`` takes but ``generated``.
        texts: how many training texts; validation and test have a sixteenth of it each, of other books.
        prompt_tokens: length of a prompt; the rest of the ``chunk_tokens`` is generated.
        heads: draft heads that speed the generation up; the text is the same without.
        tree: the tree that these heads fill.
        batch: how many texts are decoded together at most, fewer where memory is short; the texts are the same.
        ray: address of a Ray cluster that writes the texts, which are the same there; ``auto`` starts Ray on this
            machine.
        ray_actors: processes of the cluster that each load the model.
        ray_cpus: processors and threads of each of them.
        ray_gpus: GPUs of each of them.
    """

    prompts: str
    texts: int = 1024
    prompt_tokens: int = 64
    heads: str | None = None
    tree: Sequence[int] = (1, 3, 3, 3)
    batch: int = 16
    ray: str | None = None
    ray_actors: int = 1
    ray_cpus: int = 1
    ray_gpus: float = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.1
    repetition_penalty: float = 1.2
    penalty_window: int = 1024

    def __post_init__(self) -> None:
        for name in ("texts", "prompt_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.generated.{name} must be at least 1, got {getattr(self, name)}")
        self.sampling(0)
        self.options()
        self.cluster()

    def cluster(self) -> Cluster | None:
        return None if self.ray is None else Cluster(self.ray, self.ray_actors, self.ray_cpus, self.ray_gpus)

    def sampling(self, seed: int) -> decoder.SamplingParams:
        return decoder.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            penalty_window=self.penalty_window,
            seed=seed,
        )

    def options(self) -> decoder.TokenSwiftOptions:
        return decoder.TokenSwiftOptions(tree=tuple(self.tree))


class GeneratedChunks:
    """The generated chunks of one split in a folder, one file each: what is there is not generated again.

    Text n is a function of model, prompts, settings, seed and n, so that several processes share the work and a cut
    run goes on with the texts that are not finished; who is decoded together does not matter.

    Args:
        model: folder or hub id of the model.
        settings: how to generate.
        prompts: [m, prompt_tokens] token ids.
        texts: how many chunks.
        chunk_tokens: tokens per chunk.
        seed: of the choice of prompts and of the sampling.
        cache_dir: where the folder lies.
    """

    def __init__(
        self,
        model: str,
        settings: GeneratedText,
        prompts: np.ndarray,
        texts: int,
        chunk_tokens: int,
        seed: int,
        cache_dir: Path,
    ):
        if settings.prompt_tokens >= chunk_tokens:
            raise ValueError(
                f"data.generated.prompt_tokens {settings.prompt_tokens} must be below data.chunk_tokens {chunk_tokens}"
            )
        self.model, self.settings, self.prompts = model, settings, prompts
        self.texts, self.chunk_tokens, self.seed = texts, chunk_tokens, seed
        weights = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
        # What speeds the generation up changes no text, and neither does their number.
        without = ("prompts", "batch", "texts", *FASTER)
        asked = {name: value for name, value in asdict(settings).items() if name not in without}
        digest = hashlib.sha256(np.ascontiguousarray(prompts).tobytes())
        digest.update(json.dumps([model, files_key(weights), asked, chunk_tokens, seed]).encode())
        self.folder = cache_dir / f"generated-{digest.hexdigest()[:24]}"

    def _path(self, n: int) -> Path:
        return self.folder / f"{n:06}.npy"

    def make(self, rank: int = 0, ranks: int = 1, device: str = "auto") -> None:
        """Generate the missing ones among texts ``rank``, ``rank + ranks``, ... Raises as ``decoder.load`` does.

        What a cluster writes is rank 0's.
        """
        cluster = self.settings.cluster()
        if cluster is not None:
            if rank:
                return
            ranks, device = 1, "auto"
        missing = [n for n in range(rank, self.texts, ranks) if not self._path(n).exists()]
        if not missing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        order = np.random.default_rng(self.seed).permutation(len(self.prompts))
        settings, new_tokens = self.settings, self.chunk_tokens - self.settings.prompt_tokens
        texts = [
            Text(self.prompts[order[n % len(order)]].tolist(), new_tokens, settings.sampling((self.seed << 32) + n))
            for n in missing
        ]
        manner = Manner("tokenswift" if settings.heads else "ar", settings.options(), settings.batch)
        load = partial(decoder.load, self.model, settings.heads, device=device)
        with (
            tqdm(total=len(missing), desc="generating", unit=" texts", mininterval=1) as bar,
            closing(write_texts(load, texts, manner, cluster)) as written,
        ):
            for index, token_ids in written:
                self._save(missing[index], [*texts[index].prompt, *token_ids])
                bar.update()

    def _save(self, n: int, token_ids: list[int]) -> None:
        """Write text ``n`` so that its file is whole or not there."""
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.folder) as scratch:
            part = Path(scratch, "text.npy")
            np.save(part, np.array(token_ids, dtype=np.uint32))
            os.replace(part, self._path(n))

    def load(self) -> np.ndarray:
        """All chunks [texts, chunk_tokens]. Raises OSError when some are missing."""
        missing = [n for n in range(self.texts) if not self._path(n).exists()]
        if missing:
            raise OSError(
                f"{len(missing)} of {self.texts} generated texts are not in {self.folder}; all nodes must share "
                "--data.cache_dir"
            )
        return np.stack([np.load(self._path(n)) for n in range(self.texts)])
