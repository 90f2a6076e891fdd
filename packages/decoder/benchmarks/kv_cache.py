"""Caches that are quantised or in host memory: what rounding costs in perplexity, and all of them in time and bytes.

    python packages/decoder/benchmarks/kv_cache.py perplexity --model data/smollm2 --tokens 2048 --texts 6
    python packages/decoder/benchmarks/kv_cache.py speed --heads data/heads-gated --length 32000 --new-tokens 128

`perplexity` scores texts of the validation books, each token behind all before it, as decoding sees them. `speed`
decodes behind a text of the test books with every cache in turn, with `ar` and with `auto`, and compares each text with
`ar`'s with the same cache: medians of milliseconds per token, and the bytes that caches take. Times are by the clock,
so the machine should have nothing else to do.
"""

import argparse
import gzip
import json
import math
from itertools import islice
from pathlib import Path
from statistics import median

import torch

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.cache.form import CacheForm
from decoder.cache.stored import full_cache
from decoder.sampling.token_tree import TokenTree

BOOKS = Path("data") / "pg19"
FORMS = (CacheForm(), CacheForm("int8"), CacheForm("fp8"), CacheForm(None, True), CacheForm("int8", True))
PASS = 64  # tokens that are scored at once


def texts(dec: Decoder, split: str, length: int, count: int) -> list[list[int]]:
    """The first ``length`` tokens of some books behind their front matter."""
    found = []
    with gzip.open(BOOKS / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in islice(lines, 4 * count):
            text = json.loads(line)["text"][5_000 : 5_000 + 10 * length]
            ids = dec.tokenizer(text, verbose=False)["input_ids"][:length]
            if len(ids) == length and len(found) < count:
                found.append(ids)
    return found


@torch.inference_mode()
def log_probabilities(dec: Decoder, ids: list[int], form: CacheForm) -> torch.Tensor:
    """Of each token but the first, float64 [n - 1]."""
    cache, found = full_cache(form, len(ids) + PASS), []
    with dec.target.patched():
        for start in range(0, len(ids) - 1, PASS):
            part = ids[start : min(start + PASS, len(ids) - 1)]
            chain = TokenTree(part[0])
            chain.add_path(part[1:], "text")
            [seen] = dec.target.forward([chain], [cache])
            cache.keep(range(len(part)))
            following = torch.tensor(ids[start + 1 : start + 1 + len(part)])
            found.append(seen.logits.double().log_softmax(-1).gather(1, following[:, None])[:, 0])
    return torch.cat(found)


def perplexity(arguments: argparse.Namespace) -> None:
    """Perplexity of books by the cache's dtype, and how far each text's moves."""
    dec = decoder.load(arguments.model, dtype=arguments.dtype)
    books = texts(dec, "validation", arguments.tokens, arguments.texts)
    plain = [log_probabilities(dec, ids, CacheForm()) for ids in books]
    base = math.exp(-torch.cat(plain).mean())
    print(f"{sum(map(len, plain)):,} tokens of {len(books)} books: perplexity {base:.4f}", flush=True)
    for form in (CacheForm("int8"), CacheForm("fp8")):
        rounded = [log_probabilities(dec, ids, form) for ids in books]
        changes = [100 * (math.exp(float((a - b).mean())) - 1) for a, b in zip(plain, rounded, strict=True)]
        differences = torch.cat([a - b for a, b in zip(plain, rounded, strict=True)]).abs()
        found = math.exp(-torch.cat(rounded).mean())
        print(
            f"{form.kv_dtype}: {found:.4f}, {100 * (found / base - 1):+.3f} % (of a book {min(changes):+.3f} to "
            f"{max(changes):+.3f} %); a log-probability moves by {differences.median():.1e} in the median",
            flush=True,
        )


def speed(arguments: argparse.Namespace) -> None:
    """Time per token and bytes, all caches in turn."""
    dec = decoder.load(arguments.model, arguments.heads, dtype=arguments.dtype)
    books = texts(dec, "test", arguments.length, arguments.rounds)
    methods = ("ar", "auto")
    times: dict[tuple, list[float]] = {(form, method): [] for form in FORMS for method in methods}
    equal = compared = 0
    for turn, prompt in enumerate(books):
        sampling = SamplingParams(temperature=0.7, seed=turn)
        plain: dict[str | None, list[int]] = {}
        for form in FORMS[turn % len(FORMS) :] + FORMS[: turn % len(FORMS)]:
            for method in methods:
                options = TokenSwiftOptions(**vars(form))
                out = dec.generate(prompt, arguments.new_tokens, method, sampling, options, ignore_eos=True)
                times[form, method].append(1000 * out.stats.decode_seconds / arguments.new_tokens)
                # An offloaded cache gives the text of the one that is not.
                expected = plain.setdefault(form.kv_dtype, out.token_ids)
                compared, equal = compared + 1, equal + (out.token_ids == expected)
    tokens, cpu = arguments.length + arguments.new_tokens, torch.device("cpu")
    shape, layers = dec.target.attention_shape, dec.target.layers
    for form in FORMS:
        name = f"{form.kv_dtype or 'as computed'}{', in host memory' if form.offload else ''}"
        ar, auto = (median(times[form, method]) for method in methods)
        gain = median(a / b for a, b in zip(times[form, "ar"], times[form, "auto"], strict=True))
        print(
            f"{name}: ar {ar:.1f} ms per token, auto {auto:.1f}, {gain:.2f}x; "
            f"{form.device_bytes(shape, layers, cpu, tokens) / 2**20:,.0f} MiB here, "
            f"{form.device_bytes(shape, layers, torch.device('cuda'), tokens) / 2**20:,.0f} MiB of a GPU's",
            flush=True,
        )
    print(f"{equal} of {compared} texts are those of the first method with that dtype")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (perplexity, speed):
        own = commands.add_parser(command.__name__, help=command.__doc__)
        own.set_defaults(run=command)
        own.add_argument("--model", default="data/reference-model")
        own.add_argument("--dtype", default="float32")
    commands.choices["perplexity"].add_argument("--tokens", type=int, default=2048, help="of each book")
    commands.choices["perplexity"].add_argument("--texts", type=int, default=6)
    commands.choices["speed"].add_argument("--heads")
    commands.choices["speed"].add_argument("--length", type=int, default=4096)
    commands.choices["speed"].add_argument("--new-tokens", type=int, default=128)
    commands.choices["speed"].add_argument("--rounds", type=int, default=3, help="books")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
