"""TokenSwift (paper section 3): one draft pass with a partial cache and a few heads, plus n-grams of the text."""

from collections import deque
from collections.abc import Mapping

import torch

from decoder.cache.full import FullCache
from decoder.cache.partial import PartialCache
from decoder.drafters.base import DrafterContext
from decoder.drafters.levels import HeadLevels, ranked_tokens
from decoder.drafters.retrieval.ngram_table import NgramTable
from decoder.model.verification import Verification
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree, rank_paths
from decoder.stats import Statistics


class TokenSwift:
    """Drafts gamma + 1 distributions in one pass of the target itself, and a tree of their best tokens."""

    heads_kinds = ("gated", "conditioned", "chained", "independent")
    needs_heads = True
    observed_queries = 1  # the importance of a pair is for the newest token

    def __init__(self, context: DrafterContext) -> None:
        self.target, self.options = context.target, context.options
        options, heads, prompt = context.options, context.heads, context.prompt
        paths = rank_paths(options.tree, min(heads.num_heads + 1, context.max_new_tokens))
        self.paths, self.depth = paths, max(map(len, paths), default=0)
        self.heads = HeadLevels(self.target, heads, options.coupled, width=max(map(max, paths), default=0) + 1)
        gram = heads.num_heads + 1
        # A text has no more n-grams than tokens.
        self.ngrams = min(options.ngrams, context.longest_text)
        self.max_nodes = 1 + len(paths) + self.ngrams * gram
        self.table = NgramTable(gram)
        self.table.extend(prompt)
        self.delay = context.sampling.window if options.ngram_delay else 0
        self.waiting: deque[int] = deque()
        self.partial = (
            None
            if options.cache == "full"
            else PartialCache(context.budget, options.sink, dynamic=options.cache == "dynamic")
        )

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        if self.partial is not None and cache.length:
            self.partial.append(cache, queries)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        newest = sampler.context[-1]
        memory = cache if self.partial is None else self.partial
        hidden = self.target.draft([newest], cache.length, memory)
        candidates = ranked_tokens(self.heads.levels(hidden, sampler, self.depth, own_level=True))
        tree = TokenTree(newest)
        tree.add_ranked(candidates, self.paths, "heads")
        if candidates[0]:
            for gram in self.table.most_frequent(candidates[0][0], self.ngrams):
                tree.add_path(gram, "ngrams")
        return tree

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.waiting += tokens
        self.table.extend([self.waiting.popleft() for _ in range(len(self.waiting) - self.delay)])
        if self.partial is not None:
            self.partial.append(cache, verification.queries, path[-1])

    def finish(self, statistics: Statistics) -> None:
        statistics.cache_rebuilds = 0 if self.partial is None else self.partial.rebuilds
