"""``heads-train export``: heads in a layout that another engine loads."""

import json
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from decoder import DraftHeads
from decoder.heads import load_trained
from decoder.parts import LAYOUTS, Eagle3DraftModel, read_model, save_draft_model
from heads_train.backbone import final_norm, norm_weight
from heads_train.new_heads import copy_head

MEDUSA = "medusa"
_TOLERANCE = 1e-2  # a relative error above that of half precision


@click.command()
@click.option("--format", "layout", type=click.Choice((*LAYOUTS, MEDUSA)), default="speculators", show_default=True)
@click.option(
    "--base-model", help="name of the model, as the other engine will find it; the checkpoint's own by default"
)
@click.option(
    "--target-layers", help="the layers whose inputs it reads, such as 2,16,29, where the checkpoint does not say which"
)
@click.option("--model", help="folder or hub id of the model, whose language-model head goes into a medusa checkpoint")
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
def export(
    layout: str, base_model: str | None, target_layers: str | None, model: str | None, source: str, output: Path
) -> None:
    """Write the heads in SOURCE to OUTPUT: speculators for vLLM, eagle3 for SGLang, medusa for vLLM.

    These engines verify its drafts by rules of their own, so what they write is not promised to be plain decoding's.
    """
    if output.resolve() == Path(source).resolve():
        raise ValueError(f"{output} is the draft model itself: give another folder to write to")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: give a new folder")
    if (model is not None) != (layout == MEDUSA):
        raise ValueError("--model goes with --format medusa, which needs it")
    heads = load_trained(source)
    if heads.kind != (MEDUSA if layout == MEDUSA else "eagle3"):
        raise ValueError(
            f"{source} holds {heads.num_heads} {heads.kind} heads, and other engines load draft models of kind eagle3 "
            "and, by --format medusa, heads of kind medusa alone: train some with --model.kind"
        )
    if isinstance(heads, Eagle3DraftModel):
        heads.base_model = base_model or heads.base_model
        heads.target_layers = _layers(heads, target_layers)
        save_draft_model(heads, output, layout=layout)
        named = heads.base_model
    else:
        if target_layers is not None:
            raise ValueError("--target-layers is for EAGLE-3 draft models: leave it out")
        assert model is not None
        named = base_model or model
        save_medusa(heads, model, named, output)
    click.echo(f"{layout} checkpoint for {named or 'a model without a name'} in {output}")


def save_medusa(heads: DraftHeads, model: str, named: str, output: Path) -> None:
    """Write heads of kind medusa as vLLM's MedusaModel reads them.

    Args:
        model: folder or hub id of their model; the rows of its language-model head for the drafted tokens are copied.
        named: what the checkpoint calls the model.

    Raises:
        ValueError: they are another model's, or its head has a bias.
    """
    read = read_model(model, torch.device("cpu"), dtype="auto")
    size, vocabulary = read.config.get_text_config().hidden_size, read.config.get_text_config().vocab_size
    heads.check_fits(size, vocabulary)
    own, norm = norm_weight(final_norm(read)).float(), heads._head(0).input_norm.weight.float()
    if (own - norm).norm() > _TOLERANCE * own.norm():
        raise ValueError(f"{heads.source} was trained on another model than {model}: their final norms differ")
    weight, bias = copy_head(heads, read.get_output_embeddings())
    if bias is not None:
        raise ValueError("a medusa checkpoint has no place for the bias of this model's language-model head")
    tensors = {
        f"blocks.{index}.layers.0.weight": heads._head(index).linear.weight.to(weight.dtype)
        for index in range(heads.num_heads)
    }
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": MEDUSA,
        "base_model_name_or_path": named,
        "hidden_size": size,
        "vocab_size": vocabulary,
        "truncated_vocab_size": len(weight),
        "num_heads": heads.num_heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": False,
        "original_lm_head": True,
        "torch_dtype": str(weight.dtype).removeprefix("torch."),
    }
    tensors["lm_heads.0.weight"] = weight
    if heads.draft_to_target is not None:
        tensors["token_map"] = heads.draft_to_target
    output.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _layers(heads: Eagle3DraftModel, given: str | None) -> tuple[int, ...]:
    """The layers that a draft model reads, by its checkpoint or as they were ``given``."""
    known, count = heads.target_layers, heads.fc.in_features // heads.config.target_hidden_size
    if given is None:
        if known is None:
            raise ValueError(
                f"{heads.source} does not say which {count} layers of the model it reads: add --target-layers; "
                "those of EAGLE-3's authors are 2,L/2,L-3 of L layers"
            )
        return known
    try:
        layers = tuple(int(number) for number in given.split(","))
    except ValueError:
        layers = ()
    if len(layers) != count or min(layers) < 0:
        raise ValueError(f"--target-layers must be {count} numbers of layers with commas between them, got {given!r}")
    if known not in (None, layers):
        raise ValueError(f"{heads.source} reads layers {','.join(map(str, known))}: leave out --target-layers")
    return layers
