"""How near `auto` comes to the best tree of one size: fixed nodes and levels of heads against its own choice.

    python packages/decoder/benchmarks/policies.py

Speed-ups over `ar` and tokens per step, of sums over interleaved rounds and three of the shipped test books: prompts of
512 tokens, 500 new ones. Times are by the clock, so the machine should have nothing else to do.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from unittest import mock

import decoder
from decoder.drafters.heads_source import HeadsSource
from decoder.drafters.tuned import Tuned

DATA = Path("data")
FIXED = [(3, 1), (4, 1), (4, 2), (8, 2), (8, 3), (12, 3)]
SETTINGS = {
    "temperature 1, min-p 0.1, penalty 1.2": decoder.SamplingParams(min_p=0.1, repetition_penalty=1.2),
    "temperature 0.7": decoder.SamplingParams(temperature=0.7),
    "greedy": decoder.SamplingParams(temperature=0),
}


@contextmanager
def fixed(nodes: int, levels: int) -> Iterator[None]:
    """Every step runs ``levels`` of heads and verifies the ``nodes`` likeliest to be right, root included."""
    with (
        mock.patch("decoder.drafters.tuned._LEVELS", (levels,)),
        mock.patch.object(HeadsSource, "_pays", lambda self, depth, chance: True),
        mock.patch.object(Tuned, "_best_size", lambda self, rate, chances: min(nodes, len(chances))),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=500)
    arguments = parser.parse_args()
    dec = decoder.load(DATA / "reference-model", DATA / "heads-gated")
    with gzip.open(DATA / "pg19" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 1, 4)]
    prompts = [dec.tokenizer(text, verbose=False)["input_ids"][:512] for text in texts]
    for title, sampling in SETTINGS.items():
        taken = {policy: [] for policy in ("ar", *FIXED, "auto")}
        for _ in range(arguments.rounds):
            for prompt in prompts:
                for policy, stats in taken.items():
                    asked = (prompt, arguments.new_tokens, "ar" if policy == "ar" else "auto", sampling)
                    if policy in FIXED:
                        with fixed(*policy):
                            out = dec.generate(*asked, ignore_eos=True)
                    else:
                        out = dec.generate(*asked, ignore_eos=True)
                    stats.append(out.stats)
        seconds = {policy: sum(s.decode_seconds for s in stats) for policy, stats in taken.items()}
        cells = []
        for policy, stats in list(taken.items())[1:]:
            name = policy if policy == "auto" else "{} nodes, {} levels".format(*policy)
            tokens = sum(s.generated for s in stats) / sum(s.steps for s in stats)
            cells.append(f"{name} {seconds['ar'] / seconds[policy]:.2f}x ({tokens:.2f})")
        print(f"{title}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
