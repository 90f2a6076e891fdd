"""What a step costs at 1K, 4K, 16K and 64K tokens of context, and how much of its growth is attention's own.

    python packages/decoder/benchmarks/length.py --output runs/length

Every prompt is that many tokens of the shipped books, really prefilled; each method then takes ``--steps`` steps and
their median counts, and attention alone is timed with as many new tokens as the method verified. One thread and the
CPU time it takes, which other work on the machine hardly disturbs. The output folder receives ``length.json`` and
``length.png``. Needs matplotlib beside the decoder.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean, median

import torch
from long_run import plt, prompt_of, sampling, timed_steps

import decoder
from decoder.backends.attention import tree_attention
from decoder.backends.native.native_attention import NewTokens

DATA = Path("data")


@torch.inference_mode()
def attention_seconds(dec: decoder.Decoder, length: int, width: int) -> float:
    """What attention alone costs per step, all layers, ``width`` new tokens over ``length`` cached ones."""
    config = dec.model.config
    module = dec.model.model.layers[0].self_attn
    query = torch.randn(1, config.num_attention_heads, width, config.head_dim)
    key, value = torch.randn(2, 1, config.num_key_value_heads, length + width, config.head_dim)
    times = []
    for _ in range(15):
        start = time.process_time()
        for _ in range(config.num_hidden_layers):
            tree_attention(module, query, key, value, None, sequences=[NewTokens(length, width, None)])
        times.append(time.process_time() - start)
    return median(times)


def slope(x: list[int], y: list[float]) -> float:
    """Least-squares slope, seconds a token of length."""
    x, y = torch.tensor(x).double(), torch.tensor(y).double()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def measure(dec: decoder.Decoder, prompt: list[int], method: str, arguments: argparse.Namespace) -> dict:
    """Median seconds of a step behind ``prompt``, the nodes it verifies on average, and attention's share."""
    options = decoder.TokenSwiftOptions(decoder.parse_tree(arguments.tree), arguments.ngrams, arguments.budget)
    widths, forward = [], dec.target.forward
    dec.target.forward = lambda trees, *others: widths.append(sum(map(len, trees))) or forward(trees, *others)
    try:
        steps = timed_steps(dec.stream(prompt, 8 * arguments.steps, method, sampling(), options, ignore_eos=True))
        taken = [next(steps) for _ in range(arguments.steps + 1)][1:]
    finally:
        del dec.target.forward
    width = round(mean(widths[-arguments.steps :]))
    return {
        "step_seconds": median(seconds for seconds, _ in taken),
        "tokens_per_step": mean(len(chunk.token_ids) for _, chunk in taken),
        "nodes": width,
        "attention_seconds": attention_seconds(dec, len(prompt), width),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--methods", nargs="+", default=["ar", "tokenswift", "auto"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tree", default="1,2")
    parser.add_argument("--ngrams", type=int, default=0)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    heads = {kind: DATA / f"heads-{kind}" for kind in ("chained", "gated")}
    decoders = {
        method: decoder.load(DATA / "reference-model", heads["chained"] if method == "tokenswift" else heads["gated"])
        for method in arguments.methods
    }
    report = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "methods": {}}
    figure, axes = plt.subplots(1, len(arguments.methods), figsize=(5.2 * len(arguments.methods), 3.8), squeeze=False)
    for axis, (method, dec) in zip(axes[0], decoders.items(), strict=True):
        prompt = prompt_of(dec, max(arguments.lengths))
        rows = {length: measure(dec, prompt[:length], method, arguments) for length in arguments.lengths}
        seconds = [row["step_seconds"] for row in rows.values()]
        alone = [row["attention_seconds"] for row in rows.values()]
        slopes = [slope(arguments.lengths, times) * 1e9 for times in (seconds, alone)]
        report["methods"][method] = {"lengths": rows, "step_slope_ns": slopes[0], "attention_slope_ns": slopes[1]}
        cells = [
            f"{length}: {row['step_seconds'] * 1e3:.2f} ms ({row['nodes']} nodes, attention "
            f"{row['attention_seconds'] * 1e3:.2f})"
            for length, row in rows.items()
        ]
        print(
            f"{method}: {'; '.join(cells)}; slope {slopes[0]:.0f} ns a token, attention's {slopes[1]:.0f}", flush=True
        )
        axis.plot(arguments.lengths, [s * 1e3 for s in seconds], "o-", label=f"a step of {method}")
        axis.plot(arguments.lengths, [s * 1e3 for s in alone], "o--", label="its attention alone")
        axis.set(xlabel="tokens in the context", ylabel="ms of CPU time", ylim=(0, None), title=method)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(arguments.output / "length.png", dpi=110)
    (arguments.output / "length.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
