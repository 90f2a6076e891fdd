"""Levels of candidates from an assistant, which attends to what the model keeps of the text."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from decoder.assistant.model import AssistantModel
from decoder.backends.transfers import upload
from decoder.cache.full import FullCache
from decoder.cache.layout import FULL, LayerKind
from decoder.draft_layer import attend
from decoder.drafters.base import DrafterContext
from decoder.drafters.levels import Advancing, HeadLevels, State
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler


class _Text(NamedTuple):
    """What the model keeps of a sequence's text: all its tokens but the newest.

    Attributes:
        position: of the newest token.
        pairs: by kind of layer, the keys and values [G, n, D] that a token at that position sees.
    """

    position: int
    pairs: dict[LayerKind, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, cache: FullCache, kinds: Sequence[LayerKind]) -> "_Text":
        """The layers of each kind that keep entries last."""
        pairs = {}
        for kind in dict.fromkeys(kinds):
            layer = cache.layout.members[kind][-1]
            if kind == FULL:
                keys, values = cache.layer(layer)
            else:
                held = cache.states[kind].snapshot
                keys, values = (one[-1, :, :, kind.first_seen(cache.length) - held.first :] for one in held[-2:])
            pairs[kind] = keys[0], values[0]
        return cls(cache.length, pairs)


class _Branches(NamedTuple):
    """What n branches are drafted on from.

    Attributes:
        hidden: the state at the end of each, [n, d]: of the model, before its final norm, where ``level`` is 0.
        level: how many drafts each has.
        text: what they stand behind.
    """

    hidden: torch.Tensor
    level: int
    text: _Text

    def index_select(self, dim: int, index: torch.Tensor) -> "_Branches":
        return self._replace(hidden=self.hidden.index_select(dim, index))


class _AssistantWork(NamedTuple):
    """The branches of one sequence and their newest ``tokens`` int64 [n], as `levels.Work`."""

    levels: "AssistantLevels"
    branches: _Branches
    tokens: torch.Tensor

    @property
    def key(self) -> Hashable:
        return self.levels.heads, self.branches.level == 0

    @staticmethod
    def together(works: Sequence["_AssistantWork"]) -> list[tuple[torch.Tensor, ...]]:
        """The next states of each, their logits, and of which tokens these are, if not of all."""
        target, model = works[0].levels.target, works[0].levels.heads
        sizes = [len(work.tokens) for work in works]
        states, tokens = (
            torch.cat(parts) for parts in zip(*((w.branches.hidden, w.tokens) for w in works), strict=True)
        )
        if not works[0].branches.level:
            states = target.norm(states)
        at = [work.branches.text.position for work, size in zip(works, sizes, strict=True) for _ in range(size)]

        def attend_text(kind: LayerKind, query: torch.Tensor, scaling: float) -> torch.Tensor:
            parts = zip(works, query.split(sizes), strict=True)
            return torch.cat([attend(own, *work.branches.text.pairs[kind], scaling=scaling) for work, own in parts])

        hidden, normalised = model.advance(states, target.embed(tokens), upload(at, tokens.device), attend_text)
        logits, drafted = model.candidates(normalised)
        outputs = (hidden, logits) if drafted is None else (hidden, logits, drafted)
        return list(zip(*(output.split(sizes) for output in outputs), strict=True))


class AssistantLevels(HeadLevels):
    """`HeadLevels` for an assistant; its ``state`` is the model's hidden state at the token before the newest one."""

    drafts_ahead = False  # it reads the cache, where what was accepted stands only behind the step
    heads: AssistantModel

    def __init__(self, context: DrafterContext, model: AssistantModel, width: int, beam: int = 1):
        super().__init__(context.target, model, context.options.coupled, min(width, model.drafted), beam)
        self._drafted: torch.Tensor | None = None  # of which tokens the level's logits are, [n, v]; None of all

    def state_behind(self, cache: FullCache, sampler: Sampler) -> State | None:
        return None if self.state is None else _Branches(self.state, 0, _Text.of(cache, self.heads.layer_kinds))

    def _advance(self, level: int, state: State, newest: torch.Tensor) -> Advancing:
        hidden, logits, *drafted = yield _AssistantWork(self, state, newest)
        self._drafted = drafted[0] if drafted else None
        return _Branches(hidden, state.level + 1, state.text), logits

    def _conditioned_scores(
        self, logits: torch.Tensor, sampler: Sampler, context: DraftContext, drafted: torch.Tensor | None
    ) -> torch.Tensor:
        if self._drafted is None:
            return super()._conditioned_scores(logits, sampler, context, drafted)
        if drafted is None:
            return sampler.draft_scores(logits, self.coupled, context, self._drafted[0], weak=True)
        rows = zip(logits.split(1), drafted.split(1), self._drafted, strict=True)
        return torch.cat([sampler.branch_scores(*row[:1], self.coupled, context, *row[1:]) for row in rows])

    def _best(self, scores: torch.Tensor) -> list[torch.Tensor]:
        if self._drafted is None:
            return super()._best(scores)
        values, indices = scores.topk(self.width)
        return [values, self._drafted.gather(1, indices)]
