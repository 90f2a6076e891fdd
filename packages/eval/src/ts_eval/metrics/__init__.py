"""Measures of decoding and of text: pure functions, and thin torchmetrics classes over them.

"Paper" is TokenSwift (arXiv 2502.18890). A measure that its input is too small for is None (NaN in the torchmetrics
classes), never 0.
"""

from collections.abc import Sequence

from ts_eval.metrics.base import mean_of
from ts_eval.metrics.diversity import (
    BLEU_ORDERS,
    DISTINCT_ORDERS,
    Distinct,
    SelfBLEU,
    SemanticDiversity,
    SentenceEmbedder,
    distinct,
    distinct_n,
    self_bleu,
    semantic_diversity,
)
from ts_eval.metrics.human_likeness import (
    FEWEST_PIECES,
    Mauve,
    PieceFeatures,
    mauve,
    mauve_package,
    pieces_of,
)
from ts_eval.metrics.likelihood import Perplexity, perplexity
from ts_eval.metrics.rates import (
    AcceptanceByDepth,
    AcceptanceBySource,
    AcceptanceRate,
    NgramAcceptanceRate,
    TokensPerStep,
    acceptance_by_depth,
    acceptance_by_source,
    acceptance_rate,
    ngram_acceptance_rate,
    tokens_per_step,
)
from ts_eval.metrics.repetition import (
    CompressionRatio,
    LongestRepeatedSpan,
    LoopStart,
    RepeatedShare,
    compression_ratio,
    longest_repeated_span,
    loop_start,
    repeated,
    repeated_share,
)

__all__ = [
    "BLEU_ORDERS",
    "DISTINCT_ORDERS",
    "FEWEST_PIECES",
    "AcceptanceByDepth",
    "AcceptanceBySource",
    "AcceptanceRate",
    "CompressionRatio",
    "Distinct",
    "LongestRepeatedSpan",
    "LoopStart",
    "Mauve",
    "NgramAcceptanceRate",
    "Perplexity",
    "PieceFeatures",
    "RepeatedShare",
    "SelfBLEU",
    "SemanticDiversity",
    "SentenceEmbedder",
    "TokensPerStep",
    "acceptance_by_depth",
    "acceptance_by_source",
    "acceptance_rate",
    "compression_ratio",
    "distinct",
    "distinct_n",
    "longest_repeated_span",
    "loop_start",
    "mauve",
    "mauve_package",
    "mean_of",
    "measure_text",
    "ngram_acceptance_rate",
    "perplexity",
    "pieces_of",
    "repeated",
    "repeated_share",
    "self_bleu",
    "semantic_diversity",
    "tokens_per_step",
]


def measure_text(text: str, token_ids: Sequence[int] | None = None) -> dict:
    """All measures that need no model, over token ids where given (Distinct-n over words as well), else over words."""
    units = text.split() if token_ids is None else token_ids
    return {
        "distinct": distinct(units),
        "distinct_words": distinct(text.split()),
        "self_bleu": self_bleu(text),
        "longest_repeated_span": longest_repeated_span(units),
        "repeated_share": repeated_share(units),
        "loop_start": loop_start(units),
        "compression_ratio": compression_ratio(text),
    }
