"""The fastest lossless choice, step by step: heads and suffixes where they pay, plain decoding where nothing does."""

from decoder.drafters.base import Resources
from decoder.drafters.tuning.heads_source import HeadsSource
from decoder.drafters.tuning.odds import Odds
from decoder.drafters.tuning.suffix_source import SuffixSource
from decoder.drafters.tuning.tuned import Tuned


class Auto(Tuned):
    """Cost-tuned trees from the text's own suffixes, and from draft heads where there are any."""

    heads_kinds = ("gated", "conditioned", "chained", "independent")
    needs_heads = False

    def __init__(self, resources: Resources) -> None:
        learnt, heads = resources.learnt, None
        odds = learnt.setdefault("odds", Odds())
        if resources.heads is not None:
            heads = HeadsSource(resources.target, resources.heads, resources.options.coupled, odds, learnt)
        super().__init__(resources, [SuffixSource(resources.prompt)], odds, costly=heads)
