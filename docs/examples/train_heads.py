"""Train draft heads for a model of your own on a folder of text files, and see what they bring.

    python docs/examples/train_heads.py --model data/smollm2 --texts my-texts --output runs/my-heads

The texts should be like those that the model will write, 20 files or more. The model itself stays as it is. A run that
is cut goes on when the same command is given again.
"""

import argparse
import sys

import decoder
from heads_train.cli import main as heads_train


def train(model: str, texts: str, output: str, steps: int, more: list[str]) -> int:
    """Gated heads that learn the model's own distributions; returns the exit status of heads-train."""
    settings = {
        "model.model_name_or_path": model,
        "model.state_cache": f"{output}/states",  # the model reads each chunk once
        "data.source": texts,
        "data.batch_size": 2,
        "trainer.max_steps": steps,
        "trainer.val_check_interval": max(steps // 3, 1),
        "output": output,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    # Three gated heads, distilled, over the 8,192 tokens that the model expects most often.
    return heads_train(["fit", "--config", "smollm2-gated.yaml", *flags, *more])


def tokens_per_step(model: str, heads: str | None, prompt: str) -> float:
    """With the same seed, so that both texts are the same."""
    dec = decoder.load(model, heads=heads)
    sampling = decoder.SamplingParams(temperature=0.7, seed=1)
    return dec.generate(prompt, 200, sampling=sampling, ignore_eos=True).stats.tokens_per_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, hub id or GGUF file")
    parser.add_argument("--texts", required=True, help="folder of .txt files")
    parser.add_argument("--output", default="runs/my-heads")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", default="It was a dark night, and")
    args, more = parser.parse_known_args()  # more: flags of heads-train
    if status := train(args.model, args.texts, args.output, args.steps, more):
        sys.exit(status)
    heads = f"{args.output}/best"
    without, with_heads = (tokens_per_step(args.model, one, args.prompt) for one in (None, heads))
    print(f"tokens per step: {without:.2f} without heads, {with_heads:.2f} with {heads}")


if __name__ == "__main__":
    main()
