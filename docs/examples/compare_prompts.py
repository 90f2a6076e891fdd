"""Compare methods on prompts of your own, one per line of a text file, and check that their texts are the same.

python docs/examples/compare_prompts.py --model data/smollm2 --prompts my-prompts.txt --methods auto suffix
"""

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from ts_eval.compare import compare


def as_rows(prompts: Path, chat: bool, folder: Path) -> Path:
    """The lines as a file that ts-eval reads: messages to a chat model, or texts to go on with."""
    lines = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [{"messages": [{"role": "user", "content": line}]} if chat else {"text": line} for line in lines]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=["auto"])
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("runs/my-prompts"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    chat = AutoTokenizer.from_pretrained(args.model).chat_template is not None
    results = compare(
        ["ar", *args.methods],
        model=args.model,
        prompts=str(as_rows(args.prompts, chat, args.output)),
        max_new_tokens=args.max_new_tokens,
        runs=1,
        sampling={"temperature": 0.7, "min_p": 0.0, "repetition_penalty": 1.0},
        output=args.output / "comparison",
    )
    for name, row in results["methods"].items():
        same = "the same text" if row["identical_to_ar"] else "ANOTHER TEXT"
        print(f"{name}: {row['tokens_per_second']:.1f} tokens/s, {row['speedup']:.2f}x, {same}")
    print(f"`ts-eval report {args.output / 'comparison'}` makes a page of it")


if __name__ == "__main__":
    main()
