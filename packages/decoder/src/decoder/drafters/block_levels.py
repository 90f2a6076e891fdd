"""Levels of candidates from a draft model that fills a block at once."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from decoder.assistant.model import AssistantModel
from decoder.dflash.draft_model import DFlashDraftModel
from decoder.draft_layer import DraftLayer
from decoder.drafters.assistant_levels import AssistantLevels
from decoder.drafters.base import DrafterContext
from decoder.drafters.layer_levels import LayerLevels
from decoder.drafters.levels import HeadLevels, State, Work


class _BlockWork(NamedTuple):
    """The block of one sequence, and the entries that it lacks, as `levels.Work`: rows of all sequences' products.

    Attributes:
        levels: of the sequence.
        wanted: how many of them.
        features, tokens, positions: as `DraftLayerCache.take` gives them; the last token is the newest one.
    """

    levels: "BlockLevels"
    wanted: int
    features: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor

    @property
    def key(self) -> Hashable:
        return self.levels.heads, "block"

    @staticmethod
    def together(works: Sequence["_BlockWork"]) -> list[tuple[torch.Tensor, ...]]:
        """The logits [1, levels, v] of each."""
        levels = works[0].levels
        model, sizes = levels.heads, [len(work.tokens) for work in works]
        state = model.combine(torch.cat([work.features for work in works]))
        # The features of an entry are of the position before.
        made = model.entries(state, torch.cat([work.positions for work in works]) - 1)
        for work, keys, values in zip(works, *(one.split(sizes) for one in made), strict=True):
            work.levels.text.write(keys, values)
        size = model.shape.block_size
        tokens = works[0].tokens.new_full((len(works), size), model.shape.mask_token)
        tokens[:, 0] = torch.cat([work.tokens[-1:] for work in works])
        ahead = torch.arange(size, device=tokens.device)
        positions = torch.cat([work.positions[-1] + ahead for work in works])
        each = [model.attention_behind(work.levels.text) for work in works]

        def attend(
            layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            parts = zip(each, *(one.split(size) for one in (query, keys, values)), strict=True)
            return torch.cat([own(layer, *rows, scaling) for own, *rows in parts])

        normalised = model.draft(levels.embed(tokens.flatten()), positions, attend)
        # The block's first position stands where the newest token does.
        rows = [block[1 : 1 + work.wanted] for block, work in zip(normalised.split(size), works, strict=True)]
        logits = model.logits(levels.products(torch.cat(rows)))
        return [(own[None],) for own in logits.split([work.wanted for work in works])]


class BlockLevels(LayerLevels):
    """`LayerLevels` for a draft model whose levels all come with one pass."""

    at_once = True
    heads: DFlashDraftModel

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings as they are stored, times the draft model's own factor and not the model's."""
        theirs = 1.0 if self.heads.embed_tokens is not None else self.target.embedding_scale
        return super().embed(tokens) * (self.heads.shape.embedding_scale / theirs)

    def products(self, normalised: torch.Tensor) -> torch.Tensor:
        """What the language-model head gives, before the model scales and caps it."""
        layer = self.vocabulary.rows if self.heads.lm_head is None else self.heads.lm_head
        return layer(normalised)

    def _all(self, state: State, count: int) -> Work:
        return _BlockWork(self, count, *self.text.take())


def make_levels(context: DrafterContext, width: int, beam: int = 1) -> HeadLevels:
    """The levels of a sequence, by the kind of heads that its drafter was given."""
    if context.heads is None:
        raise ValueError("there are no heads to make levels from")
    if isinstance(context.heads, DraftLayer):
        made = BlockLevels if isinstance(context.heads, DFlashDraftModel) else LayerLevels
        return made(context, context.heads, width, beam)
    if isinstance(context.heads, AssistantModel):
        return AssistantLevels(context, context.heads, width, beam)
    return HeadLevels(context.target, context.heads, context.options.coupled, width, beam)
