"""What tells one training run from another: a checkpoint goes on only in the run that made it."""

from typing import TYPE_CHECKING

from decoder.parts import Eagle3DraftModel

if TYPE_CHECKING:
    from heads_train.module import HeadsModule


def describe_heads(module: "HeadsModule") -> dict:
    """What the heads are for, by setting; a checkpoint that differs in it holds other heads."""
    return {
        "model.model_name_or_path": module.model_name_or_path,
        "model.num_heads": module.heads.num_heads,
        "model.kind": module.heads.kind,
        "model.draft_vocab_size": module.draft_vocab_size,
        "model.gate_width": getattr(module.heads, "gate_width", None),
        "model.shared": getattr(module.heads, "shared", False),
        **describe_draft_model(module),
    }


def describe_draft_model(module: "HeadsModule") -> dict:
    """What tells eagle3 draft models apart, by setting."""
    if not isinstance(heads := module.heads, Eagle3DraftModel):
        return {}
    return {
        "model.target_layers": list(heads.target_layers or ()),
        "model.sliding_window": heads.config.sliding_window,
    }


def describe_run(module: "HeadsModule") -> dict:
    """What the heads are made by, by setting; a checkpoint that differs in it is another run's.

    The number of steps is none of it, and only the product of devices, batch size and accumulated batches counts.
    """
    trainer, data = module.trainer, module.trainer.datamodule
    return {
        **describe_heads(module),
        "model.heads": module.start_heads,
        "model.learning_rate": module.learning_rate,
        "model.weight_decay": module.weight_decay,
        "model.beta1": module.betas[0],
        "model.beta2": module.betas[1],
        "model.warmup_steps": module.warmup_steps,
        "model.head_weights": module.head_weights,
        "model.fitted_tokens": module.fitted_tokens,
        "model.distill": module.distill,
        "model.distill_loss": module.distill_loss,
        "model.backbone_dtype": module.backbone_dtype,
        **data.describe(),
        "trainer.precision": str(trainer.precision),
        "trainer.gradient_clip_val": trainer.gradient_clip_val,
        "trainer.gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "trainer.limit_train_batches": trainer.limit_train_batches,
        "chunks per step": data.batch_size * trainer.world_size * trainer.accumulate_grad_batches,
    }


def refuse_other_run(saved: dict | None, module: "HeadsModule") -> None:
    """Raise ValueError when ``saved``, the checkpoint's `describe_run`, is another run's, naming the setting.

    To validate and test, only the heads must be those asked for. None is no checkpoint of this package.
    """
    if saved is None:
        raise ValueError(
            "the checkpoint is not one of heads-train, or an older version's; give another one or another --output"
        )
    asked = describe_run(module) if module.trainer.state.fn == "fit" else describe_heads(module)
    # Checkpoints of before there was anything else.
    width = 2 * module.heads.hidden_size if module.heads.kind == "gated" else None
    before = {"model.gate_width": width, "model.shared": False, "model.fitted_tokens": 0}
    saved = {"model.distill_loss": "cross_entropy"} | before | saved
    for name, value in asked.items():
        if saved.get(name) != value:
            raise ValueError(
                f"the checkpoint was made with {name} {saved.get(name)}, this run has {value}; "
                "give another --output to start afresh"
            )
