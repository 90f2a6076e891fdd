"""Long generations: is a step's time linear in the length, is memory what the plan says, is the text AR's?

    python packages/decoder/benchmarks/long_run.py --new-tokens 32000 --output runs/long-reference
    python packages/decoder/benchmarks/long_run.py --tiny --new-tokens 100000 --output runs/long-tiny

Every method runs in a process of its own, so that its peak memory is its own, on one thread, and is timed by the CPU
time it takes, which other work on the machine hardly disturbs. The output folder receives
``long_run.json``, ``long_run.png`` and the tokens. Needs matplotlib beside the decoder.
"""

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import decoder
from decoder.audit import audit_tokens
from decoder.kernels.attention import tree_attention

SEGMENTS = 32
DATA = Path("data")


def tiny_decoder() -> decoder.Decoder:
    """A random Llama of two layers, its weights spread so that drafts are right now and then."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    heads = decoder.DraftHeads(64)
    heads.init_from_norm(model.model.norm.weight)
    return decoder.Decoder(model, heads=heads)


def build(arguments: argparse.Namespace) -> decoder.Decoder:
    return tiny_decoder() if arguments.tiny else decoder.load(arguments.model, arguments.heads)


def prompt_ids(dec: decoder.Decoder, arguments: argparse.Namespace) -> list[int]:
    if dec.tokenizer is None:
        return torch.randint(512, (arguments.prompt_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    text = Path(arguments.prompt_file).read_text(encoding="utf-8")
    return dec.tokenizer(text, verbose=False)["input_ids"][: arguments.prompt_tokens]


def options(arguments: argparse.Namespace) -> decoder.TokenSwiftOptions:
    tree = decoder.parse_tree(arguments.tree)
    return decoder.TokenSwiftOptions(tree=tree, ngrams=arguments.ngrams, budget=arguments.budget)


def sampling() -> decoder.SamplingParams:
    return decoder.SamplingParams(min_p=0.1, repetition_penalty=1.2, penalty_window=1024, seed=0)


def memory(name: str) -> int:
    """Bytes of this process (Linux): VmRSS now, VmHWM at its peak. ru_maxrss would be that of the starting one too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status).group(1)) * 1024


def timed_steps(stream: Iterator[decoder.Chunk]) -> Iterator[tuple[float, decoder.Chunk]]:
    """(CPU seconds, chunk) of every step; the prefill counts in the first."""
    start = time.process_time()
    for chunk in stream:
        now = time.process_time()
        yield now - start, chunk
        start = time.process_time()


def generate(arguments: argparse.Namespace, method: str, results: multiprocessing.Queue) -> None:
    """One generation in this process: tokens, (length, seconds) of every step, memory."""
    torch.set_num_threads(1)
    dec = build(arguments)
    prompt = prompt_ids(dec, arguments)
    dec.generate(prompt[:64], 16, method, sampling(), options(arguments), ignore_eos=True)
    before = memory("VmRSS")
    steps, length = [], len(prompt)
    stream = dec.stream(prompt, arguments.new_tokens, method, sampling(), options(arguments), ignore_eos=True)
    for seconds, chunk in timed_steps(stream):
        steps.append((length, seconds, len(chunk.token_ids)))
        length += len(chunk.token_ids)
    out, used = chunk.output, memory("VmHWM") - before
    results.put({"tokens": out.token_ids, "steps": steps[1:], "memory": used, "stats": vars(out.stats)})


def planned_bytes(dec: decoder.Decoder, arguments: argparse.Namespace, method: str, prompt: int) -> int:
    """Bytes of the KV caches: 2 x layers x KV heads x head size x 4 bytes a position, full and partial."""
    config, opts = dec.model.config, options(arguments)
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    positions = prompt + arguments.new_tokens + 1
    if method == "tokenswift":
        heads = next(iter(dec.heads.values())).num_heads
        positions += len(decoder.rank_paths(opts.tree, heads + 1)) + opts.ngrams * (heads + 1)
        positions += opts.budget_for(prompt) + 1
    return positions * per_position


@torch.inference_mode()
def attention_seconds(dec: decoder.Decoder, lengths: list[int], width: int) -> list[float]:
    """What attention alone costs per step, all layers, ``width`` new tokens over ``length`` cached ones."""
    config, seconds = dec.model.config, []
    module = dec.model.model.layers[0].self_attn
    for length in lengths:
        query = torch.randn(1, config.num_attention_heads, width, config.head_dim)
        key, value = torch.randn(2, 1, config.num_key_value_heads, length + width, config.head_dim)
        times = []
        for _ in range(15):
            start = time.process_time()
            for _ in range(config.num_hidden_layers):
                tree_attention(module, query, key, value, None)
            times.append(time.process_time() - start)
        seconds.append(median(times))
    return seconds


