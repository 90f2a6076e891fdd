"""The draft context: a sequence with drafted tokens behind it, and the penalty window and noise to rank more drafts."""

from collections.abc import Callable, Sequence

import torch

from decoder.backends.transfers import upload
from decoder.sampling.conditions import Conditions
from decoder.sampling.host_rows import above_zero, copied
from decoder.sampling.noise import NoiseRows
from decoder.sampling.penalty_window import PenaltyWindow

Allowed = Callable[[Sequence[int]], torch.Tensor | None]
"""Given drafted tokens behind a sequence: the tokens that may follow them, bool [V]; None where all may."""


class DraftContext:
    """A sequence with drafted tokens behind it, some of which may be known to the device only.

    Nothing here waits for the device. A context is valid until the sequence itself goes on.

    Args:
        window: the sequence's penalty window, which is not changed.
        noise: the sequence's noise.
        sequence: the token ids of the sequence.
        output: the tokens of the output, as a window that holds them all; of size 0 where they do not matter.
        allowed: which tokens may follow; None where all may.
    """

    def __init__(
        self,
        window: PenaltyWindow,
        noise: NoiseRows,
        sequence: Sequence[int],
        output: PenaltyWindow,
        allowed: Allowed | None = None,
    ):
        self._window, self._counts = window, window.counts
        self._output, self._output_counts, self._allowed = output, output.counts, allowed
        self._noise, self._sequence = noise, sequence
        self._tokens: list[int | torch.Tensor] = []
        self._one: torch.Tensor | None = None
        # What a verification has added whose results the host has not read: how many tokens, and the last of them.
        self._added: torch.Tensor | None = None
        self._most_added = 0
        self._newest: torch.Tensor | None = None

    @classmethod
    def behind_verification(
        cls,
        base: "DraftContext",
        added: torch.Tensor,
        most_added: int,
        newest: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> "DraftContext":
        """The context of ``base`` with the tokens of a verification that the host has not read.

        Tokens that are pushed to it enter the penalty window but none leaves it, which is good enough to rank drafts.

        Args:
            added: how many tokens the verification has added, int64 [1] on the device, from 1 to ``most_added``.
            newest: the last one of them, int64 [1] on the device.
            counts: how often each token occurs in the penalty window behind them, int32 [V]; None without a penalty.
        """
        context = cls(base._window, base._noise, base._sequence, base._output)
        context._added, context._most_added, context._newest = added, most_added, newest
        if counts is not None:
            context._counts = counts
        return context

    def push(self, token: int | torch.Tensor) -> None:
        """Append a drafted token: an id, or an int64 tensor [1] that holds one."""
        self._tokens.append(token)
        if self._output.size:
            if self._output_counts is self._output.counts:
                self._output_counts = copied(self._output_counts)
            self._count(self._output_counts, token, 1)
        size, within = self._window.size, self._window.tokens
        if not size:
            return
        if self._counts is self._window.counts:
            self._counts = copied(self._counts)
        self._count(self._counts, token, 1)
        leaving = len(within) + len(self._tokens) - size - 1
        if self._added is not None or leaving < 0:
            return
        left = within[leaving] if leaving < len(within) else self._tokens[leaving - len(within)]
        self._count(self._counts, left, -1)

    @property
    def position(self) -> int:
        """That of the next token, where the host knows the sequence."""
        return len(self._sequence) + len(self._tokens)

    def newest(self) -> torch.Tensor:
        """The last token, int64 [1]."""
        if self._newest is not None and not self._tokens:
            return self._newest
        token = self._tokens[-1] if self._tokens else self._sequence[-1]
        return token if isinstance(token, torch.Tensor) else upload([token], self._counts.device)

    def in_window(self) -> torch.Tensor | None:
        """The tokens that are penalised at the next position, bool [V]; None when nothing is penalised."""
        if self._counts is self._window.counts:
            return self._window.penalised
        return above_zero(self._counts)

    def conditions(self) -> Conditions:
        """Those of the next position. On a device, to know what may follow is to wait for the drafted tokens."""
        counts = self._output_counts if self._output.size else None
        return Conditions(self.in_window(), counts, self.allowed())

    def allowed(self, more: Sequence[int] = ()) -> torch.Tensor | None:
        """The tokens that may follow, bool [V], with ``more`` tokens behind those pushed; None where all may."""
        return None if self._allowed is None else self._allowed([*self.drafted, *more])

    @property
    def drafted(self) -> list[int]:
        """The tokens that were pushed, which the host then waits for."""
        return [int(token) for token in self._tokens]

    def noise(self, count: int, skip: int = 0, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The noise of ``count`` positions, float64 [count, V], the first of them ``skip`` behind the next position.

        If ``token_ids`` [v] are given, it is that of these tokens alone, [count, v]; the same tensor in all calls of a
        sequence makes noise that is computed once serve many.
        """
        start = len(self._tokens) + skip
        # Noise is made for many positions at once, from the end of the sequence on, so that the next step finds its
        # own.
        if self._added is None:
            return self._noise.rows(len(self._sequence), count, start, token_ids)
        rows = self._noise.rows(len(self._sequence), self._most_added + start + count, 0, token_ids)
        return rows.index_select(0, self._added + torch.arange(start, start + count, device=rows.device))

    def _count(self, counts: torch.Tensor, token: int | torch.Tensor, change: int) -> None:
        if isinstance(token, int):
            counts[token].add_(change)
        else:
            if self._one is None:
                self._one = counts.new_ones(1)
            counts.index_add_(0, token, self._one, alpha=change)
