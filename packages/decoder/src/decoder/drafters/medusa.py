"""Medusa* of the paper's Table 3: heads on the verification's own hidden state, same tree, no draft pass."""

from collections.abc import Mapping

import torch

from decoder.drafters.base import Resources
from decoder.drafters.levels import best_tokens, node_count
from decoder.full_cache import FullCache
from decoder.sampler import Sampler
from decoder.stats import Statistics
from decoder.target import Verification
from decoder.token_tree import TokenTree


class Medusa:
    """Drafts from the hidden state of the last accepted node, which the verification has computed anyway.

    That node is at the position before the newest token, whose own hidden state is not known yet; it is the root of
    the next tree. Head i (from 1) predicts the token i + 1 positions after its hidden state, so head 1 fills the
    tree's first level. The first step has nothing to draft from and verifies the root alone.
    """

    heads_kinds = ("independent", "chained")

    def __init__(self, resources: Resources) -> None:
        self.target, self.heads, self.options = resources.target, resources.heads, resources.options
        self.branching = self.options.tree[: min(self.heads.num_heads, resources.max_new_tokens)]
        self.max_nodes = node_count(self.branching)
        self.hidden: torch.Tensor | None = None

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        pass

    def propose(self, cache: FullCache, sampler: Sampler) -> TokenTree:
        tree = TokenTree(sampler.context[-1])
        if self.hidden is not None:
            states = self.heads(self.hidden)[: len(self.branching)]
            scores = sampler.draft_scores(self.target.head(torch.stack(states)), self.options.coupled)
            tree.add_levels(best_tokens(scores, self.branching), "heads")
        return tree

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        self.hidden = verification.hidden[path[-1]]

    def finish(self, statistics: Statistics) -> None:
        pass
