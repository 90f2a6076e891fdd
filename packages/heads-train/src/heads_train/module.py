"""The LightningModule: a frozen backbone, the heads on it, one loss per head."""

import math
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torchmetrics import MeanMetric
from transformers import get_cosine_schedule_with_warmup

from decoder import DraftHeads
from decoder.heads import TrainedHeads
from decoder.parts import Eagle3DraftModel, shown
from heads_train.backbone import FrozenStates, final_norm, load_backbone, load_config, norm_weight, shard
from heads_train.divergence import LossWatch
from heads_train.draft_vocabulary import expected_counts, most_expected
from heads_train.loss import Objective, chunked_loss, over_vocabulary
from heads_train.metrics import TokensPerStep, TopKAccuracy, top_k_accuracy
from heads_train.new_heads import copy_head, fit_features, fit_heads, new_heads, start_heads
from heads_train.progress import progress
from heads_train.run_identity import describe_run, refuse_other_run
from heads_train.states import StateCache

TOP_K = 3
FITTED_TOKENS = 2**15  # read for the start of an eagle3 draft model
# By the names that `HeadsModule` gives the losses of distilled heads.
_OBJECTIVES: dict[str, Objective] = {"cross_entropy": "distribution", "overlap": "overlap"}


class HeadsModule(L.LightningModule):
    """Trains draft heads on a frozen model (paper, "Training the heads"): `decoder.DraftHeads`, or EAGLE-3's one layer.

    Head i (from 1) at position t learns token t+1+i; the loss is the sum of the heads' own, mean cross entropies. With
    ``distill`` it learns the model's own distribution of that token instead, given the text before it: a sum over the
    vocabulary says more than one token drawn from it, so the heads learn in fewer steps.

    Args:
        model_name_or_path: folder or Hugging Face hub id of the model the heads are for.
        heads: folder or hub id of heads to start from; None starts untrained.
        num_heads: how many heads (gamma); of ``eagle3`` the levels of its training-time test.
        kind: ``chained``, ``independent`` (Medusa*), ``medusa`` (Medusa's own form, for vLLM), ``conditioned`` (each
            head also reads the token before), ``gated`` (conditioned, with a gated unit in each head) or ``eagle3``
            (one decoder layer for all levels).
        gate_width: numbers in the gated unit of a ``gated`` head; None is twice the hidden size.
        shared: one head takes the place of all of a conditioned or gated kind, going on from its own state; it is a
            third as large as three and learns from as many tokens again.
        fitted_tokens: tokens of training text on which new conditioned or gated heads are fitted by least squares
            before the first step, to the model's own next states; 0 starts them as the identity. A learning rate that
            is high for them (1e-3) loses it again.
        target_layers: the layers whose inputs ``eagle3`` reads; None takes 2, L / 2 and L - 3 of L layers.
        sliding_window: how many tokens of the text the attention of ``eagle3`` sees; None sees all.
        learning_rate: peak rate of AdamW.
        weight_decay: of the linear layers; norms have none.
        beta1: AdamW's decay of the mean of gradients.
        beta2: AdamW's decay of the mean of squared gradients.
        warmup_steps: steps over which the rate rises to its peak, before it falls along a cosine to zero.
        head_weights: weight of each head's loss in the sum; None is 1 for all.
        draft_vocab_size: how many tokens the heads draft, those that the model expects most often on the training text;
            None drafts all. A level of drafting, and of training, then reads that part of the language-model head.
        state_cache: folder that keeps the frozen model's last state of every chunk (4 bytes a token and channel), so
            that the model reads a chunk once however many epochs and runs there are; None keeps none.
        distill: learn the model's own distributions instead of the text's tokens; suits conditioned and gated heads,
            which know the tokens before.
        distill_loss: what is made small then, the ``cross_entropy`` with these distributions or minus the logarithm of
            the ``overlap`` with them, which drafts live on; the second is for heads that are trained already.
        loss_chunk_tokens: tokens whose logits exist at the same time.
        backbone_dtype: dtype of the frozen weights; ``auto`` follows the trainer's precision.
        compile: run the backbone's layers through ``torch.compile``; needs a C++ compiler.
    """

    def __init__(
        self,
        model_name_or_path: str,
        heads: str | None = None,
        num_heads: int = 3,
        kind: str = "chained",
        gate_width: int | None = None,
        shared: bool = False,
        fitted_tokens: int = 0,
        target_layers: Sequence[int] | None = None,
        sliding_window: int | None = 512,
        learning_rate: float = 5e-3,
        weight_decay: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.999,
        warmup_steps: int = 50,
        head_weights: Sequence[float] | None = None,
        draft_vocab_size: int | None = None,
        state_cache: str | None = None,
        distill: bool = False,
        distill_loss: Literal["cross_entropy", "overlap"] = "cross_entropy",
        loss_chunk_tokens: int = 512,
        backbone_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        compile: bool = False,
    ):
        super().__init__()
        if loss_chunk_tokens < 1:
            raise ValueError(f"model.loss_chunk_tokens must be at least 1, got {loss_chunk_tokens}")
        _check_rates(learning_rate=learning_rate, weight_decay=weight_decay)
        _check_rates(1, beta1=beta1, beta2=beta2)
        if compile:
            _check_compiler()
        _check_distilling(distill, distill_loss)
        self.config = load_config(model_name_or_path)
        self.shape = target_layers, sliding_window, gate_width, shared
        self.heads = new_heads(self.config, kind, num_heads, *self.shape)
        fits = isinstance(self.heads, DraftHeads) and self.heads.conditioned
        if fitted_tokens < 0 or (fitted_tokens > 0 and not fits):
            raise ValueError(
                f"model.fitted_tokens is a number of tokens for heads of kind conditioned or gated, or 0, and it is "
                f"{fitted_tokens} for kind {kind}"
            )
        self.fitted_tokens = fitted_tokens
        self.model_name_or_path, self.start_heads = model_name_or_path, heads
        self.learning_rate, self.weight_decay, self.betas = learning_rate, weight_decay, (beta1, beta2)
        self.warmup_steps = warmup_steps
        self.head_weights = [1.0] * num_heads if head_weights is None else list(head_weights)
        _check_weights(self.head_weights, num_heads)
        self.draft_vocab_size, self.state_cache = draft_vocab_size, state_cache
        self.draft_weights: tuple[Tensor, Tensor | None] | None = None
        self.distill, self.distill_loss = distill, distill_loss
        self.loss_chunk_tokens = loss_chunk_tokens
        self.backbone_dtype = backbone_dtype
        self.compile_layers = compile
        self.backbone: Any = None  # a transformers model, here as soon as `configure_model` was called
        self._make_metrics(num_heads)
        # A checkpoint holds the heads only; `on_load_checkpoint` checks what is in it.
        self.strict_loading = False

    def _make_metrics(self, num_heads: int) -> None:
        self.val_metrics: dict[str, float] = {}
        self.val_step: int | None = None
        self.watch = LossWatch()
        self.val_coverage = MeanMetric()
        self.val_losses: Any = nn.ModuleList(MeanMetric() for _ in range(num_heads))
        self.val_overlaps: Any = nn.ModuleList(MeanMetric() for _ in range(num_heads))
        self.val_accuracies: Any = nn.ModuleList(TopKAccuracy(TOP_K) for _ in range(num_heads))
        self.val_tokens_per_step = TokensPerStep(num_heads, TOP_K)

    def configure_model(self) -> None:
        if self.backbone is not None:
            return
        if self.device_mesh is None:
            self._load()
            self._choose_draft_vocabulary()
            return
        mesh = self.device_mesh["data_parallel"]
        # One process of a node after the other: its memory then holds one whole model, not one per device.
        for rank in range(self.trainer.strategy.num_processes):
            if rank == self.local_rank:
                self._load()
                shard(self.backbone, mesh)
                fully_shard(self.heads, mesh=mesh)
            self.trainer.strategy.barrier()
        self._choose_draft_vocabulary()

    def _load(self) -> None:
        self.backbone = load_backbone(self.model_name_or_path, self._backbone_dtype())
        self.heads.init_from_norm(norm_weight(final_norm(self.backbone)))
        if self.start_heads is not None:
            given = start_heads(self.start_heads, self.heads)
            if given.draft_to_target is not None:
                self._refuse_other_size(given.draft_vocab_size, f"the heads in {self.start_heads} draft")
                self.draft_vocab_size = given.draft_vocab_size
                self.heads.set_draft_vocabulary(given.draft_to_target)
                self.heads.check_fits(self.heads.hidden_size, self.backbone.get_output_embeddings().weight.shape[0])
            if isinstance(self.heads, Eagle3DraftModel):
                copy_head(self.heads, self.backbone.get_output_embeddings())
            self.heads.load_state_dict(given.state_dict())
        layers: Sequence[int] = self.heads.target_layers if isinstance(self.heads, Eagle3DraftModel) else ()
        kept = None
        if self.state_cache is not None:
            kept = StateCache(self.state_cache, self.model_name_or_path, self._backbone_dtype(), layers)
        self.states = FrozenStates(self.backbone, layers, kept)
        if self.start_heads is None:
            self._fit()
        if self.compile_layers:
            for layer in self.backbone.get_decoder().layers:
                layer.compile()

    def _fit(self) -> None:
        """Let new heads start from a least-squares fit on training text, where there is one for their kind."""
        tokens = FITTED_TOKENS if isinstance(self.heads, Eagle3DraftModel) else self.fitted_tokens
        chunks = self.trainer.datamodule.chunks.get("train") if tokens else None
        # A run that goes on has its heads in the checkpoint.
        if chunks is not None and self.trainer.ckpt_path is None:
            self.fit(chunks, tokens)

    def fit(self, chunks: np.ndarray, tokens: int) -> None:
        """Fit new heads by least squares on some ``tokens`` of training text ``chunks`` [n, chunk_tokens]."""
        some = chunks[:: max(1, len(chunks) * chunks.shape[1] // tokens)]
        ids = [torch.from_numpy(row.astype("int64"))[None].to(self.states.device) for row in some]
        if isinstance(self.heads, Eagle3DraftModel):
            fit_features(self.heads, map(self.states, progress(ids, "fitting the draft model by least squares")))
            return
        heads = self.heads.to(self.states.device)
        doing = "fitting heads by least squares"
        fit_heads(heads, lambda: ((self.states(row)[0], self._tokens_before(row)[0]) for row in progress(ids, doing)))

    def _refuse_other_size(self, size: int | None, who: str) -> None:
        if self.draft_vocab_size not in (None, size):
            raise ValueError(
                f"{who} {'all' if size is None else size} tokens, and model.draft_vocab_size is "
                f"{self.draft_vocab_size}: leave it out, or start from other heads"
            )

    def _choose_draft_vocabulary(self) -> None:
        """Count the draft vocabulary on the training chunks, unless the heads brought one or a checkpoint will."""
        if self.draft_vocab_size is None or self.heads.draft_to_target is not None:
            return
        chunks = self.trainer.datamodule.chunks.get("train")
        if chunks is None or self.trainer.ckpt_path is not None:
            # Validation and test, or a run that goes on: the checkpoint has it.
            return
        chosen = self.most_expected(chunks, self.draft_vocab_size)
        # Sums of floats may differ from device to device.
        self.heads.set_draft_vocabulary(self.trainer.strategy.broadcast(chosen))

    def most_expected(self, chunks: np.ndarray, size: int) -> Tensor:
        """The ids [size] of the tokens that the model expects most often on ``chunks`` [n, chunk_tokens]."""
        counts = expected_counts(
            chunks,
            lambda ids: self.states.norm(self._last(self.states(ids))),
            self.backbone.get_output_embeddings(),
            self.states.device,
        )
        return most_expected(counts, size).cpu()

    def _draft_rows(self) -> tuple[Tensor, Tensor | None]:
        """Weight [v, d] and bias [v] of the language-model head for the tokens that are drafted, copied once."""
        if self.heads.draft_to_target is None and self.draft_vocab_size is not None:
            raise ValueError("model.draft_vocab_size needs training text to count on, or heads that have one")
        lm_head = self.backbone.get_output_embeddings()
        if self.heads.draft_to_target is None:
            return copy_head(self.heads, lm_head)
        if self.draft_weights is None:
            self.draft_weights = copy_head(self.heads, lm_head)
        return self.draft_weights

    def _last(self, states: Tensor) -> Tensor:
        """h_0 [..., d], the last channels of the backbone's states."""
        return states[..., -self.heads.hidden_size :]

    def _backbone_dtype(self) -> torch.dtype:
        if self.backbone_dtype != "auto":
            return getattr(torch, self.backbone_dtype)
        precision = str(self.trainer.precision)
        named = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
        return next((dtype for prefix, dtype in named.items() if precision.startswith(prefix)), torch.float32)

    def train(self, mode: bool = True) -> "HeadsModule":
        super().train(mode)
        if self.backbone is not None:
            self.backbone.eval()
        return self

    def forward(self, input_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """What the LM head reads, for ``input_ids`` [batch, length]: each head's states and h_0, [batch, length, d].

        Raises ValueError when the sequences are too short for the heads or too long for the model.
        """
        length, longest = input_ids.shape[1], self.config.max_position_embeddings
        if not self.heads.num_heads + 2 <= length <= longest:
            least = self.heads.num_heads + 2
            raise ValueError(f"data.chunk_tokens is {length}; these heads and this model take {least} to {longest}")
        states = self.states(input_ids)
        hidden = self._last(states)
        read = states[..., : -self.heads.hidden_size] if isinstance(self.heads, Eagle3DraftModel) else hidden
        return self.heads(read, self._tokens_before(input_ids)), hidden

    @torch.no_grad()
    def _tokens_before(self, input_ids: Tensor) -> Tensor | None:
        """For conditioned heads, what they will have drafted: embeddings [batch, length, heads, d] of the true tokens.

        The last positions wrap around; the loss leaves them out, since they have no target.
        """
        if not self.heads.conditioned:
            return None
        embedded = self.backbone.get_input_embeddings()(input_ids)
        return torch.stack([embedded.roll(-i, dims=1) for i in range(1, self.heads.num_heads + 1)], dim=-2)

    def losses(
        self, input_ids: Tensor, with_ranks: bool, with_own: bool = False
    ) -> tuple[list[Tensor], list[Tensor | None], list[Tensor | None]]:
        """Per head: its mean loss in nats per token; ranks [rows, batch, targets]; overlaps [batch, targets].

        Ranks, where asked for, are those of its targets and, ``with_own``, of the tokens that the model itself finds
        likeliest there. Overlaps (1 - total variation) with the model's own distributions are computed ``with_own``.
        """
        lm_head = self.backbone.get_output_embeddings()
        outputs, hidden = self(input_ids)
        weight, bias = self._draft_rows()
        chosen, log_sums = self.heads.draft_to_target, None
        # What a head may be asked for at each token's place: the token itself, and the model's likeliest one.
        tokens = input_ids[None]
        with torch.no_grad():
            own = self.states.norm(hidden) if self.distill or with_own else None
            if with_own:
                sums, likeliest, covered = over_vocabulary(
                    own.flatten(0, 1), lm_head.weight, getattr(lm_head, "bias", None), chosen, self.loss_chunk_tokens
                )
                log_sums = sums.view(input_ids.shape)
                tokens = torch.stack([input_ids, likeliest.view(input_ids.shape).roll(1, dims=1)])
            if chosen is not None:
                if with_own:
                    self.val_coverage.update(covered)
                # Among the tokens drafted: their place there, -1 for others.
                place = torch.full((lm_head.weight.shape[0],), -1, device=chosen.device)
                place[chosen] = torch.arange(len(chosen), device=chosen.device)
                tokens = place[tokens]
        losses, all_ranks, all_overlaps = [], [], []
        for i, states in enumerate(outputs, start=1):
            wanted = tokens[:, :, 1 + i :].flatten(1)
            loss, ranks, overlaps = chunked_loss(
                states[:, : -1 - i].flatten(0, 1),
                weight,
                wanted[0],
                bias,
                self.loss_chunk_tokens,
                wanted if with_ranks else None,
                # The state at t + i gives the model's own distribution of token t + 1 + i.
                None if own is None else own[:, i:-1].flatten(0, 1),
                _OBJECTIVES[self.distill_loss] if self.distill else "tokens",
                None if log_sums is None else log_sums[:, i:-1].flatten(),
            )
            shape = len(input_ids), -1
            losses.append(loss)
            all_ranks.append(None if ranks is None else ranks.unflatten(1, shape))
            all_overlaps.append(overlaps.unflatten(0, shape) if with_own else None)
        return losses, all_ranks, all_overlaps

    def training_step(self, input_ids: Tensor, batch_idx: int) -> Tensor:
        # Ranks cost a pass over the logits: only where they are looked at.
        log_now = (self.global_step + 1) % self.trainer.log_every_n_steps == 0
        losses, ranks, _ = self.losses(input_ids, with_ranks=log_now)
        total = self._weighted(losses)
        # All processes see the same number, so that all of them stop or none.
        mean = self.trainer.strategy.reduce(total.detach().clone(), reduce_op="mean")
        self.watch.see(mean.item(), self.global_step)
        if log_now:
            for i, (loss, rank) in enumerate(zip(losses, ranks, strict=True), start=1):
                self.log(f"train_loss_head{i}", loss.detach(), sync_dist=True)
                for k in range(1, TOP_K + 1):
                    self.log(f"train_top{k}_head{i}", top_k_accuracy(rank[0].flatten(), k), sync_dist=True)
        self.log("train_loss", mean, prog_bar=True)
        return total

    def _weighted(self, losses: list) -> Any:
        return sum(weight * loss for weight, loss in zip(self.head_weights, losses, strict=True))

    def validation_step(self, input_ids: Tensor, batch_idx: int) -> None:
        losses, ranks, overlaps = self.losses(input_ids, with_ranks=True, with_own=True)
        for i, (loss, rank, overlap) in enumerate(zip(losses, ranks, overlaps, strict=True)):
            self.val_losses[i].update(loss, weight=rank[0].numel())
            self.val_overlaps[i].update(overlap)
            self.val_accuracies[i].update(rank[0].flatten())
        self.val_tokens_per_step.update([rank[1] for rank in ranks], overlaps)

    def on_validation_epoch_end(self) -> None:
        self._log_means("val")

    def test_step(self, input_ids: Tensor, batch_idx: int) -> None:
        self.validation_step(input_ids, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_means("test")

    def _log_means(self, stage: str) -> None:
        self.val_metrics, self.val_step = self.means(stage), self.trainer.global_step
        # Every process computed them over all processes' chunks.
        self.log_dict(self.val_metrics, sync_dist=False)

    def means(self, stage: str) -> dict[str, float]:
        """The figures of a ``stage`` over all batches since the last call, by name."""
        means = {}
        for i, (loss, accuracy) in enumerate(zip(self.val_losses, self.val_accuracies, strict=True), start=1):
            means[f"{stage}_loss_head{i}"] = loss.compute().item()
            for k, share in enumerate(accuracy.compute().tolist(), start=1):
                means[f"{stage}_top{k}_head{i}"] = share
            overlap = self.val_overlaps[i - 1]
            means[f"{stage}_overlap_head{i}"] = overlap.compute().item()
            for metric in (loss, accuracy, overlap):
                metric.reset()
        if self.heads.draft_to_target is not None:
            means[f"{stage}_coverage"] = self.val_coverage.compute().item()
            self.val_coverage.reset()
        means[f"{stage}_loss"] = self._weighted(
            [means[f"{stage}_loss_head{i + 1}"] for i in range(len(self.val_losses))]
        )
        *greedy, sampled = self.val_tokens_per_step.compute().tolist()
        for k, tokens in enumerate(greedy, start=1):
            means[f"{stage}_tokens_per_step_top{k}"] = tokens
        means[f"{stage}_tokens_per_step_sampled"] = sampled
        self.val_tokens_per_step.reset()
        return means

    def configure_optimizers(self) -> dict:
        total = self.trainer.estimated_stepping_batches
        if total == float("inf"):
            raise ValueError("the cosine schedule needs an end: give --trainer.max_steps or --trainer.max_epochs")
        optimizer, schedule = self.optimizer(int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer(self, steps: int) -> tuple[Any, Any]:
        """AdamW and the schedule of its rate over ``steps`` steps."""
        trained = [p for p in self.heads.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, self.warmup_steps, steps)

    def state_dict(self, *args, **kwargs) -> dict:
        state = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if name.startswith("heads.")}

    def whole_heads(self) -> TrainedHeads | None:
        """The heads on the CPU, put together from all processes, all of which must call it; None but on the first."""
        state = get_model_state_dict(self.heads, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not self.trainer.is_global_zero:
            return None
        heads = new_heads(self.config, self.heads.kind, self.heads.num_heads, *self.shape)
        chosen = self.heads.draft_to_target
        heads.set_draft_vocabulary(None if chosen is None else chosen.cpu())
        if isinstance(heads, Eagle3DraftModel):
            heads.make_own_head()
        heads.load_state_dict(state, assign=True)
        return heads

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["run"] = describe_run(self)
        checkpoint["first_loss"], checkpoint["high_batches"] = self.watch.first, self.watch.high
        checkpoint["val_metrics"], checkpoint["val_step"] = self.val_metrics, self.val_step

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        chosen = checkpoint["state_dict"].get("heads.draft_to_target")
        if chosen is not None and self.draft_vocab_size in (None, len(chosen)):
            self.draft_vocab_size = len(chosen)
            self.heads.set_draft_vocabulary(chosen)
            self.draft_weights = None
            self._draft_rows()
        refuse_other_run(checkpoint.get("run"), self)
        self.watch.first, self.watch.high = checkpoint["first_loss"], checkpoint["high_batches"]
        self.val_metrics, self.val_step = checkpoint["val_metrics"], checkpoint["val_step"]


def _check_weights(weights: Sequence[float], count: int) -> None:
    if len(weights) != count or min(weights) < 0 or not 0 < sum(weights) < torch.inf:
        raise ValueError(f"model.head_weights must be {count} numbers of at least 0 and not all 0, got {weights}")


def _check_compiler() -> None:
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ValueError(f"model.compile needs a C++ compiler: install {compiler}, or name another one in CXX")


def _check_distilling(distill: bool, loss: str) -> None:
    if loss not in _OBJECTIVES:
        raise ValueError(f"model.distill_loss must be {' or '.join(_OBJECTIVES)}, got {loss!r}")
    if loss == "overlap" and not distill:
        raise ValueError("model.distill_loss overlap needs the model's own distributions: add --model.distill true")


def _check_rates(end: float = math.inf, **rates: float) -> None:
    """Refuse numbers of the optimizer that are negative, not finite, or not below ``end``."""
    for name, value in rates.items():
        if not 0 <= value < end:
            words = "finite" if end == math.inf else f"below {end}"
            raise ValueError(f"model.{name} must be at least 0 and {words}, got {shown(value)}")
