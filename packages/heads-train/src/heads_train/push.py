"""``heads-train push``: heads with their card in a repository of the Hugging Face hub."""

import json
import tempfile
from pathlib import Path

import click
from huggingface_hub import HfApi

from decoder.heads import TrainedHeads, load_trained
from decoder.parts import CONFIG, Eagle3DraftModel, is_repository, read_json, save_draft_model
from heads_train.model_card import model_card


@click.command()
@click.option(
    "--base-model", help="the hub's name of the model that the heads are for; the checkpoint's own by default"
)
@click.option("--private", is_flag=True, help="make a new repository private")
@click.option("--dry-run", is_flag=True, help="show the files and the card, and send nothing")
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("repository")
def push(base_model: str | None, private: bool, dry_run: bool, source: str, repository: str) -> None:
    """Send the heads in SOURCE to REPOSITORY (owner/name) on the hub, with a card that says how they are used.

    Only the weights (safetensors), their configuration and the card are sent. It needs a token that may write there
    (`hf auth login`, or HF_TOKEN).
    """
    if not is_repository(repository):
        raise ValueError(f"{repository} is no name of a hub repository: give owner/name")
    heads, config = load_trained(source), read_json(Path(source) / CONFIG)
    base_model = base_model or (heads.base_model if isinstance(heads, Eagle3DraftModel) else config.get("base_model"))
    if base_model is None or not is_repository(base_model) or Path(base_model).exists():
        raise ValueError(
            f"the heads in {source} are for {base_model or 'a model without a name'}, which others cannot find: name "
            "the hub's model with --base-model"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write(heads, config.get("training"), folder, base_model, repository)
        files = sorted(folder.iterdir())
        for file in files:
            click.echo(f"{file.name}  {file.stat().st_size / 1e6:.2f} MB")
        if dry_run:
            click.echo(f"\n{(folder / 'README.md').read_text(encoding='utf-8')}\nnothing was sent to {repository}")
            return
        click.echo(_send(folder, repository, private))


def _write(heads: TrainedHeads, training: dict | None, folder: Path, base_model: str, repository: str) -> None:
    """Write what is sent into the empty ``folder``."""
    if isinstance(heads, Eagle3DraftModel):
        heads.base_model = base_model
        save_draft_model(heads, folder, training=training)
    else:
        heads.save_pretrained(folder, base_model=base_model, training=training)
    # Checkpoints of others say of their training what they like.
    told = training if isinstance(training, dict) and {"validation", "versions"} <= training.keys() else None
    card = model_card(repository, heads, base_model, told, _elsewhere(heads, base_model, repository))
    (folder / "README.md").write_text(card, encoding="utf-8")


def _elsewhere(heads: TrainedHeads, base_model: str, repository: str) -> str:
    """How transformers, vLLM and whoever wants this very revision use them."""
    served = "vLLM and SGLang load EAGLE-3 draft models, and no heads of this kind.\n"
    if isinstance(heads, Eagle3DraftModel):
        speculative = {"method": "eagle3", "model": repository, "num_speculative_tokens": heads.num_heads}
        served = f"""In vLLM, which verifies drafts by a rule of its own:

```
vllm serve {base_model} --speculative-config '{json.dumps(speculative)}'
```
"""
    return f"""
`decoder.load_heads("{repository}", revision="COMMIT")` gives the heads of one commit, for the argument `heads`.

## In other programs
In transformers, behind `generate`:

```python
hook = decoder.custom_generate(heads="{repository}")
model.generate(**inputs, max_new_tokens=1000, custom_generate=hook)
```

{served}"""


def _send(folder: Path, repository: str, private: bool) -> str:
    """Upload the folder as one commit; returns a sentence with its address. Raises OSError if the hub refuses."""
    api = HfApi(library_name="tokenswift-heads-train")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Draft heads")
    except Exception as error:
        # The hub client raises many unrelated types for one fact: the heads are not there.
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise OSError(
            f"the hub did not take the heads for {repository} ({reason}): see that it can be reached, and that "
            "`hf auth login` or HF_TOKEN has a token that may write there"
        ) from error
    return f"sent to {commit.repo_url}, commit {commit.oid}"
