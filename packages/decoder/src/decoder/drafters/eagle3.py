"""EAGLE-3 (arXiv 2503.01840): drafts of one decoder layer that reads three of the target's hidden states."""

from typing import ClassVar

from decoder.drafters.base import DrafterContext
from decoder.drafters.medusa import Medusa
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.sampling.token_tree import rank_paths


class Eagle3(Medusa):
    """A fixed tree of an EAGLE-3 draft model's candidates.

    In a tree of several branches the levels go on from its best candidates; a level serves all branches of the one
    before with the candidates of the likeliest.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ("eagle3",)

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        # The layer serves any number of levels.
        self.paths = rank_paths(context.options.fixed_tree, context.max_new_tokens)
        self.depth = max(map(len, self.paths), default=0)
        self.max_nodes = 1 + len(self.paths)


class TunedEagle3(CostTuned):
    """`Eagle3` where no tree is given: of its candidates those that pay on this machine."""

    heads_kinds: ClassVar[tuple[str, ...]] = ("eagle3",)
    needs_heads = True
