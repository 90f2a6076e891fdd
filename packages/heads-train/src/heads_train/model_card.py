"""The README.md of a heads folder: what the heads are for, how good they are, how they were made, how to use them."""

import json
import os
import tempfile
from pathlib import Path

from decoder.heads import TrainedHeads
from decoder.parts import EAGLE3


def write_model_card(folder: Path, heads: TrainedHeads, base_model: str, training: dict) -> None:
    """Write ``folder/README.md``, whole or not at all; ``training`` is what config.json says of it."""
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as scratch:
        Path(scratch, "README.md").write_text(model_card(str(folder), heads, base_model, training), encoding="utf-8")
        os.replace(Path(scratch, "README.md"), folder / "README.md")


def model_card(where: str, heads: TrainedHeads, base_model: str, training: dict | None, elsewhere: str = "") -> str:
    """The card as Markdown with the hub's front matter.

    Args:
        where: the folder or hub repository that the card stands in.
        training: what config.json says of it; None if it says nothing.
        elsewhere: a section on how other programs use the heads.
    """
    linear = sum(one.numel() for name, one in heads.named_parameters() if one.ndim > 1 and "lm_head" not in name)
    norms = sum(one.numel() for one in heads.parameters() if one.ndim == 1)
    what = f"A set of {heads.num_heads} {heads.kind} heads"
    if heads.kind == EAGLE3:
        what = f"An EAGLE-3 draft model, trained for {heads.num_heads} levels,"
    # A model's folder here is no model of the hub, which would refuse the card.
    base = "" if Path(base_model).exists() else f"base_model: {base_model}\n"
    return f"""---
{base}library_name: tokenswift
tags: [tokenswift, speculative-decoding, draft-heads]
---
# TokenSwift draft heads for {base_model}

{what} of {linear / 1e6:.1f}M parameters, norms ({norms}) apart. It drafts tokens
that the frozen model verifies: the text stays exactly what the model alone would have written.

```python
import decoder

dec = decoder.load({json.dumps(str(base_model))}, heads={json.dumps(where)})
print(dec.generate("It was a dark night, and", 200).text)
```
{elsewhere}{"" if training is None else _history(heads, training)}"""


def _history(heads: TrainedHeads, training: dict) -> str:
    figures = ("untrained", "validation", "validated_at_step", "versions")
    settings = {name: value for name, value in training.items() if name not in figures}
    return f"""
## Held-out text
{_figures(heads, training)}
## How they were trained
| setting | value |
|---|---|
{_rows(settings)}
## Versions
| package | version |
|---|---|
{_rows(training["versions"])}"""


def expected_tokens_per_step(kind: str, validation: dict[str, float]) -> str:
    """What heads of a kind would bring on the text of a validation, in one sentence."""
    greedy = [f"{validation[f'val_tokens_per_step_top{k}']:.2f}" for k in (1, 2, 3)]
    methods = {
        "chained": "tokenswift-fused or auto",
        "independent": "medusa or auto",
        "medusa": "medusa or auto",
        EAGLE3: "eagle3 or auto",
    }
    sentence = (
        f"expected tokens per step with {methods.get(kind, 'auto or tokenswift-fused')} on the validation text: greedy "
        f"{', '.join(greedy)} with 1, 2, 3 guesses per head; at temperature 1 "
        f"at most {validation['val_tokens_per_step_sampled']:.2f} with 1"
    )
    return sentence + ("; the draft pass of tokenswift adds up to 1" if kind == "chained" else "")


def loss_name(distill_loss: str | None) -> str:
    """What a loss is called in figures; ``distill_loss`` as in `HeadsModule`, None where nothing was distilled."""
    return "minus the logarithm of the overlap" if distill_loss == "overlap" else "cross entropy"


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _rows(values: dict) -> str:
    return "".join(f"| {name.replace('_', ' ')} | {value} |\n" for name, value in values.items())


def _figures(heads: TrainedHeads, training: dict) -> str:
    found, before = training["validation"], training["untrained"]
    if not found:
        return "Not measured: the run had no validation.\n"
    head_rows = ""
    for i in range(1, heads.num_heads + 1):
        top = " | ".join(f"{found[f'val_top{k}_head{i}']:.3f}" for k in (1, 2, 3))
        was = f"{before[f'val_loss_head{i}']:.2f}" if before else "-"
        head_rows += f"| {i} | {was} | {found[f'val_loss_head{i}']:.2f} | {top} |\n"
    loss = loss_name(training.get("distill_loss"))
    expected = ""
    if "val_tokens_per_step_sampled" in found:  # without it, the others counted a draft pass's token as well
        expected = f"""
{_capitalised(expected_tokens_per_step(heads.kind, found))}.

That is one token, which every verification gives, and the heads in a row that agreed with the model at each position of
this text. Text that the model writes itself is easier for it, and settings that drop unlikely tokens help, too.
"""
    return f"""Validated at step {training["validated_at_step"]}: {loss} in nats per token before
the first step and then, and how often the token was among a head's first guesses:

| head | before | after | top-1 | top-2 | top-3 |
|---|---|---|---|---|---|
{head_rows}{expected}"""
