"""Prompt lookup (A. Saxena, 2023): draft what followed the last occurrence of the text's end."""

from collections.abc import Mapping

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.drafters.base import Drafter, DrafterContext
from decoder.drafters.retrieval.suffix_index import SuffixIndex
from decoder.drafters.retrieval.taking_in import taking_in
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.work import Work

LONGEST_SUFFIX = 3
CHAIN = 10  # tokens, transformers' default for prompt_lookup_num_tokens


class PromptLookup(Drafter):
    """Drafts a chain of tokens from prompt and output alone, without a pass over any weights."""

    def __init__(self, context: DrafterContext) -> None:
        self.count = min(CHAIN, context.max_new_tokens)
        self.max_nodes = 1 + self.count
        self.index = SuffixIndex(LONGEST_SUFFIX, occurrences=1)
        self.prompt = context.prompt

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None]:
        return taking_in(self.index, self.prompt)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        tree = TokenTree(sampler.context[-1])
        tree.add_path(self.index.chain(self.count), "lookup")
        return tree

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.index.extend(tokens)
