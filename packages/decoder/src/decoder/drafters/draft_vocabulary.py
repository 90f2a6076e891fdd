"""The tokens that heads draft, all or some, and the part of the language-model head that tells them apart."""

import torch
from torch import nn

from decoder.draft_heads import DraftHeads
from decoder.model.target import Target
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.sampler import Sampler


class DraftVocabulary:
    """Scores of the v tokens that heads draft, and whose ids they are.

    Of a part of the vocabulary a level reads v rows of the language-model head, of which this is a contiguous copy,
    and the penalty window, the suppressed tokens and the noise are looked up by the tokens' ids: a score is what the
    whole vocabulary's would be there.

    Args:
        target: the model the heads are for.
        draft_to_target: ids of the tokens drafted, int64 [v], ascending; None drafts all.

    Attributes:
        size: v.
    """

    def __init__(self, target: Target, draft_to_target: torch.Tensor | None):
        self.target, self._ids = target, draft_to_target
        self.size = target.vocab_size if draft_to_target is None else len(draft_to_target)
        self._rows: nn.Linear | None = None
        self._copied: tuple[int, int] | None = None  # of which weights the rows are a copy
        if draft_to_target is not None:
            biased = getattr(target.lm_head, "bias", None) is not None
            self._rows = nn.Linear(target.hidden_size, self.size, biased, device="meta")
            self._copy()
            target.speed_up(self._rows)

    @classmethod
    def of(cls, target: Target, heads: DraftHeads) -> "DraftVocabulary":
        """The one of ``heads``, made the first time; its rows are as the model's weights are now."""
        found = target.draft_vocabularies.get(heads)
        if found is None or found._ids is not heads.draft_to_target:
            found = target.draft_vocabularies[heads] = cls(target, heads.draft_to_target)
        found.refresh()
        return found

    def refresh(self) -> None:
        """Take in what the user has changed in the language-model head."""
        if self._rows is not None and self._copied != self._state():
            self._copy()
            self.target.refresh_weights()

    def _state(self) -> tuple[int, int]:
        """Changes whenever the language-model head's weights do, where PyTorch keeps count of it."""
        weight = self.target.lm_head.weight
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version

    @torch.no_grad()
    def _copy(self) -> None:
        weight, bias = self.target.lm_head.weight, getattr(self.target.lm_head, "bias", None)
        self._copied = self._state()
        self._rows.weight = nn.Parameter(weight[self._ids], requires_grad=False)
        if bias is not None:
            self._rows.bias = nn.Parameter(bias[self._ids], requires_grad=False)

    def logits(self, normalised: torch.Tensor) -> torch.Tensor:
        """Logits [..., v] of the tokens drafted, of normalised hidden states [..., d]."""
        return self.target.head(normalised, self._rows)

    def scores(
        self, logits: torch.Tensor, sampler: Sampler, coupled: bool, context: DraftContext, skip: int = 0
    ) -> torch.Tensor:
        """`Sampler.draft_scores` of the tokens drafted, float64 [n, v], for their logits [n, v]."""
        return sampler.draft_scores(logits, coupled, context, self._ids, skip)

    def branch_scores(
        self, logits: torch.Tensor, sampler: Sampler, coupled: bool, context: DraftContext, drafted: torch.Tensor
    ) -> torch.Tensor:
        """`Sampler.branch_scores` of the tokens drafted, float32 [n, v]; ``drafted`` [n, length] are target ids."""
        return sampler.branch_scores(logits, coupled, context, drafted, self._ids)

    def token_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target ids, int64 of the same shape, of tokens counted among those drafted."""
        return places if self._ids is None else self._ids[places]
