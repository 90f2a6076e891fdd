"""TokenSwift (paper section 3): one draft pass with a partial cache and chained heads, plus n-grams of the text."""

from collections.abc import Mapping

import torch

from decoder.drafters.base import Resources
from decoder.drafters.levels import best_tokens, node_count
from decoder.full_cache import FullCache
from decoder.ngram_table import NgramTable
from decoder.partial_cache import PartialCache
from decoder.sampler import Sampler
from decoder.stats import Statistics
from decoder.target import Verification
from decoder.token_tree import TokenTree


class TokenSwift:
    """Drafts gamma + 1 distributions in one pass of the target itself, and a tree of their best tokens."""

    heads_kinds = ("chained", "independent")

    def __init__(self, resources: Resources) -> None:
        self.target, self.heads, self.options = resources.target, resources.heads, resources.options
        options, heads, prompt = resources.options, resources.heads, resources.prompt
        self.branching = options.tree[: min(heads.num_heads + 1, resources.max_new_tokens)]
        gram = heads.num_heads + 1
        self.max_nodes = node_count(self.branching) + options.ngrams * gram
        self.table = NgramTable(gram)
        self.table.extend(prompt)
        self.partial = (
            None
            if options.cache == "full"
            else PartialCache(options.budget_for(len(prompt)), options.sink, dynamic=options.cache == "dynamic")
        )

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        if self.partial is not None and cache.length:
            self.partial.append(cache, queries)

    def propose(self, cache: FullCache, sampler: Sampler) -> TokenTree:
        newest = sampler.context[-1]
        scores = sampler.draft_scores(self._draft_logits(newest, cache), self.options.coupled)
        candidates = best_tokens(scores, self.branching)
        tree = TokenTree(newest)
        tree.add_levels(candidates, "heads")
        for gram in self.table.most_frequent(candidates[0][0], self.options.ngrams):
            tree.add_path(gram, "ngrams")
        return tree

    def _draft_logits(self, newest: int, cache: FullCache) -> torch.Tensor:
        """l_0 .. l_gamma (paper equations 1 to 3), [levels, V]."""
        memory = cache if self.partial is None else self.partial
        hidden = self.target.draft([newest], cache.length, memory)[0]
        states = [self.target.norm(hidden), *self.heads(hidden)]
        return self.target.head(torch.stack(states[: len(self.branching)]))

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.table.extend(tokens)
        if self.partial is not None:
            newest = {layer: query[:, :, path[-1]] for layer, query in verification.queries.items()}
            self.partial.append(cache, newest)

    def finish(self, statistics: Statistics) -> None:
        statistics.cache_rebuilds = 0 if self.partial is None else self.partial.rebuilds
