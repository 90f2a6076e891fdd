"""Fused drafting: TokenSwift without its draft pass, one pass over the weights per step."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.draft_heads import KINDS
from decoder.drafters.auto import Auto
from decoder.drafters.base import DrafterContext
from decoder.drafters.medusa import Medusa
from decoder.drafters.retrieval.suffix_index import SuffixIndex
from decoder.drafters.retrieval.taking_in import taking_in
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.work import Work

_LONGEST_CHAIN = 32


class Fused(Medusa):
    """A fixed tree from heads on the verification's hidden state, and a chain of the text's own.

    Conditioned heads suit it best: each level reads the token drafted before it, with coupling mostly the true one.
    The chain is what followed the longest suffix seen before, twice as long as that suffix.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ("dflash", "assistant", "mtp", *KINDS)
    needs_heads: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.longest = min(_LONGEST_CHAIN, context.max_new_tokens)
        self.max_nodes += self.longest
        self.index = SuffixIndex(_LONGEST_CHAIN)
        self.prompt = context.prompt

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None]:
        return taking_in(self.index, self.prompt)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        tree = super().propose(cache, sampler, depth)
        length, _ = self.index.match()
        tree.add_path(self.index.chain(min(self.longest, 2 * length)), "suffix")
        return tree

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        super().commit(cache, verification, path, tokens)
        self.index.extend(tokens)


class TunedFused(Auto):
    """`Fused` where no tree is given: `Auto`, but never without heads."""

    needs_heads: ClassVar[bool] = True
    takes_draft_model: ClassVar[bool] = False
