"""The window of the repetition penalty: the newest tokens of a sequence."""

from collections import deque
from collections.abc import Sequence

import torch

from decoder.backends.transfers import upload


class PenaltyWindow:
    """The newest tokens of the sequence, to which the repetition penalty applies.

    Args:
        size: how many tokens a full window has; 0 when nothing is penalised.
        sequence: the token ids of the sequence so far.

    Attributes:
        tokens: the tokens in the window, the oldest first.
        counts: how often each token occurs among them, int32 [V].
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device, sequence: Sequence[int]):
        self.size = size
        self.tokens = deque(sequence[-size:] if size else ())
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        if self.tokens:
            tokens = upload(list(self.tokens), device)
            self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        self._penalised: torch.Tensor | None = self.counts > 0
        # NumPy changes a single number of a tensor on the host in a fraction of what PyTorch takes.
        self._host = (self.counts.numpy(), self._penalised.numpy()) if device.type == "cpu" else None

    def push(self, token: int) -> None:
        """Add the sequence's next token; the oldest one leaves a full window."""
        if not self.size:
            return
        self.tokens.append(token)
        self._count(token, 1)
        if len(self.tokens) > self.size:
            self._count(self.tokens.popleft(), -1)

    def _count(self, token: int, change: int) -> None:
        if self._host is not None:
            counts, penalised = self._host
            counts[token] += change
            penalised[token] = counts[token] > 0
        else:
            self.counts[token].add_(change)
            self._penalised = None

    @property
    def penalised(self) -> torch.Tensor | None:
        """The tokens in the window, bool [V], to be read before the next push; None when nothing is penalised."""
        if not self.size:
            return None
        if self._penalised is None:
            self._penalised = self.counts > 0
        return self._penalised