def margin(dec: decoder.Decoder, prompt: list[int], texts: list[list[int]], first: int) -> float:
    """How far the first difference of two texts is from a tie, by scoring both again up to it."""
    reports = [audit_tokens(dec.model, prompt, tokens[: first + 1], sampling()) for tokens in texts]
    return max(report.margin or 0.0 for report in reports)


def segments(steps: list[tuple[int, float, int]], size: int) -> tuple[list[int], list[float]]:
    """Median step time per stretch of ``size`` tokens: (length at its middle, seconds)."""
    groups: dict[int, list[float]] = {}
    for length, seconds, _ in steps:
        groups.setdefault(length // size, []).append(seconds)
    return [g * size + size // 2 for g in groups], [median(times) for times in groups.values()]


def slope(x: list[int], y: list[float]) -> float:
    """Least-squares slope, seconds a token of length."""
    x, y = torch.tensor(x).double(), torch.tensor(y).double()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--model", default=DATA / "reference-model")
    parser.add_argument("--heads", default=DATA / "heads-chained")
    parser.add_argument("--prompt-file", default="README.md")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32000)
    parser.add_argument("--methods", nargs="+", default=["ar", "tokenswift"])
    parser.add_argument("--tree", default="1,2")
    parser.add_argument("--ngrams", type=int, default=0)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dec = build(arguments)
    prompt = prompt_ids(dec, arguments)
    size = max(256, arguments.new_tokens // SEGMENTS)
    context = multiprocessing.get_context("spawn")
    report, texts = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "methods": {}}, {}
    figure, axes = plt.subplots(1, len(arguments.methods), figsize=(5.2 * len(arguments.methods), 3.8), squeeze=False)
    for axis, method in zip(axes[0], arguments.methods, strict=True):
        results = context.Queue()
        process = context.Process(target=generate, args=(arguments, method, results))
        process.start()
        run = results.get()
        process.join()
        texts[method] = run["tokens"]
        lengths, seconds = segments(run["steps"], size)
        width = 1 + (run["stats"]["drafted"] > 0) * len(decoder.rank_paths(options(arguments).tree, 99))
        alone = attention_seconds(dec, lengths, width)
        plan = planned_bytes(dec, arguments, method, len(prompt))
        first = next((i for i, (a, b) in enumerate(zip(run["tokens"], texts["ar"], strict=True)) if a != b), None)
        row = {
            "tokens": len(run["tokens"]),
            "steps": len(run["steps"]),
            "seconds": sum(s for _, s, _ in run["steps"]),
            "step_slope_ns_per_token": slope(lengths, seconds) * 1e9,
            "attention_slope_ns_per_token": slope(lengths, alone) * 1e9,
            "planned_cache_bytes": plan,
            "memory_bytes": run["memory"],
            "first_difference_from_ar": first,
            "margin": first and margin(dec, prompt, [run["tokens"], texts["ar"]], first),
            "step_seconds": dict(zip(lengths, seconds, strict=True)),
            "attention_seconds": dict(zip(lengths, alone, strict=True)),
            "stats": run["stats"],
        }
        report["methods"][method] = row
        print(
            f"{method}: {row['tokens']} tokens in {row['seconds']:.0f} s, a step {seconds[0] * 1e3:.2f} ms at "
            f"{lengths[0]} and {seconds[-1] * 1e3:.2f} ms at {lengths[-1]}; slope {row['step_slope_ns_per_token']:.1f} "
            f"ns per token of length, attention's own {row['attention_slope_ns_per_token']:.1f}; memory "
            f"{run['memory'] / 2**20:.0f} MiB, of which caches {plan / 2**20:.0f}; "
            + ("identical to ar" if first is None else f"differs from ar at token {first}, margin {row['margin']:.1e}"),
            flush=True,
        )
        axis.plot(lengths, [s * 1e3 for s in seconds], label=f"a step of {method}")
        offset = seconds[0] - alone[0]
        axis.plot(lengths, [(s + offset) * 1e3 for s in alone], "--", label="attention alone, from the same start")
        axis.set(xlabel="tokens in the context", ylabel="ms of CPU time", ylim=(0, None), title=method)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(arguments.output / "long_run.png", dpi=110)
    (arguments.output / "long_run.json").write_text(json.dumps(report, indent=2) + "\n")
    (arguments.output / "tokens.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
