"""Whether drafts are accepted as often behind a long text as behind a short one.

    python packages/decoder/benchmarks/acceptance_at_length.py --model data/smollm2 --heads DIR

Drafts are judged on the same continuations: those of the shipped books, which the model is made to write by a
`logits_hook` that leaves one token at each position. Before each stands as much of its book as ``--contexts`` say. The
tree is fixed, and candidates are ranked by the drafter's own probabilities (``coupled=False``), because the noise of
sampling has no say in a given text.
"""

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import decoder

BOOKS = Path("data/pg19/test.jsonl.gz")
GREEDY = decoder.SamplingParams(temperature=0)


def book_tokens(dec: decoder.Decoder, needed: int, count: int) -> list[list[int]]:
    """The first ``needed`` tokens of so many books that are long enough."""
    found = []
    with gzip.open(BOOKS, "rt", encoding="utf-8") as lines:
        for line in lines:
            ids = dec.tokenizer(json.loads(line)["text"], verbose=False)["input_ids"]
            if len(ids) >= needed:
                found.append(ids[:needed])
            if len(found) == count:
                return found
    raise SystemExit(f"{BOOKS} has {len(found)} books of {needed} tokens: ask for fewer, or for shorter contexts")


def only(text: Sequence[int]) -> Callable[[Sequence[int], torch.Tensor], torch.Tensor]:
    """A hook that leaves, behind any beginning of ``text``, its next token alone."""

    def hook(context: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -torch.inf)
        # Behind drafts that are wrong anything may follow: they are never accepted.
        forced[text[len(context)] if len(context) < len(text) else 0] = 0.0
        return forced

    return hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 7500])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--books", type=int, default=3)
    parser.add_argument("--tree", default="4,2,1")
    arguments = parser.parse_args()
    dec = decoder.load(arguments.model, arguments.heads)
    options = decoder.TokenSwiftOptions(tree=decoder.parse_tree(arguments.tree), coupled=False)
    longest = max(arguments.contexts)
    books = book_tokens(dec, longest + arguments.new_tokens, arguments.books)
    found = {context: [] for context in arguments.contexts}
    for text in books:
        for context, rates in found.items():
            seen = text[longest - context :]
            new = len(seen) - context
            out = dec.generate(
                seen[:context], new, arguments.method, GREEDY, options, ignore_eos=True, logits_hook=only(seen)
            )
            if out.token_ids != seen[context:]:
                raise SystemExit("the model did not write the book's text: this measures nothing")
            rates.append(out.stats.tokens_per_step)
            print(f"book {len(rates)} behind {context:,} tokens: {rates[-1]:.3f} tokens per step", flush=True)
    means = {context: sum(rates) / len(rates) for context, rates in found.items()}
    shortest = min(means)
    for context, mean in means.items():
        print(f"{context:>7,}: {mean:.3f} tokens per step, {mean / means[shortest]:.3f} of {shortest:,}")


if __name__ == "__main__":
    main()
