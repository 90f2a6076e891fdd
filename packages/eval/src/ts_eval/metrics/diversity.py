"""How diverse a text is: Distinct-n, Self-BLEU, and the distance in meaning of its parts."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from transformers import AutoModel, AutoTokenizer

from ts_eval.metrics.base import MeanOverTexts, mean_of

DISTINCT_ORDERS = (1, 2, 3, 4)
BLEU_ORDERS = (2, 3, 4, 5)

Embed = Callable[[Sequence[str]], torch.Tensor]


def distinct_n(tokens: Sequence[Hashable], n: int) -> float | None:
    """Distinct-n: unique n-grams over all n-grams of ``tokens`` (Li et al., 2016; paper, section 4.1), in (0, 1].

    None for fewer than ``n`` tokens. Raises ValueError for ``n`` below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    ngrams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def distinct(tokens: Sequence[Hashable], orders: Sequence[int] = DISTINCT_ORDERS) -> dict[str, float | None]:
    """Distinct-n of every order, keyed "1", "2", ..., and their "mean" (None when one of them is None)."""
    values = {str(n): distinct_n(tokens, n) for n in orders}
    return {**values, "mean": mean_of(list(values.values())) if None not in values.values() else None}


def segments_of(text: str, segments: int) -> list[str]:
    """The text cut at white space in ``segments`` pieces of equally many words; their numbers differ by one at most."""
    words = text.split()
    cuts = [i * len(words) // segments for i in range(segments + 1)]
    return [" ".join(words[a:b]) for a, b in pairwise(cuts)]


def self_bleu(text: str, orders: Sequence[int] = BLEU_ORDERS, segments: int = 50) -> dict[str, float | None]:
    """Self-BLEU (Zhu et al., 2018; the paper's review discussion), in [0, 1], keyed by order; lower is more diverse.

    The text is cut as `segments_of` does. Each piece is scored against all the others with sacrebleu's sentence BLEU
    of that maximal order (13a tokenisation, exponential smoothing, effective order); the result is the mean over the
    pieces. None for an order when a piece has fewer words than that. Raises ValueError for fewer than two segments.

    sacrebleu would count every reference again for each piece. Clipped matches need, per n-gram, only the highest
    count among the other pieces, so one pass keeps the two highest; sacrebleu turns the counts into scores.
    """
    if segments < 2:
        raise ValueError(f"segments must be at least 2, not {segments}")
    shortest = len(text.split()) // segments
    fitting = [n for n in orders if n <= shortest]
    if not fitting:
        return {str(n): None for n in orders}

    tokenize = Tokenizer13a()
    pieces = [tokenize(piece).split() for piece in segments_of(text, segments)]
    matches = [_clipped_matches(pieces, n) for n in range(1, max(fitting) + 1)]
    lengths = [len(piece) for piece in pieces]
    scores: dict[int, list[float]] = {n: [] for n in fitting}
    for i, length in enumerate(lengths):
        closest = min(lengths[:i] + lengths[i + 1 :], key=lambda other: (abs(other - length), other))
        for n in fitting:
            correct = [matches[order][i] for order in range(n)]
            total = [max(length - order, 0) for order in range(n)]
            score = BLEU.compute_bleu(
                correct, total, length, closest, smooth_method="exp", effective_order=True, max_ngram_order=n
            )
            # sacrebleu's exp(log) leaves a perfect score a rounding error above 100.
            scores[n].append(min(score.score / 100, 1.0))
    return {str(n): mean_of(scores[n]) if n in scores else None for n in orders}


def _clipped_matches(pieces: list[list[str]], n: int) -> list[int]:
    """Per piece, its n-grams that some other piece has, each at most as often as the piece that has it most."""
    counts = [Counter(zip(*(piece[i:] for i in range(n)), strict=False)) for piece in pieces]
    highest: dict[tuple[str, ...], tuple[int, int, int]] = {}
    for i, counter in enumerate(counts):
        for ngram, count in counter.items():
            first, owner, second = highest.get(ngram, (0, -1, 0))
            if count > first:
                highest[ngram] = (count, i, first)
            elif count > second:
                highest[ngram] = (first, owner, count)
    matches = []
    for i, counter in enumerate(counts):
        matched = 0
        for ngram, count in counter.items():
            first, owner, second = highest[ngram]
            matched += min(count, second if owner == i else first)
        matches.append(matched)
    return matches


def semantic_diversity(text: str, embed: Embed, segments: int = 50) -> float | None:
    """Mean cosine distance, in [0, 2], between the embeddings of all pairs of the text's `segments_of`.

    Tevet and Berant (2021) call the mean cosine similarity of sentence embeddings, negated, Sent-BERT diversity; this
    is one minus it, higher for a text whose parts differ more in meaning. None for fewer words than segments. Raises
    ValueError for fewer than two segments.

    Args:
        embed: sentences -> embeddings [n, d], such as a `SentenceEmbedder`.
    """
    if segments < 2:
        raise ValueError(f"segments must be at least 2, not {segments}")
    if len(text.split()) < segments:
        return None
    vectors = torch.nn.functional.normalize(embed(segments_of(text, segments)).double(), dim=-1)
    # The sum over all pairs of different segments is the squared length of the sum, less the n ones on the diagonal.
    total = vectors.sum(0).square().sum() - vectors.square().sum()
    return float(1 - total / (segments * (segments - 1)))


class SentenceEmbedder:
    """Sentence embeddings [n, d] by a model that the user names: the mean of its last hidden states over the tokens.

    That is how the sentence-transformers models with mean pooling are meant to be used (Reimers and Gurevych, 2019).

    Args:
        model: folder or hub id of an encoder with its tokenizer.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, model: str, device: torch.device | str = "cpu", batch_size: int = 16):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModel.from_pretrained(model).to(device).eval()
        self.batch_size = batch_size
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        self.tokenizer.padding_side = "right"

    @torch.inference_mode()
    def __call__(self, sentences: Sequence[str]) -> torch.Tensor:
        limits = (getattr(self.model.config, "max_position_embeddings", None), self.tokenizer.model_max_length)
        longest = min(limit for limit in limits if limit)
        vectors = []
        for start in range(0, len(sentences), self.batch_size):
            batch = self.tokenizer(
                list(sentences[start : start + self.batch_size]),
                padding=True,
                truncation=True,
                max_length=longest,
                return_tensors="pt",
            ).to(self.model.device)
            mask = batch["attention_mask"]
            states = self.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
            vectors.append((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return torch.cat(vectors)


class Distinct(MeanOverTexts):
    """Mean `distinct_n` over texts, one text (token ids or words) per update."""

    higher_is_better = True

    def __init__(self, n: int, **kwargs):
        super().__init__(**kwargs)
        self.n = n

    def measure(self, tokens: Sequence[Hashable]) -> float | None:
        return distinct_n(tokens, self.n)


class SelfBLEU(MeanOverTexts):
    """Mean `self_bleu` of one order over texts, one text per update."""

    higher_is_better = False

    def __init__(self, order: int = 4, segments: int = 50, **kwargs):
        super().__init__(**kwargs)
        self.order, self.segments = order, segments

    def measure(self, text: str) -> float | None:
        return self_bleu(text, (self.order,), self.segments)[str(self.order)]


class SemanticDiversity(MeanOverTexts):
    """Mean `semantic_diversity` over texts, one text per update."""

    higher_is_better = True

    def __init__(self, embed: Embed, segments: int = 50, **kwargs):
        super().__init__(**kwargs)
        self.embed, self.segments = embed, segments

    def measure(self, text: str) -> float | None:
        return semantic_diversity(text, self.embed, self.segments)
