"""A drafter of our own in one file: it drafts the token that followed the newest one the last time."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.drafters import METHODS, DrafterContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.stats import Statistics

LENGTH = 3  # drafted tokens per step


class Bigram:
    """Remembers for each token which one came after it, and drafts a chain of such followers."""

    heads_kinds: ClassVar[tuple[str, ...]] = ()  # it runs without draft heads
    needs_heads: ClassVar[bool] = False
    observed_queries = 0  # it does not look at attention

    def __init__(self, context: DrafterContext) -> None:
        self.max_nodes = 1 + LENGTH
        self.follower: dict[int, int] = {}
        self.newest = context.prompt[0]
        self._learn(context.prompt[1:])

    def _learn(self, tokens: list[int] | tuple[int, ...]) -> None:
        for token in tokens:
            self.follower[self.newest] = token
            self.newest = token

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        """The prompt is in the cache; a drafter with a cache of its own would fill it here."""

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        tree = TokenTree(sampler.context[-1])
        chain: list[int] = []
        token = sampler.context[-1]
        while len(chain) < LENGTH and token in self.follower:
            token = self.follower[token]
            chain.append(token)
        tree.add_path(chain, "bigram")
        return tree

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self._learn(tokens)

    def finish(self, statistics: Statistics) -> None:
        """Nothing was counted that the engine does not know."""


METHODS["bigram"] = Bigram
