"""Levels of candidates from an EAGLE-3 draft model, which reads the whole text and not one hidden state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from decoder.backends.transfers import upload
from decoder.backends.verification import Verification
from decoder.drafters.base import DrafterContext
from decoder.drafters.levels import Advancing, HeadLevels, Product, State
from decoder.eagle3.draft_model import Eagle3DraftModel, attend
from decoder.eagle3.text_cache import Eagle3TextCache


class _Branches(NamedTuple):
    """The branches drafted so far in a step, n of them.

    Attributes:
        hidden: the draft model's state at the end of each, [n, d].
        seen: which drafts of this step are on the way to each, bool [n, drafts].
        depth: how many tokens behind the text's newest one the next draft stands.
    """

    hidden: torch.Tensor
    seen: torch.Tensor
    depth: int

    def index_select(self, dim: int, index: torch.Tensor) -> "_Branches":
        return _Branches(self.hidden.index_select(dim, index), self.seen.index_select(dim, index), self.depth)


class Eagle3Levels(HeadLevels):
    """`HeadLevels` for an EAGLE-3 draft model; `state` is what it knows of the text.

    The first level comes with the entries of the tokens accepted in the last step, as one pass. Each further level is a
    pass over the branches that go on.

    The prompt is that of ``context``; `read_features` is given the features of all its tokens but the last.
    """

    drafts_ahead = False
    heads: Eagle3DraftModel

    def __init__(self, context: DrafterContext, draft_model: Eagle3DraftModel, width: int, beam: int = 1):
        super().__init__(context.target, draft_model, context.options.coupled, width, beam)
        self.text = Eagle3TextCache(draft_model, context.target.device)
        self._prompt = context.prompt

    def read_features(self, features: torch.Tensor) -> None:
        first = self.text.entries + self.text.pending + 1
        # The next pass may write over its features.
        self.text.add(features.clone(), self._prompt[first : first + len(features)])
        self.text.absorb(self._embed)
        self.state = self.text

    def follow(self, verification: Verification, path: Sequence[int], tokens: Sequence[int]) -> None:
        assert verification.features is not None  # the target returns them wherever it has such a draft model
        rows = upload(path, self.target.device)
        self.text.add(verification.features.index_select(0, rows), tokens)
        self.text.absorb(self._embed)
        self.state = self.text

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.target.embed(tokens) if self.heads.embed_tokens is None else self.heads.embed_tokens(tokens)

    def _advance(self, level: int, state: State, newest: torch.Tensor) -> Advancing:
        return (yield from (self._behind_text() if isinstance(state, Eagle3TextCache) else self._deeper(state, newest)))

    def _behind_text(self) -> Advancing:
        """The level behind the text: it takes in the entries that wait, and drafts from the newest of them."""
        query, keys, values, residual = yield Product((self.heads, "entries"), self._entries, self.text.take())
        self.text.write(keys, values)
        attended = attend(query[-1:], *self.text.read())
        hidden, logits = yield Product((self.heads, "finish"), self._finish, (attended, residual[-1:]))
        return _Branches(hidden, torch.empty(1, 0, dtype=torch.bool, device=hidden.device), 1), logits

    def _deeper(self, state: _Branches, newest: torch.Tensor) -> Advancing:
        """The level behind each of n branches, that end with the tokens ``newest`` [n]."""
        rows, drafts = state.seen.shape
        positions = torch.full((rows,), self.text.entries + state.depth, device=newest.device)
        query, keys, values, residual = yield Product(
            (self.heads, "drafts"), self._drafts, (state.hidden, newest, positions)
        )
        self.text.write_drafts(keys, values, drafts)
        seen = torch.cat((state.seen, torch.eye(rows, dtype=torch.bool, device=newest.device)), dim=1)
        keys, values = self.text.read(drafts + rows)
        mask = torch.cat((seen.new_ones(rows, keys.shape[1] - drafts - rows), seen), dim=1)
        attended = attend(query, keys, values, mask)
        hidden, logits = yield Product((self.heads, "finish"), self._finish, (attended, residual))
        return _Branches(hidden, seen, state.depth + 1), logits

    def _entries(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return self.heads.project(self.heads.combine(features), self._embed(tokens), positions)

    def _drafts(self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.heads.project(hidden, self._embed(tokens), positions)

    def _finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, normalised = self.heads.finish(attended, residual)
        return state, self.vocabulary.logits(normalised)


def make_levels(context: DrafterContext, width: int, beam: int = 1) -> HeadLevels:
    """The levels of a text, by the kind of heads that its drafter was given."""
    if context.heads is None:
        raise ValueError("there are no heads to make levels from")
    if isinstance(context.heads, Eagle3DraftModel):
        return Eagle3Levels(context, context.heads, width, beam)
    return HeadLevels(context.target, context.heads, context.options.coupled, width, beam)
