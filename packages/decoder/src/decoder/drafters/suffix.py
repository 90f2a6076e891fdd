"""Suffix retrieval: what followed the end of the text where it stood before (compare SuffixDecoding, 2411.04975)."""

from decoder.drafters.base import DrafterContext
from decoder.drafters.tuning.odds import Odds
from decoder.drafters.tuning.suffix_source import SuffixSource
from decoder.drafters.tuning.tuned import Tuned


class Suffix(Tuned):
    """Cost-tuned trees from prompt and output alone; costs no pass over any weights."""

    heads_kinds = ()
    needs_heads = False

    def __init__(self, context: DrafterContext) -> None:
        odds = context.tuning_state.setdefault("odds", Odds())
        super().__init__(context, [SuffixSource(context.prompt)], odds)
