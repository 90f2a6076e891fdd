"""What data/ holds for SmolLM2: prompts of our own, and heads that fit it; the model itself is fetched."""

import json
from pathlib import Path

import pytest
import torch

from decoder.draft_heads import DraftHeads

DATA = Path(__file__).parents[2] / "data"
HEADS = {"heads-smollm2": "gated", "heads-smollm2-chained": "chained"}


def prompts(split):
    lines = (DATA / "prompts" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_prompts_are_chats_of_one_message_and_none_is_held_out_and_trained_on():
    rows = {split: prompts(split) for split in ("train", "validation")}
    texts = []
    for found in rows.values():
        for row in found:
            [message] = row["messages"]
            assert set(row) == {"messages"} and message["role"] == "user" and message["content"].strip()
            texts.append(message["content"])
    assert len(rows["train"]) >= 300 and len(rows["validation"]) >= 40
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("folder, kind", HEADS.items())
def test_heads_fit_the_model_and_draft_a_part_of_its_tokens(folder, kind):
    heads = DraftHeads.from_pretrained(DATA / folder)
    assert heads.kind == kind and heads.num_heads == 3 and heads.norm_eps == 1e-5
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}
    heads.check_fits(576, 49_152)
    assert heads.draft_vocab_size == 8_192
    config = json.loads((DATA / folder / "config.json").read_text())
    validation, untrained = config["training"]["validation"], config["training"]["untrained"]
    assert config["base_model"] == "data/smollm2"
    for i in (1, 2, 3):
        assert validation[f"val_overlap_head{i}"] > untrained[f"val_overlap_head{i}"]


def test_heads_stay_small():
    assert sum(path.stat().st_size for folder in HEADS for path in (DATA / folder).iterdir()) < 30e6
