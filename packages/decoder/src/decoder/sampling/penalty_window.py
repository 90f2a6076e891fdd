"""The window of the repetition penalty: the newest tokens of a text."""

from collections import deque
from collections.abc import Sequence

import torch

from decoder.kernels.transfers import upload


class PenaltyWindow:
    """The newest tokens of the text, to which the repetition penalty applies.

    Args:
        size: how many tokens a full window has; 0 when nothing is penalised.
        text: the token ids of the text so far.

    Attributes:
        tokens: the tokens in the window, the oldest first.
        counts: how often each token occurs among them, int32 [V].
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device, text: Sequence[int]):
        self.size = size
        self.tokens = deque(text[-size:] if size else ())
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._penalised: torch.Tensor | None = None
        if self.tokens:
            tokens = upload(list(self.tokens), device)
            self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def push(self, token: int) -> None:
        """Add the text's next token; the oldest one leaves a full window."""
        if not self.size:
            return
        self._penalised = None
        self.tokens.append(token)
        self.counts[token].add_(1)
        if len(self.tokens) > self.size:
            self.counts[self.tokens.popleft()].sub_(1)

    @property
    def penalised(self) -> torch.Tensor | None:
        """The tokens in the window, bool [V], which must not be written to; None when nothing is penalised."""
        if self.size and self._penalised is None:
            self._penalised = self.counts > 0
        return self._penalised
