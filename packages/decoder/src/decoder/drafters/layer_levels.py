"""Levels of candidates from a draft layer, which reads the whole sequence and not one hidden state."""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from decoder.backends.base import PassOutput
from decoder.backends.transfers import upload
from decoder.cache.draft_layer import DraftLayerCache, KeptEntries
from decoder.draft_layer import DraftLayer, RepeatedLayer, attend
from decoder.drafters.base import DrafterContext
from decoder.drafters.levels import Advancing, HeadLevels, State

_MOST_PENDING = 64  # entries that wait until levels are drafted: they are computed with the first one


class _Branches(NamedTuple):
    """The branches drafted so far in a step, n of them.

    Attributes:
        hidden: the layer's state at the end of each, [n, d].
        seen: which drafts of this step are on the way to each, bool [n, drafts].
        depth: how many tokens behind the sequence's newest one the next draft stands.
    """

    hidden: torch.Tensor
    seen: torch.Tensor
    depth: int

    def index_select(self, dim: int, index: torch.Tensor) -> "_Branches":
        return _Branches(self.hidden.index_select(dim, index), self.seen.index_select(dim, index), self.depth)


class _LayerWork(NamedTuple):
    """Entries of one sequence, as `levels.Work`: those of all sequences are rows of the same products.

    Attributes:
        levels: of the sequence.
        states: what the entries read, [n, c] features of the sequence's own, or [n, d] states behind drafts.
        tokens, positions: int64 [n].
        seen: of drafts, which ones each sees, bool [n, drafts]; None of the sequence's own, of which the newest is
            asked.
    """

    levels: "LayerLevels"
    states: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor | None

    @property
    def key(self) -> Hashable:
        return self.levels.heads, self.seen is None

    @staticmethod
    def together(works: Sequence["_LayerWork"]) -> list[tuple[torch.Tensor, ...]]:
        """The states and logits of each: behind its newest entry, or behind each draft."""
        levels = works[0].levels
        layer, sizes = levels.heads, [len(work.tokens) for work in works]
        assert isinstance(layer, RepeatedLayer)
        states, tokens, positions = (torch.cat(parts) for parts in list(zip(*works, strict=True))[1:4])

        def attending(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
            parts = zip(works, *(one.split(sizes) for one in (query, keys, values)), strict=True)
            return torch.cat([work.attend(*own, scaling) for work, *own in parts])

        last = None
        if works[0].seen is None:
            states, last = layer.combine(states, levels.target.norm), upload(list(accumulate(sizes)), tokens.device) - 1
            sizes_out = [1] * len(works)
        else:
            sizes_out = sizes
        hidden, normalised = layer.advance(states, levels.embed(tokens), positions, attending, last)
        logits = levels.vocabulary.logits(normalised)
        return list(zip(hidden.split(sizes_out), logits.split(sizes_out), strict=True))

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        text = self.levels.text
        if self.seen is None:
            text.write(keys, values)
            newest = attend(query[-1:], *text.read(), scaling=scaling)
            return torch.cat((newest.new_zeros(len(query) - 1, *newest.shape[1:]), newest))
        rows, drafts = self.seen.shape
        text.write_drafts(keys, values, drafts - rows)
        keys, values = text.read(drafts)
        mask = torch.cat((self.seen.new_ones(rows, keys.shape[1] - drafts), self.seen), dim=1)
        return attend(query, keys, values, mask, scaling)


class LayerLevels(HeadLevels):
    """`HeadLevels` for a draft layer; `state` is what it knows of the sequence.

    The first level comes with the entries of the tokens accepted in the last step, as one pass. Each further level is a
    pass over the branches that go on.

    The prompt is that of ``context``; `read_features` is given the passes over all its tokens but the last, behind
    those that `begin_with` stands for.
    """

    drafts_ahead = False
    heads: DraftLayer

    def __init__(self, context: DrafterContext, layer: DraftLayer, width: int, beam: int = 1):
        super().__init__(context.target, layer, context.options.coupled, width, beam)
        self.text = DraftLayerCache(layer, context.target.device)
        self._prompt = context.prompt

    def read_features(self, output: PassOutput) -> None:
        features = self.heads.features_of(output)
        first = self.text.entries + self.text.pending + 1
        # The next pass may write over its features.
        self._add(features.clone(), self._prompt[first : first + len(features)])

    def begin_with(self, kept: KeptEntries | None, count: int) -> None:
        """Begin with the first ``count`` entries of an earlier sequence, or with nothing."""
        self.text = DraftLayerCache(self.heads, self.target.device)
        if kept is not None:
            self.text.begin_with(kept, count)

    def kept(self, count: int) -> KeptEntries | None:
        """The first entries for another sequence, ``count`` at most; None if they are not there."""
        if self.text.pending and self.text.entries < count:
            self._compute(*self.text.take())
        return self.text.kept(count)

    def follow(self, verification: PassOutput, path: Sequence[int], tokens: Sequence[int]) -> None:
        rows = upload(path, self.target.device)
        self._add(self.heads.features_of(verification).index_select(0, rows), tokens)

    def _add(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Add entries; if many wait, all but the newest are computed, so that steps without drafts cost little."""
        self.text.add(features, tokens)
        if self.text.pending > _MOST_PENDING:
            self._compute(*self.text.take_all_but_newest())
        self.state = self.text

    def _compute(self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Keep the keys and values of entries behind which nothing is drafted."""
        states = self.heads.combine(features, self.target.norm)
        self.heads.take_in(states, self.embed(tokens), positions, self._written)

    def _written(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        self.text.write(keys, values)
        return query.new_zeros(*query.shape[:2], values.shape[-1])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings [n, d] of tokens [n]: the layer's own, or the model's."""
        return self.target.embed(tokens) if self.heads.embed_tokens is None else self.heads.embed_tokens(tokens)

    def _advance(self, level: int, state: State, newest: torch.Tensor) -> Advancing:
        """Behind the sequence the entries that wait are taken in; behind each of n branches stand ``newest`` [n]."""
        if isinstance(state, DraftLayerCache):
            hidden, logits = yield _LayerWork(self, *self.text.take(), None)
            return _Branches(hidden, torch.empty(1, 0, dtype=torch.bool, device=hidden.device), 1), logits
        rows = len(state.seen)
        positions = torch.full((rows,), self.text.entries + state.depth, device=newest.device)
        seen = torch.cat((state.seen, torch.eye(rows, dtype=torch.bool, device=newest.device)), dim=1)
        hidden, logits = yield _LayerWork(self, state.hidden, newest, positions, seen)
        return _Branches(hidden, seen, state.depth + 1), logits
