"""Train the reference model, or the small draft model, on the train books with Lightning.

    python data/scripts/train_model.py --size reference --books BOOKS \
        --tokenizer data/reference-model --output data/reference-model

Run the same command again to go on after a cut: batches are a pure function of the
step, so a resumed run sees the tokens an uninterrupted one would have seen.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import click
import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from books import read_books

STEP_TOKENS = 16_384
SHORT = 512


@dataclass(frozen=True)
class Phase:
    """A stretch of ``steps`` steps over sequences of ``length`` tokens; the rate falls linearly over the last
    ``decay`` share of it, from ``rate`` to ``final`` (both shares of the peak)."""

    steps: int
    length: int
    rate: float
    final: float
    decay: float = 1.0

    def learning_rate(self, step: int) -> float:
        hold = self.steps * (1 - self.decay)
        progress = max(0.0, (step - hold) / (self.steps - hold))
        return self.rate + (self.final - self.rate) * progress


@dataclass(frozen=True)
class Size:
    model: dict
    phases: tuple[Phase, ...]


SIZES = {
    # 7.9M parameters; wide and shallow, because on a CPU every layer costs a fixed overhead per step.
    "reference": Size(
        dict(
            hidden_size=384, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, intermediate_size=1024
        ),
        (Phase(1250, SHORT, 1.0, 0.2, decay=0.5), Phase(40, 4096, 0.2, 0.14), Phase(28, 16_384, 0.14, 0.02)),
    ),
    # 0.9M parameters, the drafter of `triforce`; StreamingLLM keeps its context short.
    "draft": Size(
        dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=384),
        (Phase(700, SHORT, 1.0, 0.1, decay=0.6), Phase(20, 4096, 0.1, 0.02)),
    ),
}


def short_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Causal attention written out, for short sequences: two to three times faster in bf16 on a CPU than SDPA there.

    ``query`` [batch, heads, length, d], ``key`` and ``value`` [batch, kv heads, length, d]; no key is replicated.
    """
    batch, heads, length, dim = query.shape
    query = (query * scaling).view(batch, key.shape[1], -1, length, dim)
    future = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    scores = query @ key.unsqueeze(2).transpose(-1, -2) + future
    mixed = scores.softmax(-1) @ value.unsqueeze(2)
    return mixed.reshape(batch, heads, length, dim).transpose(1, 2), None


AttentionInterface.register("short_causal", short_attention)
AttentionMaskInterface.register("short_causal", lambda *args, **kwargs: None)


def tokenise(books: Path, tokenizer_dir: Path, cache: Path, split: str) -> np.ndarray:
    """All books of a split as one uint16 array, an end-of-text token before each; kept in ``cache``."""
    path = cache / f"{split}.npy"
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, model_max_length=int(1e9))
        pieces = []
        for book in read_books(books / f"{split}.jsonl.gz"):
            pieces.append(np.array([tokenizer.eos_token_id, *tokenizer(book["text"])["input_ids"]], dtype=np.uint16))
        cache.mkdir(parents=True, exist_ok=True)
        np.save(path, np.concatenate(pieces))
    return np.load(path, mmap_mode="r")


