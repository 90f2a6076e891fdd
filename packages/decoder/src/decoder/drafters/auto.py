"""The default method: drafts from suffixes and heads in each step where they pay, plain decoding where they do not."""

from decoder.drafters.tuning.cost_tuned import CostTuned


class Auto(CostTuned):
    """Cost-tuned trees from suffixes of the text, and from draft heads if there are any."""

    heads_kinds = ("gated", "conditioned", "chained", "independent")
