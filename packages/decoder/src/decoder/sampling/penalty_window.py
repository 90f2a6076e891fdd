"""The repetition penalty's memory: the newest tokens of a text."""

from collections import deque
from collections.abc import Sequence

import torch

from decoder.kernels.transfers import upload


class PenaltyWindow:
    """The newest tokens of the text, which the repetition penalty is for.

    Args:
        size: tokens of a full window; 0 when nothing is penalised.
        text: what came before, of which the newest tokens are in the window.

    Attributes:
        tokens: the oldest first.
        counts: how often each token stands among them, int32 [V].
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
        """Take in the text's next token; the oldest one leaves a full window."""
        if not self.size:
            return
        self._penalised = None
        self.tokens.append(token)
        self.counts[token].add_(1)
        if len(self.tokens) > self.size:
            self.counts[self.tokens.popleft()].sub_(1)

    @property
    def penalised(self) -> torch.Tensor | None:
        """The tokens in it, bool [V], not to be written to; None when nothing is penalised."""
        if self.size and self._penalised is None:
            self._penalised = self.counts > 0
        return self._penalised
