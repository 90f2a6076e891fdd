"""Trees of one shape, whose places the best candidates of each level take."""

from collections.abc import Sequence
from typing import ClassVar

from decoder.cache.full import FullCache
from decoder.drafters.base import Drafter
from decoder.drafters.levels import Level, ranked_tokens
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import RankPath, TokenTree


class FixedTree(Drafter):
    """Proposes the same tree in every step, of levels that are taken before.

    Args:
        paths: the shape.

    Attributes:
        depth, width: how many levels it needs, and how many candidates of each.
    """

    source: ClassVar[str] = "heads"
    """The name under which its drafts are counted."""

    def __init__(self, paths: Sequence[RankPath]) -> None:
        self.paths, self.depth = paths, max(map(len, paths), default=0)
        self.width, self.max_nodes = max(map(max, paths), default=0) + 1, 1 + len(paths)
        self._candidates: list[list[int]] | None = None  # of the next tree, where they are known already

    def _take_levels(self, levels: list[Level], seconds: float = 0.0) -> None:
        self._candidates = ranked_tokens(levels)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        tree = TokenTree(sampler.context[-1])
        candidates, self._candidates = self._candidates, None
        tree.add_ranked(candidates or (), self.paths, self.source)
        return tree
