"""Untrained heads for a model, and those that a run starts from."""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from decoder import DraftHeads
from decoder.heads import TrainedHeads, load_trained
from decoder.parts import EAGLE3, DraftHead, Eagle3Config, Eagle3DraftModel
from heads_train.backbone import norm_eps

RIDGE_OF_HEADS = 0.1  # the same for heads, whose gated units have many channels
_RIDGE = 1e-4  # of each channel's own square: keeps the fit of features that repeat each other stable


def new_heads(
    config: PretrainedConfig,
    kind: str,
    count: int,
    layers: Sequence[int] | None,
    sliding_window: int | None,
    gate_width: int | None = None,
    shared: bool = False,
) -> TrainedHeads:
    """Untrained heads of a kind for the model of ``config``.

    Args:
        count: number of heads, or of the levels that an eagle3 draft model is trained for.
        layers: the model's layers whose inputs an eagle3 draft model reads; None takes `default_layers`.
        sliding_window: how many tokens its attention sees; None sees all.
        gate_width, shared: of `DraftHeads`.

    Raises:
        ValueError: an unknown kind, or arguments that do not fit the model.
    """
    if kind != EAGLE3:
        if layers is not None:
            raise ValueError(f"model.target_layers is for kind {EAGLE3}, and model.kind is {kind}: leave it out")
        return DraftHeads(config.hidden_size, count, norm_eps(config), kind, gate_width=gate_width, shared=shared)
    if gate_width is not None or shared:
        raise ValueError(f"model.gate_width and model.shared are for heads, and model.kind is {EAGLE3}: leave them out")
    shape = Eagle3Config.for_model(config, layers, sliding_window, count)
    draft_model = Eagle3DraftModel(shape)
    draft_model.target_architecture = (config.architectures or [draft_model.target_architecture])[0]
    draft_model.check_fits(config.hidden_size, config.vocab_size, config.num_hidden_layers)
    return draft_model


def start_heads(source: str, heads: TrainedHeads) -> TrainedHeads:
    """The heads in ``source`` to go on from. Raises ValueError unless they are of the kind and shape of ``heads``."""
    given = load_trained(source)
    given.check_fits(heads.hidden_size)
    if (given.kind, given.num_heads) != (heads.kind, heads.num_heads):
        raise ValueError(
            f"the heads in {source} are {given.num_heads} of kind {given.kind}, and "
            f"{heads.num_heads} of kind {heads.kind} were asked for"
        )
    if isinstance(given, DraftHeads) and (given.gate_width, given.shared) != (heads.gate_width, heads.shared):
        raise ValueError(
            f"the heads in {source} have model.gate_width {given.gate_width} and model.shared {given.shared}, and "
            f"{heads.gate_width} and {heads.shared} were asked for"
        )
    if isinstance(given, Eagle3DraftModel) and given.config != heads.config:
        raise ValueError(f"the draft model in {source} has another shape than model.target_layers and the like ask for")
    return given


def copy_head(heads: TrainedHeads, lm_head: nn.Linear) -> tuple[Tensor, Tensor | None]:
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


@torch.no_grad()
def fit_heads(heads: DraftHeads, read: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
    """Let new conditioned or gated heads start from the least-squares fit of the model's next state.

    A head that turns the state of a token and the embedding of the next into the state of that next one drafts as the
    model does. Of a gated unit the last layer is fitted, behind the random ones before it. Each token counts alike,
    however large its state. Heads are fitted in turn, each behind those before it; a shared one first on the model's
    own states, then on all that it will read.

    Args:
        read: the text to fit on: of each chunk the last states [n, d] and what `DraftHeads.forward` calls tokens
            [n, num_heads, d], of which the last ones of a chunk are not looked at.
    """
    levels = range(heads.num_heads)
    for fitted in (range(1), levels) if heads.shared else [(level,) for level in levels]:
        _fit_level(heads, fitted, read())


def _fit_level(heads: DraftHeads, levels: Sequence[int], chunks: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fit the head of ``levels``, numbers from 0, which is one and the same."""
    head = cast(DraftHead, heads.heads[levels[0]])
    squares, products = torch.zeros(()), torch.zeros(())
    for states, tokens in chunks:
        state = states.float()
        for level in range(levels[-1] + 1):
            state = state[:-1]
            embedding, wanted = tokens[: len(state), level].float(), states[level + 1 :].float()
            if level in levels:
                inputs = features = head.features(state, embedding)
                if head.gated:
                    inputs = torch.cat((features, head.gated_features(features)), dim=-1)
                size = state.norm(dim=-1, keepdim=True).clamp_min(1e-6)
                change = wanted * (size / wanted.norm(dim=-1, keepdim=True).clamp_min(1e-6)) - state
                inputs, change = inputs.float() / size, change / size
                squares, products = squares + inputs.T @ inputs, products + inputs.T @ change
            state = heads.advance(level, state, embedding)[0]
    squares.diagonal().mul_(1 + RIDGE_OF_HEADS)
    solved = torch.linalg.solve(squares.double(), products.double()).T
    width = head.linear.in_features
    head.linear.weight.copy_(solved[:, :width])
    if head.gated:
        head.down.weight.copy_(solved[:, width:])
