"""The fastest lossless choice, step by step: heads and suffixes where they pay, plain decoding where nothing does."""

from decoder.drafters.base import DrafterContext
from decoder.drafters.tuning.heads_source import HeadsSource
from decoder.drafters.tuning.odds import Odds
from decoder.drafters.tuning.suffix_source import SuffixSource
from decoder.drafters.tuning.tuned import Tuned


class Auto(Tuned):
    """Cost-tuned trees from the text's own suffixes, and from draft heads where there are any."""

    heads_kinds = ("gated", "conditioned", "chained", "independent")
    needs_heads = False

    def __init__(self, context: DrafterContext) -> None:
        learnt, heads = context.tuning_state, None
        odds = learnt.setdefault("odds", Odds())
        if context.heads is not None:
            heads = HeadsSource(context.target, context.heads, context.options.coupled, odds, learnt)
        super().__init__(context, [SuffixSource(context.prompt)], odds, costly=heads)
