"""TokenSwift (paper section 3): one draft pass with a partial cache and a few heads, plus n-grams of the text."""

from collections.abc import Sequence

import torch

from decoder.draft_heads import DraftHeads
from decoder.full_cache import FullCache
from decoder.ngram_table import NgramTable
from decoder.options import TokenSwiftOptions
from decoder.partial_cache import PartialCache
from decoder.sampler import Sampler
from decoder.stats import Statistics
from decoder.target import Target, Verification
from decoder.token_tree import TokenTree


class TokenSwift:
    """Drafts gamma + 1 distributions in one pass of the target itself, and a tree of their best tokens."""

    heads_kinds = ("conditioned", "chained", "independent")

    def __init__(
        self, target: Target, heads: DraftHeads, options: TokenSwiftOptions, prompt: list[int], depth: int
    ) -> None:
        self.target, self.heads, self.options = target, heads, options
        self.branching = options.tree[: min(heads.num_heads + 1, depth)]
        level, nodes = 1, 1
        for children in self.branching:
            level *= children
            nodes += level
        gram = heads.num_heads + 1
        self.max_nodes = nodes + options.ngrams * gram
        self.table = NgramTable(gram)
        self.table.extend(prompt)
        self.partial = (
            None
            if options.cache == "full"
            else PartialCache(options.budget_for(len(prompt)), options.sink, dynamic=options.cache == "dynamic")
        )

    def start(self, cache: FullCache, queries: dict[int, torch.Tensor]) -> None:
        if self.partial is not None and cache.length:
            self.partial.append(cache, queries)

    def propose(self, cache: FullCache, sampler: Sampler) -> TokenTree:
        newest = sampler.context[-1]
        memory = cache if self.partial is None else self.partial
        hidden = self.target.draft(newest, cache.length, memory)
        draft = self._draft_in_turn if self.heads.conditioned else self._draft_at_once
        candidates = draft(hidden, sampler)
        tree = TokenTree(newest)
        tree.add_levels(candidates, "heads")
        for gram in self.table.most_frequent(candidates[0][0], self.options.ngrams):
            tree.add_path(gram, "ngrams")
        return tree

    def _draft_at_once(self, hidden: torch.Tensor, sampler: Sampler) -> list[list[int]]:
        """Candidates per level from l_0 .. l_gamma (paper equations 1 to 3), all computed from h_0 [d] together."""
        states = [self.target.norm(hidden), *self.heads(hidden)]
        logits = self.target.head(torch.stack(states[: len(self.branching)]))
        return self._best(sampler.draft_scores(logits, self.options.coupled), self.branching)

    def _draft_in_turn(self, hidden: torch.Tensor, sampler: Sampler) -> list[list[int]]:
        """Candidates per level from conditioned heads: each reads the best token of the level before.

        With coupling that token is mostly the one that the target will draw.
        """
        candidates: list[list[int]] = []
        normalised = self.target.norm(hidden)
        for level, count in enumerate(self.branching):
            if level:
                embedding = self.target.embed(candidates[-1][0])
                hidden, normalised = self.heads.advance(level - 1, hidden, embedding)
            scores = sampler.draft_scores(self.target.head(normalised[None]), self.options.coupled, ahead=level)
            candidates += self._best(scores, [count])
        return candidates

    @staticmethod
    def _best(scores: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
        """Per row of scores [n, V] the ids of its highest ones; tokens that the filters dropped are no candidates."""
        values, tokens = scores.topk(max(counts), dim=-1)
        levels = []
        for count, row, ids in zip(counts, values.tolist(), tokens.tolist(), strict=True):
            levels.append([token for token, value in zip(ids[:count], row, strict=False) if value > float("-inf")])
        return levels

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.table.extend(tokens)
        if self.partial is not None:
            newest = {layer: query[:, :, path[-1]] for layer, query in verification.queries.items()}
            self.partial.append(cache, newest)

    def finish(self, statistics: Statistics) -> None:
        statistics.cache_rebuilds = 0 if self.partial is None else self.partial.rebuilds
