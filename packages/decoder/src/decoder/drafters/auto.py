"""The fastest lossless choice, step by step: heads and suffixes where they pay, plain decoding where nothing does."""

from decoder.drafters.tuning.cost_tuned import CostTuned


class Auto(CostTuned):
    """Cost-tuned trees from the text's own suffixes, and from draft heads where there are any."""

    heads_kinds = ("gated", "conditioned", "chained", "independent")
