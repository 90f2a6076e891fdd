"""Untrained heads for a model, and those that a run starts from."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from decoder.draft_heads import DraftHeads
from decoder.eagle3.config import Eagle3Config
from decoder.eagle3.draft_model import KIND as EAGLE3
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.heads import Heads, load_heads
from heads_train.backbone import norm_eps

_RIDGE = 1e-4  # of each channel's own square: keeps the fit of features that repeat each other stable


def new_heads(
    config: PretrainedConfig, kind: str, count: int, layers: Sequence[int] | None, sliding_window: int | None
) -> Heads:
    """Untrained heads of a kind for the model of ``config``.

    Args:
        count: number of heads, or of the levels that an eagle3 draft model is trained for.
        layers: the model's layers whose inputs an eagle3 draft model reads; None takes `default_layers`.
        sliding_window: how many tokens its attention sees; None sees all.

    Raises:
        ValueError: an unknown kind, or arguments that do not fit the model.
    """
    if kind != EAGLE3:
        if layers is not None:
            raise ValueError(f"model.target_layers is for kind {EAGLE3}, and model.kind is {kind}: leave it out")
        return DraftHeads(config.hidden_size, count, norm_eps(config), kind)
    shape = Eagle3Config.for_model(config, layers, sliding_window, count)
    draft_model = Eagle3DraftModel(shape)
    draft_model.target_architecture = (config.architectures or [draft_model.target_architecture])[0]
    draft_model.check_fits(config.hidden_size, config.vocab_size, config.num_hidden_layers)
    return draft_model


def start_heads(source: str, heads: Heads) -> Heads:
    """The heads in ``source`` to go on from. Raises ValueError unless they are of the kind and shape of ``heads``."""
    given = load_heads(source)
    given.check_fits(heads.hidden_size)
    if (given.kind, given.num_heads) != (heads.kind, heads.num_heads):
        raise ValueError(
            f"the heads in {source} are {given.num_heads} of kind {given.kind}, and "
            f"{heads.num_heads} of kind {heads.kind} were asked for"
        )
    if isinstance(given, Eagle3DraftModel) and given.config != heads.config:
        raise ValueError(f"the draft model in {source} has another shape than model.target_layers and the like ask for")
    return given


def copy_head(heads: Heads, lm_head: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight [v, d] and bias [v] of the language-model head for the tokens that heads draft.

    An eagle3 draft model is given them as its own, frozen, since its checkpoints hold them.

    Raises:
        ValueError: it is such a model, and the head has a bias.
    """
    weight, bias, chosen = lm_head.weight, getattr(lm_head, "bias", None), heads.draft_to_target
    if not isinstance(heads, Eagle3DraftModel):
        return (weight, bias) if chosen is None else (weight[chosen], None if bias is None else bias[chosen])
    if bias is not None:
        raise ValueError("an eagle3 draft model has no place for the bias of this model's language-model head")
    if (own := heads.lm_head) is None:
        own = heads.make_own_head().to(weight.device, weight.dtype).requires_grad_(False)
        own.weight.data = weight.detach().clone() if chosen is None else weight.detach()[chosen]
    return own.weight, None


@torch.no_grad()
def fit_features(draft_model: Eagle3DraftModel, states: Iterable[Tensor]) -> None:
    """Let a new draft model start from what its features tell of the model's last state: the least-squares fit of it.

    What it drafts at first is then close to the model's own prediction, as with other new heads. Each token counts
    alike, however large its state.

    Args:
        states: of some chunks, [..., features + d]; the last d channels are the last state.
    """
    d, width = draft_model.hidden_size, draft_model.fc.in_features
    squares, products = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, d, dtype=torch.float64)
    for chunk in states:
        chunk = chunk.flatten(0, -2).cpu().double()
        chunk = chunk / chunk[:, -d:].norm(dim=-1, keepdim=True).clamp_min(1e-6)
        features, last = chunk.split([width, d], dim=-1)
        squares += features.T @ features
        products += features.T @ last
    squares.diagonal().mul_(1 + _RIDGE)
    draft_model.fc.weight.copy_(torch.linalg.solve(squares, products).T)