class Steps(torch.utils.data.IterableDataset):
    """The batches of every step from ``start`` on: [sequences, length] token ids.

    Sequences are drawn without replacement: chunk numbers are shuffled anew each time the text has been seen
    whole, and every pass cuts the text at another offset.
    """

    def __init__(self, tokens: np.ndarray, phases: tuple[Phase, ...], start: int, seed: int):
        self.tokens, self.phases, self.start, self.seed = tokens, phases, start, seed

    def _sequence(self, phase: int, length: int, number: int) -> np.ndarray:
        chunks = len(self.tokens) // length - 1
        epoch, index = divmod(number, chunks)
        rng = np.random.default_rng((self.seed, phase, epoch))
        offset = int(rng.integers(length))
        begin = offset + int(rng.permutation(chunks)[index]) * length
        return self.tokens[begin : begin + length]

    def __iter__(self):
        first = 0
        for number, phase in enumerate(self.phases):
            per_step = max(1, STEP_TOKENS // phase.length)
            for step in range(max(self.start, first), first + phase.steps):
                begin = (step - first) * per_step
                rows = [self._sequence(number, phase.length, begin + row) for row in range(per_step)]
                yield torch.from_numpy(np.stack(rows).astype(np.int64))
            first += phase.steps


class LanguageModel(L.LightningModule):
    """Next-token training: Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    def __init__(self, size: Size, vocab_size: int, eos_token_id: int, peak: float = 0.005):
        super().__init__()
        self.automatic_optimization = False
        self.size, self.peak = size, peak
        config = LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=131_072,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=True,
            bos_token_id=eos_token_id,
            eos_token_id=eos_token_id,
            **size.model,
        )
        self.model = LlamaForCausalLM(config)
        self.fast_loss = torch.compile(self.loss, dynamic=False)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats per token, of ``ids`` [sequences, length]."""
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def configure_optimizers(self):
        inner = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "layers" in n]
        outer = [p for n, p in self.model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
        return [
            torch.optim.Muon(inner, lr=self.peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=self.peak, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    @property
    def steps_done(self) -> int:
        # Lightning counts every optimizer's step.
        return self.trainer.global_step // 2

    def learning_rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / 50)
        for phase in self.size.phases:
            if step < phase.steps:
                return self.peak * warmup * phase.learning_rate(step)
            step -= phase.steps
        return 0.0

    def training_step(self, ids: torch.Tensor, _) -> None:
        rate = self.learning_rate(self.steps_done)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        short = ids.shape[1] == SHORT
        implementation = "short_causal" if short else "sdpa"
        if self.model.config._attn_implementation != implementation:
            self.model.set_attn_implementation(implementation)
        total = 0.0
        parts = ids.split(16 if short else 1)
        for part in parts:
            loss = (self.fast_loss if short else self.loss)(part) / len(parts)
            self.manual_backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        self.log_dict({"train_loss": total, "learning_rate": rate}, prog_bar=True)


@click.command()
@click.option("--size", type=click.Choice(list(SIZES)), required=True)
@click.option("--books", type=click.Path(path_type=Path, exists=True), required=True, help="folder with train.jsonl.gz")
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="folder of the finished model")
@click.option("--work", type=click.Path(path_type=Path), default=Path("runs/train-model"), show_default=True)
@click.option("--threads", default=0, help="CPU threads; 0 leaves torch's choice")
@click.option("--seed", default=0, show_default=True)
def main(size: str, books: Path, tokenizer: Path, output: Path, work: Path, threads: int, seed: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    L.seed_everything(seed)
    tok = AutoTokenizer.from_pretrained(tokenizer)
    tokens = tokenise(books, tokenizer, work / "tokens", "train")
    module = LanguageModel(SIZES[size], len(tok), tok.eos_token_id)
    total = sum(phase.steps for phase in module.size.phases)
    click.echo(
        f"{sum(p.numel() for p in module.model.parameters()):,} parameters, {total} steps of {STEP_TOKENS} tokens"
    )

    folder = work / size

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            steps = Steps(tokens, module.size.phases, module.steps_done, seed)
            return torch.utils.data.DataLoader(steps, batch_size=None)

    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        logger=TensorBoardLogger(folder, name="", version=""),
        log_every_n_steps=10,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder, filename="at-{step}", save_last=True, every_n_train_steps=200),
        ],
    )
    last = folder / "last.ckpt"
    trainer.fit(module, Data(), ckpt_path=str(last) if last.exists() else None, weights_only=False)
    if trainer.interrupted or module.steps_done < total:
        raise click.ClickException("stopped before the end; run the same command again to go on")
    module.model.set_attn_implementation("sdpa")
    module.model.to(torch.bfloat16).save_pretrained(output, max_shard_size="9MB")
    tok.save_pretrained(output)
    click.echo(f"saved to {output}")


if __name__ == "__main__":
    main()
