"""``heads-train export``: an EAGLE-3 draft model in the layout that another engine loads."""

from pathlib import Path

import click

from decoder.heads import load_heads
from decoder.parts import LAYOUTS, Eagle3DraftModel, save_draft_model


@click.command()
@click.option("--format", "layout", type=click.Choice(LAYOUTS), default="speculators", show_default=True)
@click.option(
    "--base-model", help="name of the model, as the other engine will find it; the checkpoint's own by default"
)
@click.option(
    "--target-layers", help="the layers whose inputs it reads, such as 2,16,29, where the checkpoint does not say which"
)
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
def export(layout: str, base_model: str | None, target_layers: str | None, source: str, output: Path) -> None:
    """Write the draft model in SOURCE to OUTPUT: speculators for vLLM, eagle3 for SGLang.

    These engines verify its drafts by rules of their own, so what they write is not promised to be plain decoding's.
    """
    if output.resolve() == Path(source).resolve():
        raise ValueError(f"{output} is the draft model itself: give another folder to write to")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: give a new folder")
    heads = load_heads(source)
    if not isinstance(heads, Eagle3DraftModel):
        raise ValueError(
            f"{source} holds {heads.num_heads} {heads.kind} heads, and other engines load draft models of kind eagle3 "
            "alone: train one with --model.kind eagle3"
        )
    heads.base_model = base_model or heads.base_model
    heads.target_layers = _layers(heads, target_layers)
    save_draft_model(heads, output, layout=layout)
    click.echo(f"{layout} checkpoint for {heads.base_model or 'a model without a name'} in {output}")


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
