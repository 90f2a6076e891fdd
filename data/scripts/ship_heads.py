"""Stores trained heads in bfloat16, half the bytes, with what their config.json tells of how they were made.

    python data/scripts/ship_heads.py runs/heads-smollm2-gated/best data/heads-smollm2

Names of folders on the machine that trained may be replaced: --replace OLD=NEW, as often as needed.
"""

import argparse
import json
from pathlib import Path

import torch

from decoder.draft_heads import CONFIG, DraftHeads
from heads_train.model_card import write_model_card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heads", type=Path, help="folder of heads-train: DIR/best or DIR/last")
    parser.add_argument("output", type=Path)
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW", help="in the settings' paths")
    args = parser.parse_args()
    text = (args.heads / CONFIG).read_text(encoding="utf-8")
    for pair in args.replace:
        old, _, new = pair.partition("=")
        text = text.replace(old, new)
    config = json.loads(text)
    heads = DraftHeads.from_pretrained(args.heads).to(torch.bfloat16)
    heads.check_finite()
    heads.save_pretrained(args.output, base_model=config["base_model"], training=config["training"])
    write_model_card(args.output, heads, config["base_model"], config["training"])
    size = sum(path.stat().st_size for path in args.output.iterdir())
    print(f"{args.output}: {heads.num_heads} {heads.kind} heads, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
