"""Plain autoregressive decoding, which drafts nothing: the reference that all other methods are compared with."""

from decoder.cache.full import FullCache
from decoder.drafters.base import Drafter, DrafterContext
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree


class Autoregressive(Drafter):
    """Proposes nothing: each step verifies the newest token alone and draws one."""

    def __init__(self, context: DrafterContext) -> None:
        self.max_nodes = 1

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        return TokenTree(sampler.context[-1])
