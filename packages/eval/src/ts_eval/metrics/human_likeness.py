"""How near a text is to human text: MAUVE on the features of the model that wrote it."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from tqdm import tqdm
from transformers import PreTrainedModel

from decoder.auditing import evaluating
from ts_eval.defaults import PIECE_TOKENS

FEWEST_PIECES = 200
"""With fewer MAUVE is None: with 50 pieces of 64 tokens, two books can come as near as the halves of one."""
SEEDS = range(25, 30)
"""Of the clusterings that are averaged: `mauve-text`'s own seed and those behind it."""

Features = Callable[[Sequence[int]], torch.Tensor]


def pieces_of(token_ids: Sequence[int], piece_tokens: int = PIECE_TOKENS) -> list[Sequence[int]]:
    """``token_ids`` cut into pieces of exactly ``piece_tokens``; what is left at the end is in none.

    Raises ValueError for ``piece_tokens`` below 1.
    """
    if piece_tokens < 1:
        raise ValueError(f"piece_tokens must be at least 1, not {piece_tokens}")
    starts = range(0, len(token_ids) - piece_tokens + 1, piece_tokens)
    return [token_ids[start : start + piece_tokens] for start in starts]


class PieceFeatures:
    """Features [n, D] of a text's n `pieces_of`: each piece alone through the model, the mean of its final states.

    Pillutla et al. (2021) take the state of the last token, of GPT-2 large and longer texts. In a small model that
    state says what token comes next and little else, and hardly tells one book from another; the mean does.

    Args:
        model: a causal model; it is left as it was, and nothing else is loaded.
        piece_tokens: tokens of a piece.
        batch_size: pieces of a pass.

    Raises:
        ValueError: ``piece_tokens`` is below 1 or beyond the model's positions.
    """

    def __init__(self, model: PreTrainedModel, piece_tokens: int = PIECE_TOKENS, batch_size: int = 32):
        positions = getattr(model.config, "max_position_embeddings", None)
        if piece_tokens < 1 or (positions is not None and piece_tokens > positions):
            limits = "at least 1" if positions is None else f"between 1 and the model's {positions:,} positions"
            raise ValueError(f"piece_tokens must be {limits}, not {piece_tokens:,}")
        self.model, self.piece_tokens, self.batch_size = model, piece_tokens, batch_size

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        pieces = pieces_of(token_ids, self.piece_tokens)
        if not pieces:
            return torch.empty(0, self.model.config.get_text_config().hidden_size)
        features = []
        with evaluating(self.model):
            # Shown at a terminal only: a book takes minutes on a CPU.
            for start in tqdm(range(0, len(pieces), self.batch_size), "features", leave=False, disable=None):
                ids = torch.tensor([list(piece) for piece in pieces[start : start + self.batch_size]])
                states = self.model.get_decoder()(ids.to(self.model.device), use_cache=False).last_hidden_state
                features.append(states.float().mean(1).cpu())
        return torch.cat(features)


def mauve_package() -> ModuleType:
    """The package `mauve-text`. Raises ValueError, which says how to install it, where it is not."""
    try:
        import mauve
    except ModuleNotFoundError as error:
        package = (error.name or "mauve").partition(".")[0]
        raise ValueError(
            f"MAUVE needs {package}, which is not installed: pip install 'tokenswift-eval[mauve]'"
        ) from None
    return mauve


def mauve(human: torch.Tensor, generated: torch.Tensor) -> float | None:
    """MAUVE (Pillutla et al., 2021), in (0, 1]: 1 where pieces of both kinds fall alike into clusters of features.

    Both kinds are clustered together by k-means, as many clusters as a tenth of the smaller kind's pieces, and MAUVE
    compares the two histograms over the clusters, as the package `mauve-text` does. The clustering starts at random
    and moves the value by some 0.05, so the mean over five fixed `SEEDS` is taken. The value falls with the number of
    pieces where the kinds differ: compare values of as many pieces only. None for fewer than `FEWEST_PIECES` of a kind.

    Args:
        human: features [n, D], such as those of `PieceFeatures`.
        generated: the same [m, D].

    Raises:
        ValueError: the extra `mauve` is not installed, or a feature is not finite.
    """
    package = mauve_package()
    if min(len(human), len(generated)) < FEWEST_PIECES:
        return None
    if not (human.isfinite().all() and generated.isfinite().all()):
        raise ValueError("the features hold values that are not finite: the model's dtype overflows")
    p, q = human.float().numpy(), generated.float().numpy()
    values = [float(package.compute_mauve(p_features=p, q_features=q, seed=seed).mauve) for seed in SEEDS]
    return sum(values) / len(values)


class Mauve(Metric):
    """`mauve` of all generated texts against all human ones, the token ids of one text per update.

    Args:
        features: token ids -> features [n, D] of the text's pieces, such as `PieceFeatures`.
    """

    higher_is_better = True
    full_state_update = False

    def __init__(self, features: Features, **kwargs):
        super().__init__(**kwargs)
        # In a list: the metric shall neither move a model nor save it.
        self._features = [features]
        self.add_state("human", [], dist_reduce_fx="cat")
        self.add_state("generated", [], dist_reduce_fx="cat")

    def update(self, token_ids: Sequence[int], human: bool) -> None:
        (self.human if human else self.generated).append(self._features[0](token_ids))

    def compute(self) -> torch.Tensor:
        kinds = [dim_zero_cat(kind).cpu() if len(kind) else torch.empty(0, 1) for kind in (self.human, self.generated)]
        value = mauve(*kinds)
        return torch.tensor(float("nan") if value is None else value, dtype=torch.float64)
