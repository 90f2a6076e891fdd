"""Bit for bit: whether every method's text is `ar`'s to the last bit, and what that costs.

    python packages/decoder/benchmarks/bitwise.py same --model data/smollm2 --heads data/heads-smollm2 --dtype bfloat16
    python packages/decoder/benchmarks/bitwise.py price --model data/smollm2 --heads data/heads-smollm2 --length 512

`same` draws prompts from the shipped test books, samplings, methods, trees, caches, places where the text is cut and
resumed, and sizes of the prompt's chunks at random, and compares tokens and log-probabilities with `ar`'s until so many
tokens are compared; with `--batch N` those of up to N prompts, of which a random number are decoded together. Without
heads, methods that need them are left out. TOKENSWIFT_INSTRUCTIONS names an instruction set, and
`data/scripts/reference_gguf.py` makes small models in each format of GGUF files. `price` takes turns
with bitwise on and off: medians of the quotients of times, and their range. Times are by the clock, so the machine
should have nothing else to do.
"""

import argparse
import gzip
import json
import random
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median

import torch

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.model import target

BOOKS = Path("data") / "pg19" / "test.jsonl.gz"
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(min_p=0.1, repetition_penalty=1.2),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=40, top_p=0.95),
)
TREES = (None, (1, 2), (2, 2), (1, 2, 2), (1, 3, 3, 3), (1,) * 8, (8,))
METHODS = ("auto", "suffix", "prompt-lookup", "magicdec")
WITH_HEADS = ("tokenswift-fused", "tokenswift", "medusa")
CACHES = (None, None, "int8")
CHUNKS = (7, 64, 100, 512)


def books(dec: Decoder, count: int) -> list[list[int]]:
    """The token ids of the first test books."""
    with gzip.open(BOOKS, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, count)]
    return [dec.tokenizer(text[:80_000], verbose=False)["input_ids"] for text in texts]


def drawn_prompt(choose: random.Random, texts: list[list[int]], lengths: list[int]) -> list[int]:
    """Some tokens in a row of one of the texts."""
    length = choose.choice(lengths)
    text = choose.choice([text for text in texts if len(text) >= length])
    start = choose.randint(0, len(text) - length)
    return text[start : start + length]


def same(arguments: argparse.Namespace) -> None:
    """Compare until ``--tokens`` are compared; the exit status is 1 when any differs."""
    dec = decoder.load(arguments.model, arguments.heads, dtype=arguments.dtype, bitwise=True)
    choose, texts, new = random.Random(arguments.seed), books(dec, 6), arguments.new_tokens
    methods = METHODS + (WITH_HEADS if arguments.heads else ())
    asked = {"ignore_eos": True, "return_logprobs": True}
    compared = runs = differing = 0
    while compared < arguments.tokens:
        count, cache = choose.randint(1, arguments.batch), choose.choice(CACHES)
        prompts = [drawn_prompt(choose, texts, arguments.lengths) for _ in range(count)]
        samplings = [replace(choose.choice(SAMPLINGS), seed=choose.randrange(100)) for _ in prompts]
        target._PREFILL_CHUNK = 512
        plain = [
            dec.generate(prompt, new, "ar", how, TokenSwiftOptions(kv_dtype=cache), **asked)
            for prompt, how in zip(prompts, samplings, strict=True)
        ]
        for method in choose.sample(methods, min(arguments.methods, len(methods))):
            target._PREFILL_CHUNK = choose.choice(CHUNKS) if max(map(len, prompts)) < 1000 else 512
            options = TokenSwiftOptions(tree=choose.choice(TREES), budget=256, kv_dtype=cache)
            cuts = [choose.choice((0, 0, choose.randrange(new))) for _ in prompts]
            contexts = [prompt + out.token_ids[:cut] for prompt, out, cut in zip(prompts, plain, cuts, strict=True)]
            news, together = [new - cut for cut in cuts], choose.randint(1, len(prompts))
            if len(prompts) == 1:
                outs = [dec.generate(contexts[0], news[0], method, samplings[0], options, **asked)]
            else:
                outs = dec.generate_batch(contexts, news, method, samplings, options, max_batch=together, **asked)
            for out, alone, cut, prompt, how in zip(outs, plain, cuts, prompts, samplings, strict=True):
                equal = (out.token_ids, out.logprobs) == (alone.token_ids[cut:], alone.logprobs[cut:])
                compared, runs, differing = compared + new - cut, runs + 1, differing + (not equal)
                if not equal:
                    print(
                        f"differs: {method} of {len(prompt)} tokens, cut at {cut}, {how}, {options}, {together} at once"
                    )
        print(f"{compared:,} tokens of {runs} runs, {differing} differ", flush=True)
    raise SystemExit(bool(differing))


def price(arguments: argparse.Namespace) -> None:
    """Interleaved rounds with bitwise on and off."""
    off = decoder.load(arguments.model, arguments.heads, dtype=arguments.dtype, bitwise=False)
    on = Decoder(off.model, off.tokenizer, arguments.heads, bitwise=True)
    texts = books(off, 12)
    prompts = [text[: arguments.length] for text in texts if len(text) >= arguments.length]
    prompts = prompts or [list(chain.from_iterable(texts))[: arguments.length]]
    for method in ("ar", "auto") if arguments.heads else ("ar",):
        decoding, prefill = [], []
        for turn in range(arguments.rounds + 1):
            sampling = SamplingParams(min_p=0.1, repetition_penalty=1.2, seed=turn)
            stats = {}
            for dec in (on, off) if turn % 2 else (off, on):
                prompt = prompts[turn % len(prompts)]
                stats[dec] = dec.generate(prompt, arguments.new_tokens, method, sampling, ignore_eos=True).stats
            # In the first one passes are tested and costs measured.
            if turn:
                decoding.append(stats[on].decode_seconds / stats[off].decode_seconds)
                prefill.append(stats[on].prefill_seconds / stats[off].prefill_seconds)
        print(f"{method}: decoding {_words(decoding)}, prefill {_words(prefill)}", flush=True)


def _words(quotients: list[float]) -> str:
    return f"{median(quotients):.3f} ({min(quotients):.2f}-{max(quotients):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (same, price):
        own = commands.add_parser(command.__name__, help=command.__doc__)
        own.set_defaults(run=command)
        own.add_argument("--model", default="data/reference-model")
        own.add_argument("--heads")
        own.add_argument("--dtype", default="float32")
        own.add_argument("--threads", type=int, default=torch.get_num_threads())
        own.add_argument("--new-tokens", type=int, default=200)
    commands.choices["same"].add_argument("--tokens", type=int, default=10_000)
    commands.choices["same"].add_argument("--methods", type=int, default=4, help="of each prompt")
    commands.choices["same"].add_argument("--lengths", type=int, nargs="+", default=[16, 90, 200, 512, 2048])
    commands.choices["same"].add_argument("--batch", type=int, default=1, help="at most so many prompts together")
    commands.choices["same"].add_argument("--seed", type=int, default=0)
    commands.choices["price"].add_argument("--length", type=int, default=512)
    commands.choices["price"].add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
