"""MagicDec (arXiv 2408.11049): the model drafts for itself, with a KV cache of fixed size."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.backends.transfers import download
from decoder.cache.full import FullCache
from decoder.cache.streaming import RecentCache
from decoder.drafters.base import Drafter, DrafterContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree

OBSERVATION_WINDOW = 32
"""How many queries at the end of the prompt SnapKV ranks entries by (arXiv 2404.14469)."""


class MagicDec(Drafter):
    """Drafts a chain as deep as ``options.tree`` in as many autoregressive steps of the target itself.

    Each draft step reads all weights but few entries, so it pays where the full cache is larger than the model. The
    draft cache is StreamingLLM's, or SnapKV's with the newest entries beside it, as ``options.draft_cache`` says.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ()
    needs_heads: ClassVar[bool] = False

    def __init__(self, context: DrafterContext) -> None:
        self.target, self.options = context.target, context.options
        self.count = min(self.options.depth, context.max_new_tokens)
        self.max_nodes = 1 + self.count
        budget = context.budget
        self.snapkv = self.options.draft_cache == "snapkv"
        self.observed_queries = OBSERVATION_WINDOW if self.snapkv else 0
        self.recent = RecentCache(budget, budget // 2 if self.snapkv else self.options.sink, room=self.count)

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        self.recent.append(cache)
        if self.snapkv:
            self.recent.select(cache, queries)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        tree, drafted, chain = TokenTree(sampler.context[-1]), sampler.draft_context(), []
        for step in range(min(self.count, depth)):
            self.recent.hold(step)
            hidden = self.target.draft(drafted.newest(), cache.length + step, self.recent)
            logits = self.target.head(self.target.norm(hidden))
            chain.append(sampler.draft_choice(logits[0], self.options.coupled, drafted))
            drafted.push(chain[-1])
        tree.add_path(self.target.ranks.agree(download(torch.cat(chain))) if chain else (), "target")
        return tree

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.recent.append(cache)
