"""How near `auto` comes to the best fixed tree, which one would have to know beforehand.

    python packages/decoder/benchmarks/policies.py
    python packages/decoder/benchmarks/policies.py --model data/smollm2 --heads data/heads-smollm2 --new-tokens 128

Speed-ups over `ar` and tokens per step, of sums over interleaved rounds and six prompts of 512 tokens from the shipped
test books, 500 new ones each; the fixed trees are those of `tokenswift-fused`. The worst prompt's speed-up stands in
brackets, and for `auto` also that of the first round, in which it begins without having learnt anything. Times are by
the clock, so the machine should have nothing else to do. Each prompt is read once (up to 8 GB of caches are kept).
"""

import argparse
import gzip
import json
from itertools import islice
from pathlib import Path

import decoder

DATA = Path("data")
TREES = [(1,), (2,), (3,), (1, 1), (1, 2), (2, 2), (1, 1, 1), (1, 2, 2)]
SETTINGS = {
    "temperature 1, min-p 0.1, penalty 1.2": decoder.SamplingParams(min_p=0.1, repetition_penalty=1.2),
    "temperature 0.7": decoder.SamplingParams(temperature=0.7),
    "greedy": decoder.SamplingParams(temperature=0),
}


def prompts(dec: decoder.Decoder, length: int, count: int) -> list[list[int]]:
    """``length`` tokens each: the beginnings of three books, then pieces from within three; the first ``count``."""
    with gzip.open(DATA / "pg19" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        books = [json.loads(line)["text"] for line in islice(lines, 4)]
    texts = [*books[1:4], *(book[9000:] for book in books[:3])][:count]
    tokens = [dec.tokenizer(text[: 8 * length], verbose=False)["input_ids"][:length] for text in texts]
    return [prompt for prompt in tokens if len(prompt) == length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DATA / "reference-model"))
    parser.add_argument("--heads", default=str(DATA / "heads-gated"))
    parser.add_argument("--length", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=6, help="at most; shorter books are left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=500)
    arguments = parser.parse_args()
    dec = decoder.load(arguments.model, arguments.heads, prefix_cache_bytes=8 << 30)
    texts = prompts(dec, arguments.length, arguments.prompts)
    for title, sampling in SETTINGS.items():
        taken = {policy: [[] for _ in texts] for policy in ("ar", *TREES, "auto")}
        for _ in range(arguments.rounds):
            for place, prompt in enumerate(texts):
                for policy, runs in taken.items():
                    method, options = policy, None
                    if policy in TREES:
                        method, options = "tokenswift-fused", decoder.TokenSwiftOptions(tree=policy)
                    out = dec.generate(prompt, arguments.new_tokens, method, sampling, options, ignore_eos=True)
                    runs[place].append(out.stats)

        def speed_up(policy: str | tuple[int, ...], places: range, rounds: slice, taken: dict = taken) -> float:
            plain, drafted = (
                sum(stats.decode_seconds for place in places for stats in taken[name][place][rounds])
                for name in ("ar", policy)
            )
            return plain / drafted

        every, whole = range(len(texts)), slice(None)
        for policy, runs in taken.items():
            stats = [one for of_prompt in runs for one in of_prompt]
            tokens = sum(one.generated for one in stats) / sum(one.steps for one in stats)
            worst = min(speed_up(policy, range(place, place + 1), whole) for place in every)
            cell = f"{policy}: {speed_up(policy, every, whole):.2f}x ({worst:.2f}), {tokens:.2f} tokens per step"
            if policy == "auto":
                cell += f"; first round {speed_up(policy, every, slice(1)):.2f}x"
            print(f"{title}: {cell}", flush=True)


if __name__ == "__main__":
    main()
