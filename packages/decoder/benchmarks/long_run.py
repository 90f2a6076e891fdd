"""One long text by several methods side by side: is it the same text, how fast along the length, in what memory?

    python packages/decoder/benchmarks/long_run.py --new-tokens 100000 --output runs/long
    python packages/decoder/benchmarks/long_run.py --tiny --new-tokens 100000 --output runs/long-tiny

Each method runs in a process of its own, so that its memory is its own, and the processes take turns: ``--turn`` tokens
each, so that all meet the same hours of a machine that others share. A turn is timed by the processor time of its one
thread, which other work on the machine disturbs less than it does the clock. The methods' tokens are compared as they
come. The output folder receives ``long_run.json`` and the tokens after every turn, and ``long_run.png``; the same
command goes on where a run was cut. Needs matplotlib beside the decoder.
"""

import argparse
import gzip
import json
import multiprocessing
import time
from collections.abc import Iterator
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import decoder
from decoder.cache.form import CacheForm

DATA = Path("data")
STRETCHES = 25


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


def prompt_of(dec: decoder.Decoder, tokens: int, text: Path | None = None) -> list[int]:
    """The first tokens of the text, or of the shipped books; of random ones where there is no tokenizer."""
    if dec.tokenizer is None:
        return torch.randint(512, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    if text is not None:
        texts = [text.read_text("utf-8")]
    else:
        with gzip.open(DATA / "pg19" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines]
    ids = list(chain.from_iterable(dec.tokenizer(one, verbose=False)["input_ids"] for one in texts))
    if len(ids) < tokens:
        raise SystemExit(f"there are {len(ids)} tokens in {text or 'the shipped books'}: ask for lengths up to that")
    return ids[:tokens]


def sampling() -> decoder.SamplingParams:
    return decoder.SamplingParams(min_p=0.1, repetition_penalty=1.2, penalty_window=1024, seed=0)


def memory() -> int:
    """Bytes that this process holds in memory now."""
    return psutil.Process().memory_info().rss


def timed_steps(stream: Iterator[decoder.Chunk]) -> Iterator[tuple[float, decoder.Chunk]]:
    """(CPU seconds, chunk) of every step; the prefill counts in the first."""
    start = time.process_time()
    for chunk in stream:
        now = time.process_time()
        yield now - start, chunk
        start = time.process_time()


def planned_bytes(dec: decoder.Decoder, arguments: argparse.Namespace, method: str) -> int:
    """Bytes of the KV caches, full and partial."""
    each = CacheForm(arguments.kv_dtype).token_bytes(dec.target.attention_shape, dec.model.config.num_hidden_layers)
    positions = arguments.prompt_tokens + arguments.new_tokens
    if method == "tokenswift":
        positions += min(arguments.budget, positions)
    return each * positions


def take_turns(arguments: argparse.Namespace, spec: str, already: list[int], pipe: Connection) -> None:
    """One generation in this process, as far as the other end of ``pipe`` asks for at a time."""
    torch.set_num_threads(1)
    method, _, heads = spec.partition("=")
    how = {"dtype": arguments.dtype, "yarn": arguments.yarn}
    dec = tiny_decoder() if arguments.tiny else decoder.load(arguments.model, heads or None, **how)
    prompt = prompt_of(dec, arguments.prompt_tokens, arguments.prompt_file)
    budget = {"budget": arguments.budget} if method == "tokenswift" else {}
    options = decoder.TokenSwiftOptions(kv_dtype=arguments.kv_dtype, **budget)
    dec.generate(prompt[:64], 16, method, sampling(), options, ignore_eos=True)
    before = memory()
    # Noise is keyed by position and the penalty reaches over the prompt, so what is there counts as prompt.
    rest = arguments.new_tokens - len(already)
    stream = dec.stream([*prompt, *already], rest, method, sampling(), options, ignore_eos=True)
    steps, length = timed_steps(stream), len(already)
    seconds, chunk = next(steps)
    first = chunk.token_ids
    length += len(first)
    pipe.send({"prefill_seconds": seconds, "planned_bytes": planned_bytes(dec, arguments, method), "tokens": first})
    while (target := pipe.recv()) is not None:
        tokens, times = [], []
        while length < target:
            seconds, chunk = next(steps)
            times.append(seconds)
            tokens += chunk.token_ids
            length += len(chunk.token_ids)
        pipe.send({"tokens": tokens, "seconds": sum(times), "steps": len(times), "memory": memory() - before})


class Method:
    """One method's process, its tokens and its turns so far, kept in the output folder."""

    def __init__(self, spec: str, arguments: argparse.Namespace):
        self.spec, self.name = spec, spec.partition("=")[0]
        self.file = arguments.output / f"{self.name}.json"
        kept = json.loads(self.file.read_text()) if self.file.exists() else {"tokens": [], "turns": []}
        self.tokens, self.turns = kept["tokens"], kept["turns"]
        self.process = None
        if len(self.tokens) < arguments.new_tokens:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            inputs = (arguments, spec, self.tokens, other)
            self.process = context.Process(target=take_turns, args=inputs, daemon=True)
            self.process.start()
            other.close()
            self.start = self.pipe.recv()
            self.tokens = self.tokens + self.start["tokens"]

    def turn(self, target: int) -> dict | None:
        """Go on to ``target`` tokens; None if they are there."""
        if self.process is None or len(self.tokens) >= target:
            return None
        self.pipe.send(target)
        turn = self.pipe.recv()
        turn["begin"] = len(self.tokens)
        turn["planned"] = self.start["planned_bytes"]
        self.tokens += turn.pop("tokens")
        turn["end"] = len(self.tokens)
        self.turns.append(turn)
        scratch = self.file.with_suffix(".new")
        scratch.write_text(json.dumps({"tokens": self.tokens, "turns": self.turns}))
        scratch.replace(self.file)
        return turn

    def end(self) -> None:
        if self.process is not None:
            self.pipe.send(None)
            self.process.join()


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def stretches(turns: list[dict], size: int) -> dict[int, float]:
    """Seconds per token in stretches of ``size`` tokens, by where their turns begin."""
    groups: dict[int, list[dict]] = {}
    for turn in turns:
        groups.setdefault(turn["begin"] // size * size, []).append(turn)
    return {
        begin: sum(turn["seconds"] for turn in group) / sum(turn["end"] - turn["begin"] for turn in group)
        for begin, group in groups.items()
    }


def summary(methods: list[Method], arguments: argparse.Namespace) -> dict:
    """What long_run.json holds: of each method rate, speed-up over the first, equality, memory."""
    size, reference = max(arguments.turn, arguments.new_tokens // STRETCHES), methods[0]
    along = {method.name: stretches(method.turns, size) for method in methods}
    rows = {}
    for method in methods:
        seconds = sum(turn["seconds"] for turn in method.turns)
        tokens = sum(turn["end"] - turn["begin"] for turn in method.turns)
        common = along[method.name].keys() & along[reference.name].keys()
        ratios = {begin: along[reference.name][begin] / along[method.name][begin] for begin in sorted(common)}
        other = sum(turn["seconds"] for turn in reference.turns[: len(method.turns)])
        others = sum(turn["end"] - turn["begin"] for turn in reference.turns[: len(method.turns)])
        rows[method.name] = {
            "tokens": len(method.tokens),
            "tokens_per_second": tokens / seconds,
            "tokens_per_step": tokens / sum(turn["steps"] for turn in method.turns),
            "speedup": (other / others) / (seconds / tokens),
            "speedup_along": ratios,
            "lowest_stretch": min(ratios.values()),
            "seconds_per_token_along": along[method.name],
            "first_difference": first_difference(method.tokens, reference.tokens),
            "compared_tokens": min(len(method.tokens), len(reference.tokens)),
            "planned_cache_bytes": method.turns[-1]["planned"],
            "memory_bytes_along": {turn["end"]: turn["memory"] for turn in method.turns},
        }
    settings = {name: str(value) for name, value in vars(arguments).items()}
    return {"arguments": settings, "threads": 1, "bitwise": "auto", "methods": rows}


def draw(report: dict, prompt: int, file: Path) -> None:
    """Tokens per second, speed-up and memory along the length."""
    figure, (rate, ratio, used) = plt.subplots(1, 3, figsize=(15, 4))
    for name, row in report["methods"].items():
        along = row["seconds_per_token_along"]
        where = [prompt + begin for begin in along]
        rate.plot(where, [1 / seconds for seconds in along.values()], "o-", markersize=3, label=name)
        if row["speedup"] != 1:
            at = [prompt + begin for begin in row["speedup_along"]]
            ratio.plot(at, row["speedup_along"].values(), "o-", markersize=3, color=rate.lines[-1].get_color())
        at = [prompt + end for end in row["memory_bytes_along"]]
        used.plot(at, [size / 1e6 for size in row["memory_bytes_along"].values()], color=rate.lines[-1].get_color())
        used.axhline(row["planned_cache_bytes"] / 1e6, linestyle=":", color=rate.lines[-1].get_color())
    ratio.axhline(1, color="gray", linewidth=1)
    rate.set(ylabel="tokens per second of processor time", ylim=(0, None))
    ratio.set(ylabel="times as fast as plain decoding", ylim=(0, None))
    used.set(ylabel="MB above the model (dotted: plan at the end)", ylim=(0, None))
    for axis in (rate, ratio, used):
        axis.set(xlabel="tokens in the context")
        axis.grid(alpha=0.3)
    rate.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--model", default=DATA / "reference-model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--yarn", type=float, help="see decoder.load")
    parser.add_argument("--kv-dtype", help="int8: the caches' codes (default: as computed)")
    parser.add_argument("--prompt-file", type=Path, help="a text whose first tokens go before (default: shipped books)")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=100_000)
    methods = ["ar", f"auto={DATA / 'heads-gated'}", f"tokenswift={DATA / 'heads-chained'}"]
    parser.add_argument("--methods", nargs="+", default=methods, metavar="METHOD[=HEADS]")
    parser.add_argument("--budget", type=int, default=4096, help="tokenswift's partial cache, in tokens")
    parser.add_argument("--turn", type=int, default=1000, help="tokens that a method generates before the next one")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    methods = [Method(spec, arguments) for spec in arguments.methods]
    targets = [*range(arguments.turn, arguments.new_tokens, arguments.turn), arguments.new_tokens]
    for number, target in enumerate(targets):
        first = number % len(methods)
        turns = {method.name: method.turn(target) for method in methods[first:] + methods[:first]}
        if None in turns.values():
            continue
        report = summary(methods, arguments)
        (arguments.output / "long_run.json").write_text(json.dumps(report, indent=2) + "\n")
        cells = [
            f"{name} {(turn['end'] - turn['begin']) / turn['seconds']:.1f} tokens/s, {turn['memory'] / 2**20:.0f} MiB"
            for name, turn in sorted(turns.items())
        ]
        different = [name for name, row in report["methods"].items() if row["first_difference"] is not None]
        print(f"{target}: {'; '.join(cells)}; {'all equal' if not different else f'{different} differ'}", flush=True)
    report = summary(methods, arguments)
    (arguments.output / "long_run.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(report, arguments.prompt_tokens, arguments.output / "long_run.png")
    for method in methods:
        row = report["methods"][method.name]
        used = list(row["memory_bytes_along"].values())
        print(
            f"{method.name}: {row['tokens']} tokens, {row['tokens_per_second']:.1f} tokens/s, {row['speedup']:.2f}x, "
            f"lowest stretch {row['lowest_stretch']:.2f}x, {row['tokens_per_step']:.2f} tokens per step; memory "
            f"{median(used) / 2**20:.0f} MiB (at most {max(used) / 2**20:.0f}), caches planned "
            f"{row['planned_cache_bytes'] / 2**20:.0f}; "
            + ("equal" if row["first_difference"] is None else f"differs at token {row['first_difference']}")
        )
        method.end()


if __name__ == "__main__":
    main()
