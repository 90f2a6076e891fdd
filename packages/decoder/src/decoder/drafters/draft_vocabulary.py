"""The tokens that heads draft, all of the vocabulary or some, and the rows of the language-model head for them."""

import torch
from torch import nn

from decoder.backends.base import Forwards
from decoder.backends.native.levels import NativeLevels
from decoder.backends.native.packed_linear import DraftRows
from decoder.backends.native.quantised import QuantisedLinear
from decoder.heads import Heads
from decoder.model.target import Target
from decoder.parallel.sharding import own_part, whole
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler


class DraftVocabulary:
    """Computes scores for the v tokens that heads draft, and maps their indices to token ids.

    If these are a part of the vocabulary, a level of heads reads only their v rows of the language-model head, of which
    this holds a contiguous copy. Penalty window, suppressed tokens and noise are looked up by token id, so a token's
    score is the same as if the whole vocabulary were drafted.

    Args:
        target: the model that the heads are for.
        draft_to_target: the ids of the drafted tokens, int64 [v]; None drafts all tokens.
        own_head: the language-model head of the heads' own, if they have one; it replaces the target's.

    Attributes:
        size: v, the number of drafted tokens.
        ids: their ids, int64 [v]; None if they are all.
        rows: the layer with their rows of the language-model head; None if the heads have their own.
    """

    def __init__(self, target: Target, draft_to_target: torch.Tensor | None, own_head: nn.Linear | None = None):
        self.target, self.ids, self._own_head = target, draft_to_target, own_head
        self.size = target.vocab_size if draft_to_target is None else len(draft_to_target)
        self.rows = target.lm_head if own_head is None else None
        self._rows: nn.Linear | None = None  # a copy of some
        self._copied: tuple[int, int] | None = None  # the `_state` of the weights that the rows were copied from
        if draft_to_target is not None and own_head is None:
            biased = getattr(target.lm_head, "bias", None) is not None
            self._rows = DraftRows(target.hidden_size, self.size, biased, device="meta")
            self.rows = self._rows
            self._copy()
            target.speed_up(self._rows)
        self._native: tuple[Forwards, NativeLevels | None] | None = None  # and for which packed weights

    @classmethod
    def of(cls, target: Target, heads: Heads) -> "DraftVocabulary":
        """The draft vocabulary of ``heads``, made when first asked for and brought up to date with the weights."""
        found = target.draft_vocabularies.get(heads)
        if found is None or found.ids is not heads.draft_to_target:
            found = target.draft_vocabularies[heads] = cls(
                target, heads.draft_to_target, getattr(heads, "lm_head", None)
            )
        found.refresh()
        return found

    def refresh(self) -> None:
        """Copy the rows again if the user has changed the language-model head."""
        if self._rows is not None and self._copied != self._state():
            self._copy()
            self.target.refresh_weights()

    def _state(self) -> tuple[int, int]:
        """A value that changes with the weights of the language-model head, as far as PyTorch counts their versions."""
        weight = own_part(self.target.lm_head.weight)
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version

    @torch.no_grad()
    def _copy(self) -> None:
        head, bias = self.target.lm_head, getattr(self.target.lm_head, "bias", None)
        self._copied = self._state()
        rows = head.rows(self.ids).to(head.dtype) if isinstance(head, QuantisedLinear) else whole(head.weight)[self.ids]
        self._rows.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            self._rows.bias = nn.Parameter(whole(bias)[self.ids], requires_grad=False)

    def logits(self, normalised: torch.Tensor) -> torch.Tensor:
        """Logits [..., v] of the drafted tokens, from normalised hidden states [..., d]."""
        return self.target.head(normalised, self.rows) if self._own_head is None else self._own_head(normalised)

    def native(self, heads: Heads) -> NativeLevels | None:
        """The levels of the heads by the native library, if it can run them. The model must be patched."""
        backend = self.target.backend
        if self._native is None or self._native[0] is not backend.called:
            self._native = backend.called, backend.levels(heads, self)
        return self._native[1]

    def scores(
        self, logits: torch.Tensor, sampler: Sampler, coupled: bool, context: DraftContext, skip: int = 0
    ) -> torch.Tensor:
        """`Sampler.draft_scores` of the tokens drafted, float64 [n, v], for their logits [n, v]."""
        return sampler.draft_scores(logits, coupled, context, self.ids, skip, weak=True)

    def branch_scores(
        self, logits: torch.Tensor, sampler: Sampler, coupled: bool, context: DraftContext, drafted: torch.Tensor
    ) -> torch.Tensor:
        """`Sampler.branch_scores` of the tokens drafted, float32 [n, v]; ``drafted`` [n, length] are target ids."""
        return sampler.branch_scores(logits, coupled, context, drafted, self.ids)

    def token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """The token ids, int64 of the same shape, of ``indices`` into the drafted tokens."""
        return indices if self.ids is None else self.ids[indices]
