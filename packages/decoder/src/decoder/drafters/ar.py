"""Plain autoregressive decoding, which drafts nothing: the reference that all other methods are compared with."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from decoder.backends.verification import Verification
from decoder.cache.full import FullCache
from decoder.drafters.base import DrafterContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.stats import Statistics


class Autoregressive:
    """Proposes nothing: each step verifies the newest token alone and draws one."""

    heads_kinds: ClassVar[tuple[str, ...]] = ()
    needs_heads: ClassVar[bool] = False
    observed_queries = 0

    def __init__(self, context: DrafterContext) -> None:
        self.max_nodes = 1

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        pass

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        return TokenTree(sampler.context[-1])

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        pass

    def finish(self, statistics: Statistics) -> None:
        pass
