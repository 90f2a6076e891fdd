"""Tokens per step of several checkpoints of draft heads, where all verify equally many nodes.

    python packages/decoder/benchmarks/node_budget.py --model data/smollm2 --heads data/heads-smollm2* --prompts FILE

All levels are drafted in every step, and the likeliest candidates are verified until the pass has as many nodes as
``--nodes`` say, the text's last token included: the clock decides nothing. ``own`` are the texts that the model writes
behind the prompts, ``books`` given texts: what follows the first ``--prompt-tokens`` of shipped test books, which a
`logits_hook` makes it write. Candidates for these are ranked by the drafter's own probabilities, since noise has no say
in them. How often candidates are accepted is learnt from text to text of a checkpoint, as in use.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from acceptance_at_length import book_tokens, only

import decoder
from decoder import drafters
from decoder.drafters.base import DrafterContext
from decoder.drafters.tuning import cost_tuned
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.drafters.tuning.level_policy import Expected, LevelPolicy
from decoder.drafters.tuning.verify_costs import WIDEST

CHOSEN = decoder.SamplingParams(temperature=0.7)


class Free:
    """Verifications that cost the same whatever their number of nodes."""

    def begin(self, *_) -> None:
        pass

    def missing(self, *_) -> None:
        """Nothing is measured."""

    def at(self, *_) -> list[float]:
        return [1.0] * (WIDEST + 1)


class AllLevels(LevelPolicy):
    """Runs all levels in every step, and learns nothing."""

    def __init__(self, most: int):
        super().__init__(most, first=most)

    def observe(self, *_) -> None:
        pass


class Budgeted(CostTuned):
    """The likeliest candidates of all levels of heads, so many that a pass has ``nodes`` nodes."""

    heads_kinds = drafters.Auto.heads_kinds
    needs_heads = True
    nodes = 0

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(replace(context, costs=Free()))

    def _level_policy(self, texts: int, own_level: bool) -> LevelPolicy:
        heads = self.context.heads
        return AllLevels(cost_tuned._DEEPEST if heads.conditioned else heads.num_heads)

    def _best(self, levels: int) -> tuple[int, Expected]:
        count = min(self.nodes, len(self._candidates.chances))
        return count, Expected(1.0, 1.0)


def prompts_of(dec: decoder.Decoder, file: Path, tokens: int) -> list[list[int]]:
    """The prompts of a JSONL file of texts or messages, as `ts-eval compare` takes them."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "messages" in row:
            ids = dec.tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        else:
            ids = dec.tokenizer(row["text"], verbose=False)["input_ids"]
        found.append(ids[:tokens])
    return found


def tokens_per_step(runs: Sequence[tuple[list[int], int, bool, Callable | None]], dec: decoder.Decoder) -> list[float]:
    """Of each (prompt, new tokens, to its end or not, hook)."""
    rates = []
    for seed, (prompt, new, whole, hook) in enumerate(runs):
        sampling = replace(CHOSEN, seed=seed) if hook is None else decoder.SamplingParams(temperature=0)
        options = decoder.TokenSwiftOptions(coupled=hook is None)
        out = dec.generate(prompt, new, "auto", sampling, options, ignore_eos=whole, logits_hook=hook)
        rates.append(out.stats.tokens_per_step)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads", nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--books", type=int, default=4)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16])
    arguments = parser.parse_args()
    if arguments.new_tokens < drafters.FEWEST_TUNED:
        parser.error(f"--new-tokens must be at least {drafters.FEWEST_TUNED}: shorter texts are decoded without drafts")
    drafters.METHODS["auto"] = Budgeted
    new = arguments.new_tokens
    for heads in arguments.heads:
        dec = decoder.load(arguments.model, heads)
        own = [(prompt, new, False, None) for prompt in prompts_of(dec, arguments.prompts, arguments.prompt_tokens)]
        whole = book_tokens(dec, arguments.prompt_tokens + new, arguments.books)
        books = [(text[: arguments.prompt_tokens], new, True, only(text)) for text in whole]
        for nodes in arguments.nodes:
            Budgeted.nodes = nodes
            for name, runs in (("own", own), ("books", books)):
                rates = tokens_per_step(runs, dec)
                mean = sum(rates) / len(rates)
                error = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / max(1, len(rates) - 1) / len(rates))
                print(f"{heads}, {nodes} nodes, {name}: {mean:.2f} +- {error:.2f} of {len(rates)} texts", flush=True)


if __name__ == "__main__":
    main()
