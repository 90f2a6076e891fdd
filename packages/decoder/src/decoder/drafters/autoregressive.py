"""No drafter: plain autoregressive decoding, the referee of all others."""

import torch

from decoder.draft_heads import DraftHeads
from decoder.full_cache import FullCache
from decoder.options import TokenSwiftOptions
from decoder.sampler import Sampler
from decoder.stats import Statistics
from decoder.target import Target, Verification
from decoder.token_tree import TokenTree


class Autoregressive:
    """Proposes nothing: each step verifies the newest token alone and draws one."""

    heads_kinds = ()

    def __init__(
        self, target: Target, heads: DraftHeads | None, options: TokenSwiftOptions, prompt: list[int], depth: int
    ) -> None:
        self.max_nodes = 1

    def start(self, cache: FullCache, queries: dict[int, torch.Tensor]) -> None:
        pass

    def propose(self, cache: FullCache, sampler: Sampler) -> TokenTree:
        return TokenTree(sampler.context[-1])

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        pass

    def finish(self, statistics: Statistics) -> None:
        pass
