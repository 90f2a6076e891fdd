"""Suffix retrieval: draft what followed earlier occurrences of the text's end (compare SuffixDecoding, 2411.04975)."""

from decoder.drafters.tuning.cost_tuned import CostTuned


class Suffix(CostTuned):
    """Cost-tuned trees from prompt and output alone, without a draft pass over any weights."""

    heads_kinds = ()
