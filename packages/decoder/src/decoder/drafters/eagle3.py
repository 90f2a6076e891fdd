"""EAGLE-3 (arXiv 2503.01840): drafts of one decoder layer that reads three of the target's hidden states."""

from typing import ClassVar

from decoder.drafters.medusa import Medusa
from decoder.drafters.tuning.cost_tuned import CostTuned


class Eagle3(Medusa):
    """A fixed tree of an EAGLE-3 draft model's candidates.

    In a tree of several branches the levels go on from its best candidates; a level serves all branches of the one
    before with the candidates of the likeliest.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ("eagle3",)


class TunedEagle3(CostTuned):
    """`Eagle3` where no tree is given: of its candidates those that pay on this machine."""

    heads_kinds: ClassVar[tuple[str, ...]] = ("eagle3",)
    needs_heads = True
